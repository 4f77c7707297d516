"""Operands of cuSPARSELt's products on compute capability 9.0, pruned and packed in one read.

A blob is values and metadata of a 2:4 matrix [rows, columns] in one buffer (layout
`cusparselt_sm90` of common_kernels.pack). Rows and columns must be multiples of 64. What is written
here is what the operators on dense tensors and `pack24` would give, to the bit; the path in
PyTorch does just that.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from common_kernels import backend as backends
from common_kernels import checks
from common_kernels.compressed import expand_nm, unpack_mask
from common_kernels.library import custom_op
from common_kernels.masks import nm_mask, transposable_mask24
from common_kernels.mvue import mvue24
from common_kernels.pack import cpu
from common_kernels.soft_threshold import soft_threshold24

Out = TypeVar("Out", Tensor, Tensor | None)
SOURCES = ("magnitude", "soft", "mask")
MULTIPLE = 64
TOKENS = 16  # a sample of dY is summed over a multiple of this


def empty_blob(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Room for the blob of a matrix: `[rows, columns * 9 / 16]` (10 / 16 for one-byte types)."""
    rows, columns = shape
    if rows % MULTIPLE or columns % MULTIPLE:
        raise ValueError(
            f"a matrix of shape ({rows}, {columns}): both dims must be multiples of {MULTIPLE}; "
            "pad it, or keep it dense"
        )
    return torch.empty(blob_shape(rows, columns, dtype), dtype=dtype, device=device)


def blob_shape(rows: int, columns: int, dtype: torch.dtype) -> tuple[int, int]:
    return rows, columns // 2 + _whole(columns, dtype.itemsize) // 8 // dtype.itemsize


def prune_pack24_(
    blob: Tensor,
    w: Tensor,
    source: str,
    mask: Tensor | None = None,
    scale: Tensor | None = None,
    dense: Tensor | None = None,
    *,
    backend: str | None = None,
) -> None:
    """Write `w` [rows, columns], pruned along its columns, into its blob.

    source: `magnitude` keeps what nm_mask(w) keeps, `mask` what `mask` keeps (bool, at most two of
        four, unchecked), `soft` packs soft_threshold24(w).
    scale: fp32 []; the pruned matrix is multiplied by it in fp32, before the cast to blob's dtype.
    dense: [rows, columns] of blob's dtype; receives the pruned matrix as well, +0 where nothing is
        kept.
    """
    checks.float_tensor(w, "w")
    if source not in SOURCES:
        raise ValueError(f"unknown source {source!r}: choose one of {', '.join(SOURCES)}")
    if (mask is not None) != (source == "mask"):
        raise ValueError("give a mask with source='mask', and only then")
    _check(blob, w, mask)
    if dense is not None and (dense.shape != w.shape or dense.dtype != blob.dtype):
        raise ValueError(
            f"dense must be {blob.dtype} {tuple(w.shape)}, not {dense.dtype} {tuple(dense.shape)}"
        )
    device = checks.one_device(blob=blob, w=w, mask=mask, scale=scale, dense=dense)
    name = backends.resolve(device, backend)
    _prune_pack24_(blob, w, source, mask, scale, dense, name)


