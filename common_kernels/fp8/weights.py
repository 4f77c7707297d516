"""FP8 codes of a weight and of its transpose, packed or dense, in one read of the weight.

Bit for bit the result of `quantize_fp8` and `pack24` of the masked weight and its transpose.
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
    kinds, first, second = _written(own, other, *w.shape)
    device = checks.one_device(
        w=w, mask=mask, scales=scales, amax=amax, beta=beta, own=first, other=second
    )
    name = backends.resolve_fp8(device, backend)
    if not _fits(kinds, first, second, *w.shape):
        name = "cpu"
    mask = None if mask is None else mask.contiguous()
    given = kinds, first, second, scales, w.contiguous(), mask, beta, amax
    if name == "triton" and not w.requires_grad:
        _by_one_kernel_(*given)
        changed = [t for t in (first, second, scales) if not t.is_inference()]
        torch.autograd.graph.increment_version(changed)  # as any operator that writes
    else:
        _quantize24_(*given, name)


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
    shape = values.shape[0], values.shape[1] * m // n
    kinds, first, second = _written(own, other, *shape)
    device = checks.one_device(
        values=values, row_mask=row_mask, column_mask=column_mask, scales=scales, own=first,
        other=second,
    )  # fmt: skip
    name = backends.resolve_fp8(device, backend)
    if (n, m) != (2, 4) or not _fits(kinds, first, second, *shape):
        name = "cpu"
    masks = row_mask.contiguous(), column_mask.contiguous()
    _quantize_compressed24_(kinds, first, second, scales, values.contiguous(), *masks, n, m, name)


def _written(
    own: Packed24 | Tensor, other: Packed24 | Tensor, rows: int, columns: int
) -> tuple[str, Tensor, Tensor]:
    """The formats and layouts of own and of other, four words, and the tensors to write: the uint8
    buffer of a packed matrix, or the dense codes themselves, whose layout is an arbitrary one.
    Raises ValueError for another shape."""
    words: list[str] = []
    written: list[Any] = []
    for given, shape in (own, (rows, columns)), (other, (columns, rows)):
        if tuple(given.shape) != shape:
            raise ValueError(
                f"the codes are to be written to shape {tuple(given.shape)}, not {shape}"
            )
        packed = given if isinstance(given, Packed24) else None
        words += [fp8.NAMES[given.dtype], packed.layout if packed else BUFFERED]
        written.append(packed.buffer if packed else given)
    return " ".join(words), written[0], written[1]


@custom_op("sparse24::quantize24_", mutates_args=("own", "other", "scales"))
def _quantize24_(
    kinds: str,
    own: Tensor,
    other: Tensor,
    scales: Tensor,
    w: Tensor,
    mask: Tensor | None,
    beta: Tensor | None,
    amax: Tensor | None,
    backend: str,
) -> None:
    if backend == "triton":
        from common_kernels.fp8 import weights_triton

        kind, given = ("whole", (w,)) if mask is None else ("mask", (w, mask))
        if beta is not None:
            kind, given = "soft", (w, beta)
        weights_triton.write(kinds, (own, other), scales, kind, given, amax)
        return
    fmt, layout, other_fmt, other_layout = kinds.split()
    if beta is not None:
        pruned, mask = soft_threshold24(w).float() * beta, nm_mask(w)
    else:
        pruned = w if mask is None else torch.where(mask, w, 0.0)
    scales.copy_(_scales(pruned, fmt, other_fmt, amax=amax))
    _write(own, fmt, layout, scales[0], pruned, mask)
    turned = None if mask is None else mask.t()
    _write(other, other_fmt, other_layout, scales[1], pruned.t(), turned)


@launched_by_cpp(
    "quantize_weight24_(str kinds, Tensor(a!) own, Tensor(b!) other, Tensor(c!) scales, Tensor w, "
    "Tensor? mask, Tensor? beta, Tensor? amax) -> ()",
    lambda *_: None,
)
def _by_one_kernel_(*given: Any) -> None:
    _quantize24_(*given, "triton")


@kernels_of("quantize_weight24_")
def _(*given: Any) -> None:
    (*kinds, kind), (own, other, scales, w, *rest) = given[:5], given[5:]
    mask, beta = (rest.pop(0) if kind == its else None for its in (1, 3))
    amax = rest.pop() if rest else None
    _quantize24_(" ".join(kinds), own, other, scales, w, mask, beta, amax, "triton")


@custom_op("sparse24::quantize_compressed24_", mutates_args=("own", "other", "scales"))
def _quantize_compressed24_(
    kinds: str,
    own: Tensor,
    other: Tensor,
    scales: Tensor,
    values: Tensor,
    row_mask: Tensor,
    column_mask: Tensor,
    n: int,
    m: int,
    backend: str,
) -> None:
    if backend == "triton":
        from common_kernels.fp8 import weights_triton

        given = values, row_mask, column_mask
        weights_triton.write(kinds, (own, other), scales, "bits", given)
        return
    fmt, layout, other_fmt, other_layout = kinds.split()
    kept = unpack_mask(column_mask, values.shape[1])
    twice = torch.where(kept, values, 0.0)
    scales[0] = _scales(values, fmt)
    scales[1] = _scales(twice, other_fmt)
    mask = unpack_mask(row_mask, values.shape[1] * m // n)
    both = (expand_nm(kept.to(values.dtype), row_mask, n, m) != 0).t()
    whole, twice = expand_nm(values, row_mask, n, m), expand_nm(twice, row_mask, n, m)
    _write(own, fmt, layout, scales[0], whole, mask)
    _write(other, other_fmt, other_layout, scales[1], twice.t(), both)


def _fits(kinds: str, own: Tensor, other: Tensor, rows: int, columns: int) -> bool:
    """True if the kernel can write the codes as they lie in memory."""
    lies = own.is_contiguous() and (other.is_contiguous() or other.t().is_contiguous())
    whole = rows % TILE == 0 and columns % TILE == 0 and rows * columns > 0
    return lies and whole and cpu.VENDOR not in kinds.split()


def _scales(x: Tensor, *formats: str, amax: Tensor | None = None) -> Tensor:
    """The scale of x in each format; the largest magnitude is searched once, unless it is given."""
    if not x.numel():
        return x.new_ones(len(formats), dtype=torch.float32)
    amax = fp8.amax_of(x) if amax is None else amax
    return torch.stack([fp8.scale_from(amax, fmt) for fmt in formats])


def _write(
    out: Tensor, fmt: str, layout: str, scale: Tensor, pruned: Tensor, mask: Tensor | None
) -> None:
    codes = fp8.codes_of(pruned, scale, fmt)
    if out.dtype == torch.uint8:
        assert mask is not None
        codes = cpu.pack(codes, mask, layout)
    out.copy_(codes)
