"""Operands of the products of training, pruned and packed in place in one read.

They are packed in any layout; for layout `cusparselt` they are pruned, and then the library packs
them. Rows and columns are multiples of 64 and of what the layout needs. The results equal, bit for
bit, those of the operators on dense tensors followed by `pack24`, which is also how the PyTorch
path computes them. Nothing waits for a GPU, so masks are not checked to be 2:4.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from common_kernels import backend as backends
from common_kernels import checks, compressed
from common_kernels.library import custom_op
from common_kernels.masks import nm_mask, transposable_mask24
from common_kernels.mvue import sampled24
from common_kernels.pack import BUFFERED, VENDOR, Packed24, check_form, cpu
from common_kernels.soft_threshold import soft_threshold24

MULTIPLE = 64
TOKENS = 16  # in cuSPARSELt's layout a sample of dY has a multiple of this many tokens


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
    """Prune `w` [rows, columns] to 2:4 along its rows and write it into `out`.

    Args:
        source: `magnitude` keeps the entries of nm_mask(w), `mask` those of `mask`, and `soft`
            packs soft_threshold24(w).
        mask: bool [rows, columns], or its bits, pack_mask(mask); at most two of four, not checked.
        scale: fp32 []; the pruned matrix is multiplied by it in fp32, before the cast.
        dense: [rows, columns] of out's dtype; also receives the pruned matrix, +0 where pruned.
    """
    _check(out, w.shape)
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
    if backend == "triton" and layout != VENDOR:
        from common_kernels.pack import triton

        mask = None if mask is None else mask.contiguous()
        written = None if dense is None else dense.contiguous()  # of which all is overwritten
        triton.pack(w.contiguous(), mask, source, dtype, scale, buffer, written, layout)
        if dense is not None and written is not None and written is not dense:
            dense.copy_(written)
        return
    kept, pruned = _pruned(w, source, mask, scale, dtype)
    buffer.copy_(cpu.pack(pruned, kept, layout))
    if dense is not None:
        dense.copy_(torch.where(kept, pruned, 0.0))


def _pruned(
    w: Tensor, source: str, mask: Tensor | None, scale: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(the entries of `w` that are kept, the pruned matrix in `dtype`)."""
    if source == "soft":
        # An entry that the threshold sets to zero counts as pruned for the positions, too.
        kept, pruned = nm_mask(w), soft_threshold24(w)
    else:
        kept = nm_mask(w) if mask is None else _bools(mask, w)
        pruned = torch.where(kept, w, 0.0)
    if scale is not None:
        pruned = pruned.float() * scale
    return kept, pruned.to(dtype)


def packed_weight(
    w: Tensor,
    source: str,
    mask: Tensor | None,
    scale: Tensor | None,
    dtype: torch.dtype,
    layout: str,
    transposed: bool,
    backend: str,
) -> Tensor:
    """The bytes of `pack24_`, or if `transposed` of `pack_both24_`'s second, inside an operator."""
    if backend == "triton" and layout != VENDOR:
        from common_kernels.pack import tiles_triton, triton

        w, mask = w.contiguous(), None if mask is None else mask.contiguous()
        if transposed:
            assert mask is not None
            buffer = triton.new_buffer(w.shape[1], w.shape[0], dtype, w.device, layout)
            tiles_triton.pack_both(w, mask, dtype, (None, buffer), (layout, layout))
            return buffer
        return triton.pack(w, mask, source, dtype, scale, layout=layout)
    kept, pruned = _pruned(w, source, mask, scale, dtype)
    if transposed:
        pruned, kept = pruned.t().contiguous(), kept.t().contiguous()
    return cpu.pack(pruned, kept, layout)


def pruned_weight(
    w: Tensor,
    source: str,
    mask: Tensor | None,
    scale: Tensor | None,
    dtype: torch.dtype,
    backend: str,
) -> Tensor:
    """The pruned matrix of `pack24_` as a dense one in `dtype`, for use inside an operator; of any
    size and pattern if the source is `mask`."""
    blocks = not (w.shape[0] % MULTIPLE or w.shape[1] % MULTIPLE)
    if backend == "triton" and mask is None and blocks and dtype.itemsize == 2:
        from common_kernels.pack import triton

        dense = torch.empty(w.shape, dtype=dtype, device=w.device)
        triton.pack(w.contiguous(), None, source, dtype, scale, dense=dense)
        return dense
    return _pruned(w, source, mask, scale, dtype)[1]


