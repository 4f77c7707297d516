"""Packed 2:4 matrices: half of the values and two bits a value for where they stand.

`cpu.py` holds the layouts, `triton.py` prunes and packs in one read for cuSPARSELt on compute
capability 9.0, `bitmask.py` has the formats that store a mask, `interop.py` torch's tensor class,
`cpu_operators.py` torch's 2:4 operators for the CPU.
"""

from dataclasses import dataclass, field

import torch

from common_kernels import backend as backends
from common_kernels import checks
from common_kernels.library import custom_op
from common_kernels.pack import cpu

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
)


@dataclass(frozen=True, eq=False)
class Packed24:
    """A 2:4 matrix of `shape` [rows, columns], compressed along its columns.

    values: `[rows, columns / 2]`, two of each group of four in ascending order of columns.
    meta: their positions, `[rows, ceil(columns / 8) bytes]` in words of the layout's type, in the
        layout's order (`cpu.py`): `neutral` row by row (uint8), any size and type;
        `cutlass_sm80` as torch's CUTLASS operators have it (int16, for one-byte types int32);
        `cutlass_sm90` CUTLASS' for Hopper and one-byte types (uint8); `cusparselt_sm90`
        cuSPARSELt's for Hopper, one and two-byte types (uint8), right behind the values in memory.

    A group with fewer than two kept entries has a stored zero in the place of the second; which
    place that is, is the packer's choice (ours: `cpu.choose`), so compare what is unpacked.
    ValueError if the parts do not belong together.

    buffer: the bytes of values and metadata together; layout `cusparselt_sm90` has it and no other.
    """

    values: torch.Tensor
    meta: torch.Tensor
    shape: tuple[int, int]
    layout: str
    buffer: torch.Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        checks.one_device(values=self.values, meta=self.meta)
        rows, columns = self.shape
        word = check_form(self.shape, self.values.dtype, self.layout).word
        meta_shape = (rows, cpu.row_bytes(columns) // word.itemsize)
        for name, tensor, shape, dtype in (
            ("values", self.values, (rows, columns // 2), self.values.dtype),
            ("meta", self.meta, meta_shape, word),
        ):
            if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
                raise ValueError(
                    f"{name} of a {tuple(self.shape)} matrix in layout {self.layout!r} must be "
                    f"contiguous {dtype} of shape {shape}, not {tensor.dtype} of "
                    f"{tuple(tensor.shape)} with strides {tensor.stride()}"
                )

        if (self.layout == "cusparselt_sm90") == (self.buffer is None):
            raise ValueError(
                "a matrix has a buffer in layout 'cusparselt_sm90', where values and metadata are "
                "views of it, and in no other: make it with pack24, convert24 or from_blob"
            )

    @property
    def blob(self) -> torch.Tensor:
        """`[rows, ...]` of values' dtype: values, then metadata, as `torch._cslt_compress` gives.

        A view. ValueError for a layout without a buffer.
        """
        if self.buffer is None:
            raise ValueError(
                f"layout {self.layout!r} has no blob; convert24(packed, 'cusparselt_sm90') has"
            )
        rows, columns = self.shape
        dtype = self.values.dtype
        return self.buffer.view(dtype).view(rows, columns // 2 + columns // 8 // dtype.itemsize)


def from_blob(blob: torch.Tensor, columns: int) -> Packed24:
    """The matrix [rows, columns] of a blob in cuSPARSELt's order for compute capability 9.0.

    blob: `[rows, columns / 2 + columns / 8 / bytes of a value]`, contiguous, as
    `torch._cslt_compress` returns it there. Its memory is shared.
    """
    check_form((blob.shape[0], columns), blob.dtype, "cusparselt_sm90")
    shape = (blob.shape[0], columns // 2 + columns // 8 // blob.element_size())
    if blob.shape != shape or not blob.is_contiguous():
        raise ValueError(
            f"the blob of a {(blob.shape[0], columns)} matrix of {blob.dtype} is contiguous, of "
            f"shape {shape}, not {tuple(blob.shape)} with strides {blob.stride()}"
        )
    return _split(blob.view(-1).view(torch.uint8), (blob.shape[0], columns), blob.dtype)


def pack24(
    x: torch.Tensor, mask: torch.Tensor, layout: str = "neutral", *, backend: str | None = None
) -> Packed24:
    """x [rows, columns] where mask is True, compressed.

    x: fp64, fp32, bf16, fp16, fp8 or int8, of any strides; its entries keep all of their bits.
    mask: bool, at most two True in each group of four along the columns. What is packed follows
    from it alone: a kept zero is stored in its place, a NaN that is not kept is gone.

    Raises TypeError for another dtype, ValueError for a mask that keeps more (the first such group
    is named; during the capture of a CUDA graph, which cannot read it, nothing is checked) and for
    a shape that the layout cannot hold.
    """
    if x.dtype not in DTYPES:
        raise TypeError(f"x must be one of {', '.join(map(str, DTYPES))}, not {x.dtype}")
    if x.ndim != 2:
        raise ValueError(f"x must have two dims, not shape {tuple(x.shape)}")
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool, not {mask.dtype}")
    checks.same_shape(x, mask, "x and mask")
    shape = (x.shape[0], x.shape[1])
    check_form(shape, x.dtype, layout)
    name = backends.resolve(checks.one_device(x=x, mask=mask), backend)
    buffer = _pack24(x, mask, layout, name)
    return _split(buffer, shape, x.dtype, layout)


def unpack24(packed: Packed24) -> torch.Tensor:
    """The matrix [rows, columns], contiguous, with +0 where nothing is stored."""
    return _unpack24(packed.values, meta_bytes(packed), packed.layout)


def convert24(packed: Packed24, layout: str) -> Packed24:
    """The same matrix in another layout.

    The values are shared with `packed`, not copied, except into `cusparselt_sm90`, whose metadata
    lies behind them. The same layout gives `packed` itself. Raises ValueError for a shape or type
    that the layout cannot hold.
    """
    values, shape = packed.values, packed.shape
    check_form(shape, values.dtype, layout)
    if layout == packed.layout:
        return packed
    meta = _reorder_meta(
        meta_bytes(packed), *shape, values.element_size(), packed.layout, layout
    )
    if layout == "cusparselt_sm90":
        buffer = torch.cat([values.view(-1).view(torch.uint8), meta])
        return _split(buffer, shape, values.dtype)
    return Packed24(values, _words(meta, shape, values.dtype, layout), shape, layout)


def check_form(shape: tuple[int, int], dtype: torch.dtype, layout: str) -> cpu.Form:
    """The layout's form for such a matrix; ValueError if it has no place for it."""
    if layout not in cpu.LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}: choose one of {', '.join(cpu.LAYOUTS)}")
    forms = cpu.LAYOUTS[layout].forms
    if dtype.itemsize not in forms:
        sizes = " or ".join(map(str, sorted(forms)))
        raise ValueError(
            f"layout {layout!r} holds values of {sizes} bytes, not {dtype}; cast them, or choose "
            "layout 'neutral'"
        )
    form, (rows, columns) = forms[dtype.itemsize], shape
    if rows % form.rows or columns % form.columns:
        other = "" if layout == "neutral" else ", or choose layout 'neutral'"
        raise ValueError(
            f"shape {tuple(shape)}: layout {layout!r} needs rows in multiples of {form.rows} and "
            f"columns in multiples of {form.columns} for {dtype}; pad the matrix with zeros{other}"
        )
    return form


def check_mask(mask: torch.Tensor) -> None:
    """ValueError that names the first group of which `mask` [rows, columns] keeps more than two."""
    kept = cpu.as_groups(mask).sum(-1)
    if (kept > 2).any():
        row, group = (kept > 2).nonzero()[0].tolist()
        raise ValueError(
            f"the mask is not 2:4: it keeps {int(kept[row, group])} of columns {4 * group}.."
            f"{4 * group + 3} in row {row}, at most 2 can be packed; make it with nm_mask"
        )


def _split(
    buffer: torch.Tensor,
    shape: tuple[int, int],
    dtype: torch.dtype,
    layout: str = "cusparselt_sm90",
) -> Packed24:
    """The two parts of bytes that hold the values and then the metadata."""
    rows, columns = shape
    border = rows * (columns // 2) * dtype.itemsize
    values = buffer[:border].view(dtype).view(rows, columns // 2)
    meta = _words(buffer[border:], shape, dtype, layout)
    return Packed24(values, meta, shape, layout, buffer if layout == "cusparselt_sm90" else None)


def _words(
    meta: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype, layout: str
) -> torch.Tensor:
    """Metadata bytes, flat, in the layout's words."""
    word = cpu.LAYOUTS[layout].forms[dtype.itemsize].word
    return meta.view(word).view(shape[0], cpu.row_bytes(shape[1]) // word.itemsize)


def meta_bytes(packed: Packed24) -> torch.Tensor:
    """The bytes of the metadata, flat."""
    return packed.meta.view(-1).view(torch.uint8)


@custom_op("sparse24::pack24", mutates_args=())
def _pack24(x: torch.Tensor, mask: torch.Tensor, layout: str, backend: str) -> torch.Tensor:
    if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        check_mask(mask)
    # The kernel takes 64 columns at a time, and entries by way of fp32.
    fits = x.shape[1] % 64 == 0 and x.dtype in (torch.bfloat16, torch.float16)
    if backend == "triton" and layout == "cusparselt_sm90" and fits:
        from common_kernels.pack import triton

        blob = triton.pack(x.contiguous(), mask.contiguous(), "mask", x.dtype)
        return blob.view(-1).view(torch.uint8)
    return cpu.pack(x, mask, layout)


@_pack24.register_fake
def _(x, mask, layout, backend):
    rows, columns = x.shape
    size = rows * (columns // 2) * x.element_size() + rows * cpu.row_bytes(columns)
    return x.new_empty(size, dtype=torch.uint8)


@custom_op("sparse24::unpack24", mutates_args=())
def _unpack24(values: torch.Tensor, meta: torch.Tensor, layout: str) -> torch.Tensor:
    rows, columns = values.shape[0], 2 * values.shape[1]
    return cpu.expand(values, cpu.gather(meta, rows, columns, layout, values.element_size()))


@_unpack24.register_fake
def _(values, meta, layout):
    return values.new_empty(values.shape[0], 2 * values.shape[1])


@custom_op("sparse24::reorder_meta", mutates_args=())
def _reorder_meta(
    meta: torch.Tensor, rows: int, columns: int, itemsize: int, source: str, target: str
) -> torch.Tensor:
    return cpu.scatter(cpu.gather(meta, rows, columns, source, itemsize), target, itemsize)


@_reorder_meta.register_fake
def _(meta, rows, columns, itemsize, source, target):
    return torch.empty_like(meta)
