"""Squared ReLU pruned to 2:4 in plain PyTorch."""

import torch
from torch import Tensor

from common_kernels.fp8.cpu import quantize_fp8
from common_kernels.masks.cpu import nm_mask
from common_kernels.pack import cpu as pack


def relu24(z: Tensor, prune: bool, layout: str) -> tuple[Tensor, Tensor]:
    """H', and its packed bytes in `layout`; none for ""."""
    positive = torch.where(z <= 0, 0.0, z.float())
    kept = nm_mask(positive, 2, 4, z.ndim - 1) if prune else torch.ones_like(z, dtype=torch.bool)
    h = torch.where(kept, positive.square(), 0.0).to(z.dtype).contiguous()
    return h, packed(h, kept, layout)


def relu24_backward(dh: Tensor, h: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """dZ, and its packed bytes in `layout`; none for ""."""
    kept = h != 0
    dz = torch.where(kept, 2 * dh.float() * h.float().sqrt(), 0.0).to(dh.dtype).contiguous()
    return dz, packed(dz, kept, layout)


def relu24_codes(
    x: Tensor, h: Tensor | None, fmt: str, layout: str, amax: Tensor | None, seen: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """H' from Z or, if H' is given, dZ from dH; its codes packed, and transposed; their scale."""
    out = relu24(x, True, "")[0] if h is None else relu24_backward(x, h, "")[0]
    kept = nm_mask(torch.where(x <= 0, 0.0, x.float()), 2, 4, 1) if h is None else h != 0
    codes, scale = quantize_fp8(out, fmt, amax, seen)
    return out, pack.pack(codes, kept, layout), codes.t().contiguous(), scale


def packed(x: Tensor, kept: Tensor, layout: str) -> Tensor:
    return pack.pack(x, kept, layout) if layout else x.new_empty(0, dtype=torch.uint8)