def pack_both24_(
    out: Packed24,
    transposed: Packed24,
    w: Tensor,
    mask: Tensor | None = None,
    *,
    backend: str | None = None,
) -> None:
    """Write `w` [rows, columns] under a transposable mask into `out`, and its transpose into
    `transposed`; both have the same 16-bit dtype.

    mask: bool [rows, columns], or its bits, pack_mask(mask); 2:4 along both dims (not checked).
        None for the best one, transposable_mask24(w).
    """
    _check(out, w.shape)
    _check(transposed, w.shape[::-1])
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
    if backend == "triton" and VENDOR not in (layout, layout_transposed):
        from common_kernels.pack import tiles_triton

        mask = None if mask is None else mask.contiguous()
        layouts = layout, layout_transposed
        tiles_triton.pack_both(w.contiguous(), mask, dtype, (buffer, transposed), layouts)
        return
    kept = transposable_mask24(w) if mask is None else _bools(mask, w)
    pruned = torch.where(kept, w, 0.0).to(dtype)
    buffer.copy_(cpu.pack(pruned, kept, layout))
    turned = pruned.t().contiguous(), kept.t().contiguous()
    transposed.copy_(cpu.pack(*turned, layout_transposed))


def sample_pack24(
    dy: Tensor,
    key: Tensor,
    stride: int = 1,
    *,
    dtype: torch.dtype | None = None,
    layout: str = BUFFERED,
    backend: str | None = None,
) -> Packed24:
    """The packed transpose of mvue24(dy, key[0], key[1] * stride, dim=0), without a transposed dy.

    dy: [tokens, out], row-major. Tokens are padded with zeros as `layout` needs, to 16 at least.
    key: int64 [2]; key[1] * stride must be a multiple of 4.
    dtype: a 16-bit dtype for the result; default: dy's.
    """
    dtype = dtype or dy.dtype
    dy = whole_blocks(dy, dtype, layout)
    name = backends.resolve(checks.one_device(dy=dy, key=key), backend)
    buffer = _sample_pack24(dy, key, stride, dtype, layout, name)
    return Packed24(buffer, (dy.shape[1], dy.shape[0]), dtype, layout)


def whole_blocks(dy: Tensor, dtype: torch.dtype, layout: str) -> Tensor:
    """`dy`, contiguous and padded to the number of tokens of its packed sample."""
    if dy.shape[1] % MULTIPLE:
        raise ValueError(f"dy must be [tokens, a multiple of {MULTIPLE}], not {tuple(dy.shape)}")
    return fill_up(dy, -dy.shape[0] % tokens_multiple(layout, dtype)).contiguous()


def tokens_multiple(layout: str, dtype: torch.dtype) -> int:
    """The number that the tokens of a packed sample of dY must be a multiple of."""
    return check_form((0, 0), dtype, layout).columns


def packed_sample(
    dy: Tensor, key: Tensor, stride: int, dtype: torch.dtype, layout: str, backend: str
) -> Tensor:
    """The bytes of `sample_pack24` for a dY that is already padded, for use inside an operator."""
    if backend == "triton" and layout != VENDOR:
        from common_kernels.pack import sample_triton

        return sample_triton.pack_sample(dy, key.contiguous(), dtype, stride, layout)
    sample = sampled24(dy, key, stride, dim=0).t().contiguous()
    if layout == VENDOR:
        return cpu.by_library(sample.to(dtype))
    return cpu.pack(sample.to(dtype), sample != 0, layout)


_sample_pack24 = custom_op("sparse24::sample_pack24", mutates_args=())(packed_sample)


@_sample_pack24.register_fake
def _(dy, key, stride, dtype, layout, backend):
    return cpu.new_buffer(dy.shape[1], dy.shape[0], dtype, dy.device, layout)


def fill_up(x: Tensor, rows: int) -> Tensor:
    """x [n, k] with `rows` rows of zeros appended; x itself, not copied, if `rows` is 0."""
    if not rows:
        return x
    bytes_alone = x.element_size() == 1  # torch cannot pad FP8; pad its bytes
    padded = F.pad(x.view(torch.uint8) if bytes_alone else x, (0, 0, 0, rows))
    return padded.view(x.dtype)


def _check(out: Packed24, shape: torch.Size) -> None:
    if out.shape != shape or shape[0] % MULTIPLE or shape[1] % MULTIPLE:
        raise ValueError(
            f"a matrix {tuple(shape)} cannot be packed into one of shape {out.shape}: they must be "
            f"equal, and multiples of {MULTIPLE}"
        )


def _bools(mask: Tensor, w: Tensor) -> Tensor:
    """The bool mask of `w`; `mask` may be given as its bits."""
    return mask if mask.dtype == torch.bool else compressed.unpack_mask(mask, w.shape[1])
