"""Operands of the products of training, pruned and packed in one read, in place.

They are packed in one buffer (`Packed24.empty`), in layout `cusparselt_sm90`, or in `cutlass_sm90`
or `cutlass_sm90_k128`, rows and columns in multiples of 64 and of what the layout needs.
What is written here is what the operators on dense tensors and `pack24` would give, to the bit; the
path in PyTorch does just that. Nothing here waits for a GPU: that a mask is 2:4 is not checked.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from common_kernels import backend as backends
from common_kernels import checks, compressed
from common_kernels.library import custom_op
from common_kernels.masks import nm_mask, transposable_mask24
from common_kernels.mvue import mvue24
from common_kernels.pack import BUFFERED, Packed24, check_form, cpu
from common_kernels.soft_threshold import soft_threshold24

Out = TypeVar("Out", Tensor, Tensor | None)
SOURCES = ("magnitude", "soft", "mask")
MULTIPLE = 64
TOKENS = 16  # a sample of dY is summed over a multiple of this in cuSPARSELt's layout


def pack24_(
    out: Packed24,
    w: Tensor,
    source: str,
    mask: Tensor | None = None,
    scale: Tensor | None = None,
    dense: Tensor | None = None,
    *,
    backend: str | None = None,
) -> None:
    """Write `w` [rows, columns], pruned along its columns, into `out`.

    source: `magnitude` keeps what nm_mask(w) keeps, `mask` what `mask` keeps (at most two of four,
        unchecked), `soft` packs soft_threshold24(w).
    mask: bool [rows, columns], or the bits of one, pack_mask(mask).
    scale: fp32 []; the pruned matrix is multiplied by it in fp32, before the cast to out's dtype.
    dense: [rows, columns] of out's dtype; receives the pruned matrix as well, +0 where nothing is
        kept.
    """
    checks.float_tensor(w, "w")
    if source not in SOURCES:
        raise ValueError(f"unknown source {source!r}: choose one of {', '.join(SOURCES)}")
    if (mask is not None) != (source == "mask"):
        raise ValueError("give a mask with source='mask', and only then")
    _check(out, w, mask)
    if dense is not None and (dense.shape != w.shape or dense.dtype != out.dtype):
        raise ValueError(
            f"dense must be {out.dtype} {tuple(w.shape)}, not {dense.dtype} {tuple(dense.shape)}"
        )
    buffer = out.buffer
    device = checks.one_device(out=buffer, w=w, mask=mask, scale=scale, dense=dense)
    name = backends.resolve(device, backend)
    _pack24_(buffer, out.dtype, out.layout, w, source, mask, scale, dense, name)


@custom_op("sparse24::pack24_", mutates_args=("buffer", "dense"))
def _pack24_(
    buffer: Tensor,
    dtype: torch.dtype,
    layout: str,
    w: Tensor,
    source: str,
    mask: Tensor | None,
    scale: Tensor | None,
    dense: Tensor | None,
    backend: str,
) -> None:
    if backend == "triton":
        from common_kernels.pack import triton

        mask = None if mask is None else mask.contiguous()
        with row_major(dense) as written:
            triton.pack(w.contiguous(), mask, source, dtype, scale, buffer, written, layout)
        return
    if source == "soft":
        # What is below the threshold is zero, and counts as pruned for the positions no less.
        kept, pruned = nm_mask(w), soft_threshold24(w)
    else:
        kept = nm_mask(w) if mask is None else _bools(mask, w)
        pruned = torch.where(kept, w, 0.0)
    if scale is not None:
        pruned = pruned.float() * scale
    pruned = pruned.to(dtype)
    _write(buffer, pruned, kept, layout)
    if dense is not None:
        dense.copy_(torch.where(kept, pruned, 0.0))


@_pack24_.register_fake
def _(buffer, dtype, layout, w, source, mask, scale, dense, backend):
    return None


def pack_both24_(
    out: Packed24,
    transposed: Packed24,
    w: Tensor,
    mask: Tensor | None = None,
    *,
    backend: str | None = None,
) -> None:
    """Write `w` [rows, columns] under a transposable mask into `out`, and w^T into `transposed`.

    mask: bool [rows, columns], or the bits of one, pack_mask(mask); 2:4 along both dims
        (unchecked). None for the best one, transposable_mask24(w).
    out, transposed: of the same 16-bit type.
    """
    checks.float_tensor(w, "w")
    _check(out, w, mask)
    _check_out(transposed, *w.shape[::-1])
    buffers = out.buffer, transposed.buffer
    device = checks.one_device(out=buffers[0], transposed=buffers[1], w=w, mask=mask)
    name = backends.resolve(device, backend)
    _pack_both24_(*buffers, out.dtype, out.layout, transposed.layout, w, mask, name)


@custom_op("sparse24::pack_both24_", mutates_args=("buffer", "transposed"))
def _pack_both24_(
    buffer: Tensor,
    transposed: Tensor,
    dtype: torch.dtype,
    layout: str,
    layout_transposed: str,
    w: Tensor,
    mask: Tensor | None,
    backend: str,
) -> None:
    if backend == "triton":
        from common_kernels.pack import triton

        mask = None if mask is None else mask.contiguous()
        layouts = layout, layout_transposed
        triton.pack_both(w.contiguous(), mask, dtype, (buffer, transposed), layouts)
        return
    kept = transposable_mask24(w) if mask is None else _bools(mask, w)
    pruned = torch.where(kept, w, 0.0).to(dtype)
    _write(buffer, pruned, kept, layout)
    _write(transposed, pruned.t().contiguous(), kept.t().contiguous(), layout_transposed)


@_pack_both24_.register_fake
def _(buffer, transposed, dtype, layout, layout_transposed, w, mask, backend):
    return None


def sample_pack24(
    dy: Tensor,
    key: Tensor,
    stride: int = 1,
    *,
    dtype: torch.dtype | None = None,
    layout: str = BUFFERED,
    backend: str | None = None,
) -> Packed24:
    """The transpose of mvue24(dy, key[0], key[1] * stride, dim=0), packed: no transposed copy.

    dy: [tokens, out] row-major; tokens are filled up with zeros to a multiple of 16, or to the
        columns that `layout` needs.
    key: int64 [2]; key[1] * stride must be a multiple of 4. dtype: of the result, 16-bit; dy's.
    """
    dtype = dtype or dy.dtype
    dy = whole_blocks(dy, key, dtype, layout)
    name = backends.resolve(checks.one_device(dy=dy, key=key), backend)
    buffer = _sample_pack24(dy, key, stride, dtype, layout, name)
    return Packed24((buffer,), (dy.shape[1], dy.shape[0]), dtype, layout)


def whole_blocks(dy: Tensor, key: Tensor, dtype: torch.dtype, layout: str) -> Tensor:
    """`dy`, contiguous, with as many tokens as a packed sample of it has. Raises ValueError or
    TypeError unless it can be sampled with `key`."""
    checks.float_tensor(dy, "dy")
    if dy.ndim != 2 or dy.shape[1] % MULTIPLE:
        raise ValueError(f"dy must be [tokens, a multiple of {MULTIPLE}], not {tuple(dy.shape)}")
    if key.shape != (2,) or key.dtype != torch.int64:
        raise TypeError(f"key must be int64 [2], not {key.dtype} {tuple(key.shape)}")
    return fill_up(dy, -dy.shape[0] % tokens_multiple(layout, dtype)).contiguous()


def tokens_multiple(layout: str, dtype: torch.dtype) -> int:
    """The multiple of tokens over which a sample of dY is summed."""
    return check_form((0, 0), dtype, layout).columns


@custom_op("sparse24::sample_pack24", mutates_args=())
def _sample_pack24(
    dy: Tensor, key: Tensor, stride: int, dtype: torch.dtype, layout: str, backend: str
) -> Tensor:
    return packed_sample(dy, key, stride, dtype, layout, backend)


def packed_sample(
    dy: Tensor, key: Tensor, stride: int, dtype: torch.dtype, layout: str, backend: str
) -> Tensor:
    """The bytes of `sample_pack24` of a dY of whole blocks, for an operator."""
    if backend == "triton":
        from common_kernels.pack import sample_triton

        return sample_triton.pack_sample(dy, key.contiguous(), dtype, stride, layout)
    sample = mvue24(dy, key[0], key[1] * stride, dim=0).t().contiguous()
    return cpu.pack(sample.to(dtype), sample != 0, layout)


@_sample_pack24.register_fake
def _(dy, key, stride, dtype, layout, backend):
    size = cpu.buffer_bytes(dy.shape[1], dy.shape[0], dtype, layout)
    return dy.new_empty(size, dtype=torch.uint8)


def fill_up(x: Tensor, rows: int) -> Tensor:
    """x [n, k] with as many rows of zeros more; x itself, and no copy, for none."""
    if not rows:
        return x
    bytes_alone = x.element_size() == 1  # FP8 cannot be padded as such
    padded = F.pad(x.view(torch.uint8) if bytes_alone else x, (0, 0, 0, rows))
    return padded.view(x.dtype)


@contextmanager
def row_major(out: Out) -> Iterator[Out]:
    """`out` for a kernel that writes row by row, or where it is laid out otherwise something that
    is copied to it afterwards."""
    if out is None or out.is_contiguous():
        yield out
    else:
        yield (written := torch.empty(out.shape, dtype=out.dtype, device=out.device))
        out.copy_(written)


def _write(buffer: Tensor, pruned: Tensor, kept: Tensor, layout: str) -> None:
    buffer.copy_(cpu.pack(pruned, kept, layout))


def _check(out: Packed24, w: Tensor, mask: Tensor | None) -> None:
    if w.ndim != 2 or w.shape[0] % MULTIPLE or w.shape[1] % MULTIPLE:
        raise ValueError(
            f"w has shape {tuple(w.shape)}; it must have two dims, both multiples of {MULTIPLE}"
        )
    if mask is not None and mask.dtype == torch.uint8:
        if mask.shape != (w.shape[0], w.shape[1] // 8):
            raise ValueError(f"{tuple(mask.shape)} are not the bits of a mask {tuple(w.shape)}")
    elif mask is not None:
        checks.same_shape(w, mask, "w and mask")
    _check_out(out, *w.shape)


def _bools(mask: Tensor, w: Tensor) -> Tensor:
    """The mask of `w`, which may be given as its bits."""
    return mask if mask.dtype == torch.bool else compressed.unpack_mask(mask, w.shape[1])


def _check_out(out: Packed24, rows: int, columns: int) -> None:
    if out.shape != (rows, columns):
        raise ValueError(f"there is room for a {out.shape} matrix, not for {(rows, columns)}")
