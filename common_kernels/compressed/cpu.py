"""The compressed form in plain PyTorch."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from common_kernels.masks import cpu as masks


def pack_mask(mask: torch.Tensor) -> torch.Tensor:
    eights = F.pad(mask, (0, -mask.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (eights.to(torch.uint8) << places(mask.device)).sum(-1, dtype=torch.uint8)


def unpack_mask(bits: torch.Tensor, columns: int) -> torch.Tensor:
    mask = bits.unsqueeze(-1) >> places(bits.device) & 1
    return mask.flatten(-2)[..., :columns].to(torch.bool)


def compress_nm(
    x: torch.Tensor, bits: torch.Tensor, n: int, m: int, dtype: torch.dtype
) -> torch.Tensor:
    kept = x.masked_select(unpack_mask(bits, x.shape[-1]))
    return kept.view(compressed_shape(x, n, m)).to(dtype)


def expand_nm(values: torch.Tensor, bits: torch.Tensor, n: int, m: int) -> torch.Tensor:
    dense = values.new_zeros(expanded_shape(values, n, m))
    return dense.masked_scatter_(unpack_mask(bits, dense.shape[-1]), values)


def double_prune_bits(values: torch.Tensor, bits: torch.Tensor, n: int, m: int) -> torch.Tensor:
    # A kept zero must rank above entries that the row mask prunes. It therefore counts as the
    # smallest positive fp32 number, which fp16 and bf16 values cannot equal.
    x = expand_nm(values.float().masked_fill(values == 0, 2.0**-149), bits, n, m)
    return pack_mask(compress_nm(masks.nm_mask(x, n, m, 0), bits, n, m, torch.bool))


def places(device: torch.device) -> torch.Tensor:
    """The places of a byte's bits, the lowest first."""
    return torch.arange(8, dtype=torch.uint8, device=device)


def bits_shape(shape: Sequence[int]) -> torch.Size:
    return torch.Size((*shape[:-1], (shape[-1] + 7) // 8))


def compressed_shape(x: torch.Tensor, n: int, m: int) -> torch.Size:
    return torch.Size((*x.shape[:-1], x.shape[-1] // m * n))


def expanded_shape(values: torch.Tensor, n: int, m: int) -> torch.Size:
    return torch.Size((*values.shape[:-1], values.shape[-1] // n * m))
