"""The compressed form in plain PyTorch.

Where no group crosses a byte boundary, a mask is decoded byte by byte with tables of 256 entries.
"""

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from common_kernels.masks import cpu as masks

PACK = sum(1 << 56 - 7 * i for i in range(8))


def pack_mask(mask: torch.Tensor) -> torch.Tensor:
    """Gather eight bools, read as one 64-bit word, by one multiplication: bit 8i goes to bit 56 +
    i.

    The multiplier PACK has the bits 56 - 7i; no two of the 64 partial products overlap.
    """
    words = F.pad(mask, (0, -mask.shape[-1] % 8)).flatten().view(torch.int64)
    return (words * PACK >> 56).to(torch.uint8).view(bits_shape(mask.shape))


def unpack_mask(bits: torch.Tensor, columns: int) -> torch.Tensor:
    words = bools(bits.device).index_select(0, bits.flatten().int())
    mask = words.view(torch.bool).view(*bits.shape[:-1], 8 * bits.shape[-1])
    return mask[..., :columns].contiguous()


def compress_nm(
    x: torch.Tensor, bits: torch.Tensor, n: int, m: int, dtype: torch.dtype
) -> torch.Tensor:
    if whole_bytes(x.shape[-1], m):
        kept = x.reshape(-1, 8).gather(1, kept_columns(bits, n, m))
    else:
        kept = x.masked_select(unpack_mask(bits, x.shape[-1]))
    return kept.view(compressed_shape(x, n, m)).to(dtype)


def expand_nm(values: torch.Tensor, bits: torch.Tensor, n: int, m: int) -> torch.Tensor:
    dense = values.new_zeros(expanded_shape(values, n, m))
    if whole_bytes(dense.shape[-1], m):
        columns = kept_columns(bits, n, m)
        dense.view(-1, 8).scatter_(1, columns, values.reshape(columns.shape))
    else:
        dense.masked_scatter_(unpack_mask(bits, dense.shape[-1]), values)
    return dense


def double_prune_bits(values: torch.Tensor, bits: torch.Tensor, n: int, m: int) -> torch.Tensor:
    # A kept zero must rank above entries that the row mask prunes. It therefore counts as the
    # smallest positive fp32 number, which fp16 and bf16 values cannot equal.
    x = expand_nm(values.float().masked_fill(values == 0, 2.0**-149), bits, n, m)
    return pack_mask(compress_nm(masks.nm_mask(x, n, m, 0), bits, n, m, torch.bool))


def bits_shape(shape: Sequence[int]) -> torch.Size:
    return torch.Size((*shape[:-1], (shape[-1] + 7) // 8))


def compressed_shape(x: torch.Tensor, n: int, m: int) -> torch.Size:
    return torch.Size((*x.shape[:-1], x.shape[-1] // m * n))


def expanded_shape(values: torch.Tensor, n: int, m: int) -> torch.Size:
    return torch.Size((*values.shape[:-1], values.shape[-1] // n * m))


def whole_bytes(columns: int, m: int) -> bool:
    """True if all bytes are full and no group crosses a byte boundary."""
    return columns % 8 == 0 and 8 % m == 0


def kept_columns(bits: torch.Tensor, n: int, m: int) -> torch.Tensor:
    """`[bytes, 8 n / m]` int64: the columns, out of its eight, that each byte keeps."""
    return columns_of_bytes(n, m, bits.device).index_select(0, bits.flatten().int())


@functools.cache
def bools(device: torch.device) -> torch.Tensor:
    """`[256]` int64: the eight bools of each byte, lowest bit first, side by side in one word."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return bits.bool().view(torch.int64).squeeze(1).to(device)


@functools.cache
def columns_of_bytes(n: int, m: int, device: torch.device) -> torch.Tensor:
    """`[256, 8 n / m]` int64: the positions of each byte's set bits. For bytes that are not n:m the
    positions are out of range, so that using them raises an error.
    """
    mask = bools(torch.device("cpu")).view(torch.bool).view(256, 8)
    legal = (mask.unflatten(1, (-1, m)).sum(-1) == n).all(1)
    columns = torch.full((256, 8 * n // m), 8)
    columns[legal] = mask[legal].nonzero()[:, 1].view(-1, 8 * n // m)
    return columns.to(device)
