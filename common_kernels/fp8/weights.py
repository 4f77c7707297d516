"""FP8 codes of a weight and of its transpose, packed or dense, in one read of the weight.

The result equals, bit for bit, that of `quantize_fp8` and `pack24` applied to the masked weight and
to its transpose.
"""

from typing import Any

import torch
from torch import Tensor

from common_kernels import backend as backends
from common_kernels import checks
from common_kernels.compressed import expand_nm, unpack_mask
from common_kernels.fp8 import cpu as fp8
from common_kernels.library import custom_op, kernels_of, launched_by_cpp
from common_kernels.masks import nm_mask
from common_kernels.pack import BUFFERED, Packed24, cpu
from common_kernels.soft_threshold import soft_threshold24

TILE = 64  # the kernel needs multiples of this; other shapes run as plain PyTorch


def quantize24_(
    own: Packed24 | Tensor,
    other: Packed24 | Tensor,
    scales: Tensor,
    w: Tensor,
    mask: Tensor | None = None,
    amax: Tensor | None = None,
    *,
    beta: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Write the FP8 codes of w [rows, columns] under `mask`, or of beta * soft_threshold24(w), into
    `own`, and those of its transpose into `other`.

    Args:
        own: [rows, columns], packed or dense in an FP8 dtype.
        other: [columns, rows], packed or dense in an FP8 dtype.
        scales: fp32 [2], receives the scales of own and of other.
        mask: bool [rows, columns]. It must keep at most two of four along each row if `own` is
            packed and along each column if `other` is; this is not checked. None keeps all of w,
            which then cannot be packed.
        amax: fp32 [], the largest magnitude of the result if it is known; else it is searched.
        beta: fp32 [], in the place of a mask; only `own` may then be packed.
    """
    rows, columns = w.shape
    first, second = _bytes(own, rows, columns), _bytes(other, columns, rows)
    device = checks.one_device(
        w=w, mask=mask, scales=scales, amax=amax, beta=beta, own=first, other=second
    )
    name = backends.resolve_fp8(device, backend)
    kinds = own.dtype, _layout(own), other.dtype, _layout(other)
    given = scales, w, mask, beta, amax
    written = first.is_contiguous() and (second.is_contiguous() or second.t().is_contiguous())
    read = w.is_contiguous() and (mask is None or mask.is_contiguous()) and not w.requires_grad
    if name == "triton" and written and read and _fits(*w.shape, kinds[1], kinds[3]):
        formats = fp8.NAMES[own.dtype], fp8.NAMES[other.dtype]
        _by_one_kernel_(f"{formats[0]} {kinds[1]} {formats[1]} {kinds[3]}", first, second, *given)
        changed = [t for t in (first, second, scales) if not t.is_inference()]
        torch.autograd.graph.increment_version(changed)  # as any operator that writes
    else:
        _quantize24_(first, second, *kinds, *given, name)


def quantize_compressed24_(
    own: Packed24 | Tensor,
    other: Packed24 | Tensor,
    scales: Tensor,
    values: Tensor,
    row_mask: Tensor,
    column_mask: Tensor,
    n: int = 2,
    m: int = 4,
    *,
    backend: str | None = None,
) -> None:
    """Write the FP8 codes of SLoPe's operands: of W * A into `own`, of (W * A * B)^T into `other`.

    Args:
        own, other, scales: as for `quantize24_`; a packed one needs n = 2 and m = 4.
        values: [rows, columns * n / m], the entries of W that the mask A keeps.
        row_mask: uint8 [rows, columns / 8], the bits of A (`common_kernels.compressed`).
        column_mask: uint8, one bit per value, set if the mask B keeps it.
    """
    rows, columns = values.shape[0], values.shape[1] * m // n
    first, second = _bytes(own, rows, columns), _bytes(other, columns, rows)
    device = checks.one_device(
        values=values, row_mask=row_mask, column_mask=column_mask, scales=scales, own=first,
        other=second,
    )  # fmt: skip
    name = backends.resolve_fp8(device, backend)
    kinds = own.dtype, _layout(own), other.dtype, _layout(other)
    _quantize_compressed24_(
        first, second, *kinds, scales, values, row_mask, column_mask, n, m, name
    )


def _bytes(given: Packed24 | Tensor, rows: int, columns: int) -> Tensor:
    """The tensor to write: the uint8 buffer of a packed matrix, or the dense codes themselves.
    Raises ValueError for another shape."""
    if tuple(given.shape) != (rows, columns):
        raise ValueError(
            f"the codes are to be written to shape {tuple(given.shape)}, not {(rows, columns)}"
        )
    return given.buffer if isinstance(given, Packed24) else given


def _layout(given: Packed24 | Tensor) -> str:
    """The layout of a packed matrix; an arbitrary one for a dense matrix."""
    return given.layout if isinstance(given, Packed24) else BUFFERED


@custom_op("sparse24::quantize24_", mutates_args=("own", "other", "scales"))
def _quantize24_(
    own: Tensor,
    other: Tensor,
    own_dtype: torch.dtype,
    own_layout: str,
    other_dtype: torch.dtype,
    other_layout: str,
    scales: Tensor,
    w: Tensor,
    mask: Tensor | None,
    beta: Tensor | None,
    amax: Tensor | None,
    backend: str,
) -> None:
    if backend == "triton" and _fits(*w.shape, own_layout, other_layout):
        from common_kernels.fp8 import weights_triton

        mask = None if mask is None else mask.contiguous()
        with (
            weights_triton.target(own, own_dtype, own_layout, w.numel()) as first,
            weights_triton.target(
                other, other_dtype, other_layout, w.numel(), turned=True
            ) as second,
        ):
            weights_triton.quantize24_(first, second, scales, w.contiguous(), mask, beta, amax)
        return
    if beta is not None:
        pruned, mask = soft_threshold24(w).float() * beta, nm_mask(w)
    else:
        pruned = w if mask is None else torch.where(mask, w, 0.0)
    scales.copy_(_scales(pruned, own_dtype, other_dtype, amax=amax))
    _write(own, own_dtype, own_layout, scales[0], pruned, mask)
    turned = None if mask is None else mask.t()
    _write(other, other_dtype, other_layout, scales[1], pruned.t(), turned)


@launched_by_cpp(
    "quantize_weight24_(str kinds, Tensor(a!) own, Tensor(b!) other, Tensor(c!) scales, Tensor w, "
    "Tensor? mask, Tensor? beta, Tensor? amax) -> ()",
    lambda *_: None,
)
def _by_one_kernel_(kinds: str, own: Tensor, other: Tensor, *given: Tensor | None) -> None:
    _from_python(kinds, own, other, *given)


def _from_python(kinds: str, own: Tensor, other: Tensor, *given: Tensor | None) -> None:
    """`_quantize24_` for tensors that a kernel reads and writes as they are. kinds: the formats and
    layouts of own and of other."""
    fmt, layout, other_fmt, other_layout = kinds.split()
    dtypes = fp8.FORMATS[fmt], fp8.FORMATS[other_fmt]
    _quantize24_(own, other, dtypes[0], layout, dtypes[1], other_layout, *given, "triton")


@kernels_of("quantize_weight24_")
def _(*given: Any) -> None:
    (*kinds, kind), (own, other, scales, w, *rest) = given[:5], given[5:]
    mask, beta = (rest.pop(0) if kind == its else None for its in (1, 3))
    amax = rest.pop() if rest else None
    _from_python(" ".join(kinds), own, other, scales, w, mask, beta, amax)


@custom_op("sparse24::quantize_compressed24_", mutates_args=("own", "other", "scales"))
def _quantize_compressed24_(
    own: Tensor,
    other: Tensor,
    own_dtype: torch.dtype,
    own_layout: str,
    other_dtype: torch.dtype,
    other_layout: str,
    scales: Tensor,
    values: Tensor,
    row_mask: Tensor,
    column_mask: Tensor,
    n: int,
    m: int,
    backend: str,
) -> None:
    rows, columns = values.shape[0], values.shape[1] * m // n
    if backend == "triton" and (n, m) == (2, 4) and _fits(rows, columns, own_layout, other_layout):
        from common_kernels.fp8 import weights_triton

        with (
            weights_triton.target(own, own_dtype, own_layout, rows * columns) as first,
            weights_triton.target(
                other, other_dtype, other_layout, rows * columns, turned=True
            ) as second,
        ):
            weights_triton.quantize_compressed24_(
                first, second, scales, values.contiguous(), row_mask.contiguous(),
                column_mask.contiguous(),
            )  # fmt: skip
        return
    kept = unpack_mask(column_mask, values.shape[1])
    twice = torch.where(kept, values, 0.0)
    scales[0] = _scales(values, own_dtype)
    scales[1] = _scales(twice, other_dtype)
    mask, both = None, None
    if own.dtype == torch.uint8:
        mask = unpack_mask(row_mask, columns)
    if other.dtype == torch.uint8:
        both = (expand_nm(kept.to(values.dtype), row_mask) != 0).t()
    whole, twice = expand_nm(values, row_mask, n, m), expand_nm(twice, row_mask, n, m)
    _write(own, own_dtype, own_layout, scales[0], whole, mask)
    _write(other, other_dtype, other_layout, scales[1], twice.t(), both)


def _fits(rows: int, columns: int, *layouts: str) -> bool:
    whole = rows % TILE == 0 and columns % TILE == 0
    return rows * columns > 0 and whole and cpu.VENDOR not in layouts


def _scales(x: Tensor, *dtypes: torch.dtype, amax: Tensor | None = None) -> Tensor:
    """The scale of x in each dtype; the largest magnitude is searched once, unless it is given."""
    if not x.numel():
        return x.new_ones(len(dtypes), dtype=torch.float32)
    amax = fp8.amax_of(x) if amax is None else amax
    return torch.stack([fp8.scale_from(amax, fp8.NAMES[dtype]) for dtype in dtypes])


def _write(
    out: Tensor,
    dtype: torch.dtype,
    layout: str,
    scale: Tensor,
    pruned: Tensor,
    mask: Tensor | None,
) -> None:
    codes = fp8.codes_of(pruned, scale, fp8.NAMES[dtype])
    if out.dtype != torch.uint8:
        out.copy_(codes)
        return
    assert mask is not None
    out.copy_(cpu.pack(codes, mask, layout))
