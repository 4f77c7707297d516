"""Sinusoidal position embeddings (Vaswani et al., 2017, arXiv 1706.03762, section 3.5)."""

from __future__ import annotations

import torch
from torch import Tensor


def sinusoids(length: int, width: int) -> Tensor:
    """The table [length, width] of sin and cos of position / 10000^(2i / width), in alternation."""
    frequencies = 10000.0 ** -(torch.arange(0, width, 2) / width)
    angles = torch.arange(length)[:, None] * frequencies
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
