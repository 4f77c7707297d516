"""Gated activations in plain PyTorch."""

import math

import torch

from common_kernels import layout

# GELU's tanh form, g (1 + tanh(u)) / 2 with u = sqrt(2/pi) (g + 0.044715 g^3), is g sigmoid(2u).
LINEAR, CUBIC = 2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715
# GELU's cubic term is computed from a gate clamped to this magnitude: the sigmoid is saturated
# long before, and the cube could overflow.
SATURATED = 16.0


def glu(x: torch.Tensor, activation: str) -> torch.Tensor:
    value, gate = (half.float() for half in x.chunk(2, -1))
    # Multiply gate by sigmoid first: value * gate may overflow where the activation is zero.
    return half_like(x).copy_(value * (gate * sigmoid(gate, activation)[0]))


def glu_backward(dy: torch.Tensor, x: torch.Tensor, activation: str) -> torch.Tensor:
    dx, upstream = torch.empty_like(x), dy.float()
    value, gate = (half.float() for half in x.chunk(2, -1))
    s, slope = sigmoid(gate, activation)
    dvalue, dgate = dx.chunk(2, -1)
    dvalue.copy_(upstream * (gate * s))
    dgate.copy_(upstream * (value * (s + gate * slope)))
    return dx


def sigmoid(gate: torch.Tensor, activation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """sigmoid(z) and its derivative by the gate, where z is the gate (silu) or a polynomial of it
    (gelu).

    It is computed from exp(-|z|), so that nothing overflows and no difference cancels.
    """
    z = gate
    if activation == "gelu":
        g = gate.clamp(-SATURATED, SATURATED)
        z = g * (LINEAR + CUBIC * (g * g))
    e = torch.exp(-z.abs())
    r = 1 / (1 + e)
    slope = e * r * r
    if activation == "gelu":
        slope = slope * (LINEAR + 3 * CUBIC * (g * g))
    return torch.where(z < 0, e * r, r), slope


def half_like(x: torch.Tensor, device: torch.device | str | None = None) -> torch.Tensor:
    """Uninitialised `[..., d]` for `x [..., 2d]`, with the dims in x's memory order."""
    order = layout.memory_order(torch.empty_like(x, device="meta"))
    sizes = [x.shape[d] // (2 if d == x.ndim - 1 else 1) for d in order]
    out = x.new_empty(sizes, device=device)
    return out.permute(sorted(range(x.ndim), key=order.__getitem__))
