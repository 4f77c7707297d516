"""Gated activations of feed-forward networks (Shazeer, arXiv 2002.05202).

`x [..., 2d]` holds the values, then the gates; the result `[..., d]` is `value * activation(gate)`.
This order, and GELU's tanh form, follow FST's BERT (arXiv 2404.01847).

The result and the gradient keep the input's memory layout. A sparse product may leave its result
column-major (neighbouring tokens side by side), and no transposing copy is made of it here.
"""

import torch

from common_kernels import backend as backends
from common_kernels import checks
from common_kernels.glu import cpu
from common_kernels.library import operator_of


def geglu(x: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """value * gelu(gate), gelu(g) = g sigmoid(2 sqrt(2/pi) (g + 0.044715 g^3)): GELU's tanh form.

    Takes x [..., 2d] and returns [..., d], computed in fp32 and rounded once. The result and the
    gradient have x's order of dims in memory if x is dense, else that of `torch.empty_like(x)`. NaN
    and Inf propagate; a gate of -Inf gives NaN, as in torch. It can be differentiated once. Raises
    TypeError for a dtype other than fp32, bf16 and fp16, and ValueError for an odd last dim.
    """
    return _glu(x, "gelu", backend)


def swiglu(x: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """value * silu(gate), silu(g) = g sigmoid(g); everything else as in `geglu`."""
    return _glu(x, "silu", backend)


def _glu(x: torch.Tensor, activation: str, backend: str | None) -> torch.Tensor:
    checks.float_tensor(x)
    checks.group_dim(x, 2, -1)
    name = backends.resolve(x.device, backend)
    if x.requires_grad and torch.is_grad_enabled():
        return _Glu.apply(x, activation, name)
    return _forward(x, activation, name)


_forward = operator_of(cpu.glu, lambda x, activation: cpu.half_like(x))


_backward = operator_of(cpu.glu_backward, lambda dy, x, activation: torch.empty_like(x))


class _Glu(torch.autograd.Function):
    """The autograd function of both activations."""

    @staticmethod
    def forward(ctx, x, activation, backend):
        ctx.save_for_backward(x)
        ctx.activation, ctx.backend = activation, backend
        return _forward(x, activation, backend)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return _backward(dy, x, ctx.activation, ctx.backend), None, None
