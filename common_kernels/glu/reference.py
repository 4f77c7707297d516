"""Gated activations by definition, in fp64. The tests compare every backend with them, and every
backward pass with their gradients by autograd."""

import math

import torch


def gelu(g: torch.Tensor) -> torch.Tensor:
    """GELU's tanh approximation (arXiv 1606.08415)."""
    return 0.5 * g * (1 + torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)))


def silu(g: torch.Tensor) -> torch.Tensor:
    return g * torch.sigmoid(g)


def geglu(x: torch.Tensor) -> torch.Tensor:
    """value * gelu(gate), `[..., d]` for `x [..., 2d]`: values, then gates (arXiv 2002.05202)."""
    value, gate = x.double().chunk(2, -1)
    return value * gelu(gate)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """value * silu(gate), `[..., d]` for `x [..., 2d]`, in the same order."""
    value, gate = x.double().chunk(2, -1)
    return value * silu(gate)
