"""Packed 2:4 matrices: half of the values, and two bits per value for its position.

`cpu.py` defines the layouts, of which cuSPARSELt writes one itself (`cusparselt.py`), and
`learn.py` learns its order. `triton.py` prunes and packs in one read, and `sample_triton.py` does
so for samples of gradients. `interop.py` converts to torch's tensor class.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common_kernels import backend as backends
from common_kernels import checks
from common_kernels.library import custom_op
from common_kernels.pack import cpu, learn

DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.int8),
)
BUFFERED, VENDOR = cpu.BUFFERED, cpu.VENDOR


def of_library(layout: str) -> bool:
    """True for cuSPARSELt's layouts: the known one, those that were learnt, and its own."""
    return layout.startswith(VENDOR)


@dataclass(frozen=True, eq=False)
class Packed24:
    """A 2:4 matrix of `shape` [rows, columns] with values of `dtype`, compressed along its rows.

    buffer: the bytes of the values and, after them, of the metadata, as uint8.

    A group with fewer than two kept entries also stores zeros, at positions that the packer chooses
    (ours: `cpu.choose`). Matrices of different packers are therefore compared unpacked. Raises
    ValueError if the buffer does not fit.
    """

    buffer: torch.Tensor
    shape: tuple[int, int]
    dtype: torch.dtype
    layout: str = BUFFERED

    def __post_init__(self) -> None:
        check_form(self.shape, self.dtype, self.layout)
        buffer, size = self.buffer, cpu.buffer_bytes(*self.shape, self.dtype, self.layout)
        # Asking for strides makes torch.compile trace a backward pass another way, and then take
        # autocast for disabled in all that follows.
        lies_in_rows = torch.compiler.is_compiling() or buffer.is_contiguous()
        if buffer.shape != (size,) or buffer.dtype != torch.uint8 or not lies_in_rows:
            raise ValueError(
                f"a {tuple(self.shape)} matrix of {self.dtype} in layout {self.layout!r} needs a "
                f"contiguous buffer of {size} torch.uint8, not {buffer.dtype} of "
                f"{tuple(buffer.shape)} with strides {buffer.stride()}"
            )

    @staticmethod
    def of(values: torch.Tensor, meta: torch.Tensor, layout: str) -> "Packed24":
        """The matrix of separate values `[rows, columns / 2]` and metadata, which are copied."""
        parts = [part.contiguous().view(-1).view(torch.uint8) for part in (values, meta)]
        return Packed24(torch.cat(parts), (len(values), 2 * values.shape[-1]), values.dtype, layout)

    @staticmethod
    def empty(
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | None = None,
        layout: str = BUFFERED,
    ) -> "Packed24":
        """An uninitialised packed matrix."""
        rows, columns = shape
        check_form((rows, columns), dtype, layout)
        buffer = cpu.new_buffer(rows, columns, dtype, device, layout)
        return Packed24(buffer, (rows, columns), dtype, layout)

    @property
    def values(self) -> torch.Tensor:
        """The values `[rows, columns / 2]`: two of each group of four, in column order."""
        rows, columns = self.shape
        end = rows * (columns // 2) * self.dtype.itemsize
        return self.buffer[:end].view(self.dtype).view(rows, columns // 2)

    @property
    def meta(self) -> torch.Tensor:
        """The positions of the values, `[rows, ...]`, in the layout's words (`cpu.py`).

        Layouts: `neutral`, row by row, any size and type (uint8); `cutlass_sm80`, of torch's
        CUTLASS operators (int16, for one-byte types int32); `cutlass_sm90` and
        `cutlass_sm90_k128`, of CUTLASS for Hopper, for kernels that take 64 or 128 columns at a
        time (uint8); `cusparselt_sm90`, of cuSPARSELt for Hopper, one and two-byte types (uint8).
        Raises ValueError for `cusparselt`, which cuSPARSELt alone packs and reads, on any GPU.
        """
        if self.layout == VENDOR:
            raise ValueError(f"layout {VENDOR!r} is read by cuSPARSELt's products alone")
        rows, columns = self.shape
        form = cpu.LAYOUTS[self.layout].forms[self.dtype.itemsize]
        words = self.buffer[rows * (columns // 2) * self.dtype.itemsize :].view(form.word)
        return words.view(rows, form.row_bytes(columns) // form.word.itemsize)


@dataclass(frozen=True, eq=False, kw_only=True)
class Compressed24:
    """A weight W [rows, columns] with the masks A (2:4 along rows) and B (2:4 along columns).

    values: [rows, columns / 2], the entries that A keeps.
    row_mask: uint8 [rows, columns / 8], the bits of A (`common_kernels.compressed`).
    column_mask: uint8 [rows, columns / 16], one bit per value, set if B keeps it.
    packed, transposed: receive W * A and (W * A * B)^T, packed, of one 16-bit dtype, or are None.
    """

    values: torch.Tensor
    row_mask: torch.Tensor
    column_mask: torch.Tensor
    packed: Packed24 | None = None
    transposed: Packed24 | None = None

    def __post_init__(self) -> None:
        checks.float_tensor(self.values, "values")  # they are not after `model.double()`
        packed, transposed = (out if out is None else out.buffer for out in self.operands)
        checks.one_device(
            values=self.values, row_mask=self.row_mask, column_mask=self.column_mask,
            packed=packed, transposed=transposed,
        )  # fmt: skip

    @property
    def operands(self) -> tuple[Packed24 | None, Packed24 | None]:
        return self.packed, self.transposed

    @property
    def dtype(self) -> torch.dtype:
        """The 16-bit type of the operands."""
        out = self.packed or self.transposed
        assert out is not None
        return out.dtype


def pack24(
    x: torch.Tensor, mask: torch.Tensor, layout: str = "neutral", *, backend: str | None = None
) -> Packed24:
    """Compress the entries of x [rows, columns] where mask is True.

    x: fp64, fp32, bf16, fp16, fp8 or int8, of any strides; its entries keep all of their bits.
    mask: bool, at most two True in each group of four along a row. It alone decides what is packed:
    a kept zero is stored at its position, and a NaN that is not kept is dropped.

    Raises TypeError for another dtype, and ValueError for a shape that the layout cannot hold or a
    mask that keeps more than two (the message names the first such group). While a CUDA graph is
    being captured the mask is not checked.
    """
    if x.dtype not in DTYPES:
        raise TypeError(f"x must be one of {', '.join(map(str, DTYPES))}, not {x.dtype}")
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool, not {mask.dtype}")
    checks.same_shape(x, mask, "x and mask")
    rows, columns = x.shape
    check_form((rows, columns), x.dtype, layout)
    name = backends.resolve(checks.one_device(x=x, mask=mask), backend)
    return Packed24(_pack24(x, mask, layout, name), (rows, columns), x.dtype, layout)


def unpack24(packed: Packed24) -> torch.Tensor:
    """The matrix [rows, columns], contiguous, with +0 where nothing is stored."""
    return _unpack24(packed.values, packed.meta, packed.layout)


def convert24(packed: Packed24, layout: str) -> Packed24:
    """The same matrix in another layout; `packed` itself if it has that layout.

    Raises ValueError for a shape or dtype that the layout cannot hold.
    """
    if layout == packed.layout:
        return packed
    shape, dtype = packed.shape, packed.dtype
    check_form(shape, dtype, layout)
    if layout == VENDOR:
        matrix = unpack24(packed)
        return pack24(matrix, matrix.view(cpu.INTEGERS[dtype.itemsize]) != 0, layout)
    nibbles = cpu.gather(packed.meta, *shape, packed.layout, dtype.itemsize)
    return Packed24.of(packed.values, cpu.scatter(nibbles, layout, dtype.itemsize), layout)


def check_form(shape: tuple[int, int], dtype: torch.dtype, layout: str) -> cpu.Form:
    """The layout's form for a matrix; raises ValueError if the layout cannot hold it."""
    if layout not in cpu.LAYOUTS and layout.startswith(f"{VENDOR}_learnt"):
        # By another process: rank 0, which chooses for all, or the one that saved a model.
        learn.layout_on(torch.empty(0, device="cuda" if "sm" in layout else "cpu").device)
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


@custom_op("sparse24::pack24", mutates_args=())
def _pack24(x: torch.Tensor, mask: torch.Tensor, layout: str, backend: str) -> torch.Tensor:
    if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        kept = cpu.as_groups(mask).sum(-1)
        if (kept > 2).any():
            row, group = (kept > 2).nonzero()[0].tolist()
            raise ValueError(
                f"the mask is not 2:4: it keeps {int(kept[row, group])} of columns {4 * group}.."
                f"{4 * group + 3} in row {row}, at most 2 can be packed; make it with nm_mask"
            )
    # The kernel takes 64 columns at a time and converts entries to fp32 and back.
    fits = x.shape[1] % 64 == 0 and x.dtype in (torch.bfloat16, torch.float16)
    if backend == "triton" and fits and x.shape[0] % 64 == 0 and layout not in (VENDOR, "neutral"):
        from common_kernels.pack import triton

        return triton.pack(x.contiguous(), mask.contiguous(), "mask", x.dtype, layout=layout)
    return cpu.pack(x, mask, layout)


@_pack24.register_fake
def _(x, mask, layout, backend):
    return cpu.new_buffer(x.shape[0], x.shape[1], x.dtype, x.device, layout)


@custom_op("sparse24::unpack24", mutates_args=())
def _unpack24(values: torch.Tensor, meta: torch.Tensor, layout: str) -> torch.Tensor:
    rows, columns = values.shape[0], 2 * values.shape[1]
    return cpu.expand(values, cpu.gather(meta, rows, columns, layout, values.element_size()))


@_unpack24.register_fake
def _(values, meta, layout):
    return values.new_empty(values.shape[0], 2 * values.shape[1])
