"""Squared ReLU pruned to 2:4 in plain PyTorch."""

import torch
from torch import Tensor

from common_kernels.fp8.cpu import FORMATS, quantize_fp8
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


def packed(x: Tensor, kept: Tensor, layout: str) -> Tensor:
    return pack.pack(x, kept, layout) if layout else x.new_empty(0, dtype=torch.uint8)


def relu24_codes(
    z: Tensor,
    dh: Tensor | None,
    fmt: str,
    layout: str,
    dense: bool,
    amax: Tensor | None,
    seen: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """H', or dZ if dH is given, if `dense`; its codes packed, and transposed; their scale."""
    x = h = relu24(z, True, "")[0]
    kept = nm_mask(torch.where(z <= 0, 0.0, z.float()), 2, 4, 1)
    if dh is not None:
        x, kept = relu24_backward(dh, h, "")[0], h != 0
    codes, scale = quantize_fp8(x, fmt, amax, seen)
    return x if dense else x[:0], pack.pack(codes, kept, layout), codes.t().contiguous(), scale


def room_for_codes(z: Tensor, fmt: str, layout: str, dense: bool) -> tuple[Tensor, ...]:
    """Uninitialised tensors for the results of `relu24_codes`."""
    (rows, columns), dtype = z.shape, FORMATS[fmt]
    out, turned = (
        z.new_empty(rows if dense else 0, columns),
        z.new_empty(columns, rows, dtype=dtype),
    )
    buffer = z.new_empty(pack.buffer_bytes(rows, columns, dtype, layout), dtype=torch.uint8)
    return out, buffer, turned, z.new_empty((), dtype=torch.float32)
