"""Sparse-plus-low-rank output in plain PyTorch."""

import torch


def lowrank_addmm(
    y1: torch.Tensor, y2: torch.Tensor, r: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> torch.Tensor:
    with torch.autocast(y1.device.type, enabled=False):  # it would round to 16 bits
        out = (whole(y2, y1).float() @ r.float()).mul_(scale).add_(y1)
    if bias is not None:
        out.add_(bias)
    return out.to(y1.dtype)


def whole(y2: torch.Tensor, y1: torch.Tensor) -> torch.Tensor:
    """y2 as one part."""
    return y2 if y2.ndim == y1.ndim else y2.float().sum(-2).to(y2.dtype)