@custom_op("sparse24::prune_pack24_", mutates_args=("blob", "dense"))
def _prune_pack24_(
    blob: Tensor,
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
        with row_major(dense) as out:
            triton.pack(w.contiguous(), mask, source, blob.dtype, scale, blob, out)
        return
    if source == "soft":
        # What is below the threshold is zero, and counts as pruned for the positions no less.
        kept, pruned = nm_mask(w), soft_threshold24(w)
    else:
        kept = nm_mask(w) if mask is None else mask
        pruned = torch.where(kept, w, 0.0)
    if scale is not None:
        pruned = pruned.float() * scale
    pruned = pruned.to(blob.dtype)
    _write(blob, pruned, kept)
    if dense is not None:
        dense.copy_(torch.where(kept, pruned, 0.0))


@_prune_pack24_.register_fake
def _(blob, w, source, mask, scale, dense, backend):
    return None


def pack_both24_(
    blob: Tensor,
    transposed: Tensor,
    w: Tensor,
    mask: Tensor | None = None,
    *,
    backend: str | None = None,
) -> None:
    """Write `w` [rows, columns] under a transposable mask into its blob, and w^T into that of w^T.

    mask: bool [rows, columns], 2:4 along both dims (unchecked); None for the best one,
        transposable_mask24(w). The blobs are of a 16-bit type.
    """
    checks.float_tensor(w, "w")
    _check(blob, w, mask)
    _check(transposed, w.t(), None)
    device = checks.one_device(blob=blob, transposed=transposed, w=w, mask=mask)
    name = backends.resolve(device, backend)
    _pack_both24_(blob, transposed, w, mask, name)


@custom_op("sparse24::pack_both24_", mutates_args=("blob", "transposed"))
def _pack_both24_(
    blob: Tensor, transposed: Tensor, w: Tensor, mask: Tensor | None, backend: str
) -> None:
    if backend == "triton":
        from common_kernels.pack import triton

        mask = None if mask is None else mask.contiguous()
        triton.pack_both(w.contiguous(), mask, blob.dtype, (blob, transposed))
        return
    kept = transposable_mask24(w) if mask is None else mask
    pruned = torch.where(kept, w, 0.0).to(blob.dtype)
    _write(blob, pruned, kept)
    _write(transposed, pruned.t().contiguous(), kept.t().contiguous())


@_pack_both24_.register_fake
def _(blob, transposed, w, mask, backend):
    return None


def pack_compressed24_(
    blob: Tensor,
    transposed: Tensor,
    values: Tensor,
    row_mask: Tensor,
    column_mask: Tensor,
    *,
    backend: str | None = None,
) -> None:
    """Write SLoPe's two operands: W * A into its blob, (W * A * B)^T into its own.

    Args:
        blob, transposed: of [rows, columns] and [columns, rows], in a 16-bit type.
        values: [rows, columns / 2], the entries of W under A. row_mask: uint8 [rows, columns / 8],
            the bits of A. column_mask: uint8 [rows, columns / 16], for each value whether B keeps
            it (`common_kernels.compressed`).
    """
    checks.float_tensor(values, "values")
    rows, columns = values.shape[0], 2 * values.shape[1]
    _check_blob(blob, rows, columns)
    _check_blob(transposed, columns, rows)
    device = checks.one_device(
        blob=blob,
        transposed=transposed,
        values=values,
        row_mask=row_mask,
        column_mask=column_mask,
    )
    name = backends.resolve(device, backend)
    _pack_compressed24_(blob, transposed, values, row_mask, column_mask, name)


@custom_op("sparse24::pack_compressed24_", mutates_args=("blob", "transposed"))
def _pack_compressed24_(
    blob: Tensor,
    transposed: Tensor,
    values: Tensor,
    row_mask: Tensor,
    column_mask: Tensor,
    backend: str,
) -> None:
    if backend == "triton":
        from common_kernels.pack.compressed_triton import pack_both_compressed

        pack_both_compressed(values, row_mask, column_mask, blob.dtype, (blob, transposed))
        return
    values = values.to(blob.dtype)
    kept = unpack_mask(column_mask, values.shape[1])
    _write(blob, expand_nm(values, row_mask), unpack_mask(row_mask, 2 * values.shape[1]))
    twice = expand_nm(torch.where(kept, values, 0.0), row_mask).t().contiguous()
    both = expand_nm(kept.to(blob.dtype), row_mask).t().contiguous() != 0
    _write(transposed, twice, both)


@_pack_compressed24_.register_fake
def _(blob, transposed, values, row_mask, column_mask, backend):
    return None


def sample_pack24(
    dy: Tensor,
    key: Tensor,
    stride: int = 1,
    *,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """The blob of the transpose of mvue24(dy, key[0], key[1] * stride, dim=0): no transposed copy.

    dy: [tokens, out] row-major; tokens are filled up with zeros to a multiple of 16.
    key: int64 [2]; key[1] * stride must be a multiple of 4. dtype: 16-bit, of the blob; dy's.
    """
    checks.float_tensor(dy, "dy")
    if dy.ndim != 2 or dy.shape[1] % MULTIPLE:
        raise ValueError(f"dy must be [tokens, a multiple of {MULTIPLE}], not {tuple(dy.shape)}")
    if key.shape != (2,) or key.dtype != torch.int64:
        raise TypeError(f"key must be int64 [2], not {key.dtype} {tuple(key.shape)}")
    dy = fill_up(dy, -dy.shape[0] % TOKENS).contiguous()
    name = backends.resolve(checks.one_device(dy=dy, key=key), backend)
    return _sample_pack24(dy, key, stride, dtype or dy.dtype, name)


@custom_op("sparse24::sample_pack24", mutates_args=())
def _sample_pack24(
    dy: Tensor, key: Tensor, stride: int, dtype: torch.dtype, backend: str
) -> Tensor:
    if backend == "triton":
        from common_kernels.pack import triton

        return triton.pack_sample(dy, key.contiguous(), dtype, stride)
    sample = mvue24(dy, key[0], key[1] * stride, dim=0).t().contiguous()
    return naive_blob(sample.to(dtype), sample != 0)


@_sample_pack24.register_fake
def _(dy, key, stride, dtype, backend):
    return dy.new_empty(blob_shape(dy.shape[1], dy.shape[0], dtype), dtype=dtype)


def expand_blob(blob: Tensor) -> Tensor:
    """The matrix [rows, columns] in a blob."""
    rows, columns, size = len(blob), columns_of(blob), blob.element_size()
    values, meta = blob.flatten().split([rows * columns // 2, blob.numel() - rows * columns // 2])
    whole = _whole(columns, size)
    nibbles = cpu.gather(meta.view(torch.uint8), rows, whole, "cusparselt_sm90", size)
    return cpu.expand(values.view(rows, -1), nibbles[:, : columns // 4])


def columns_of(blob: Tensor) -> int:
    """Columns of the matrix in a blob: 16 of them take nine 16-bit words, or ten bytes."""
    return blob.shape[1] // (9 if blob.element_size() == 2 else 10) * 16


def _whole(columns: int, itemsize: int) -> int:
    """Metadata come in blocks of 32 columns, of 64 in one-byte types."""
    block = 64 // itemsize
    return -(-columns // block) * block


def naive_blob(pruned: Tensor, kept: Tensor) -> Tensor:
    """The blob of `pruned` [rows, 16 a], of which the entries under `kept` are stored."""
    values, _ = cpu.compress(pruned, kept)
    missing = _whole(pruned.shape[1], pruned.element_size()) - pruned.shape[1]
    return cpu.cusparselt_sm90(values, cpu.encode(F.pad(kept, (0, missing))))


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


def _write(blob: Tensor, pruned: Tensor, kept: Tensor) -> None:
    blob.copy_(naive_blob(pruned, kept))


def _check(blob: Tensor, w: Tensor, mask: Tensor | None) -> None:
    if w.ndim != 2 or w.shape[0] % MULTIPLE or w.shape[1] % MULTIPLE:
        raise ValueError(
            f"w has shape {tuple(w.shape)}; it must have two dims, both multiples of {MULTIPLE}"
        )
    if mask is not None:
        checks.same_shape(w, mask, "w and mask")
    _check_blob(blob, *w.shape)


def _check_blob(blob: Tensor, rows: int, columns: int) -> None:
    expected = blob_shape(rows, columns, blob.dtype)
    if blob.shape != expected or not blob.is_contiguous():
        raise ValueError(
            f"the blob of a {(rows, columns)} matrix must be a contiguous {expected}, not "
            f"{tuple(blob.shape)}"
        )
