"""Sparse-plus-low-rank output by definition, in fp64: what the tests hold every backend against."""

import torch


def lowrank_addmm(
    y1: torch.Tensor,
    y2: torch.Tensor,
    r: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """y1 + scale * y2 @ r + bias (SLoPe, arXiv 2405.16325, section 2.4); y2 may be two parts."""
    y2 = y2 if y2.ndim == y1.ndim else y2.sum(-2)
    out = y1.double() + scale * (y2.double() @ r.double())
    return out if bias is None else out + bias.double()
