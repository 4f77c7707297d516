"""The second half of a sparse-plus-low-rank product (SLoPe, arXiv 2405.16325).

`lowrank_addmm` combines the products `Y1 = X W^T` and `Y2 = X L`.
"""

from typing import Any

import torch

from common_kernels import backend as backends
from common_kernels import checks
from common_kernels.library import operator_of
from common_kernels.lowrank import cpu


def lowrank_addmm(
    y1: torch.Tensor,
    y2: torch.Tensor,
    r: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """y1 [..., out] + scale * (y2 [..., rank] @ r [rank, out]) + bias [out], new and contiguous.

    It is accumulated in fp32, rounded once, to y1's dtype, and differentiable. The operands may
    have any float dtype and any strides; usually y1 and y2 are slices of one tensor. y2 may also be
    two parts, [..., 2, rank], whose sum is meant, rounded to its dtype.
    """
    tensors = {"y1": y1, "y2": y2, "r": r} | ({} if bias is None else {"bias": bias})
    for name, tensor in tensors.items():
        checks.float_tensor(tensor, name)
    out = y1.shape[-1:]
    fit = y2.shape[:-1] in (y1.shape[:-1], (*y1.shape[:-1], 2)) and r.shape == y2.shape[-1:] + out
    if not fit or (bias is not None and bias.shape != out):
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"these shapes do not fit: {shapes}")
    name = backends.resolve(checks.one_device(**tensors), backend)
    return _lowrank_addmm(y1, y2, r, bias, scale, name)


_lowrank_addmm = operator_of(
    cpu.lowrank_addmm, lambda y1, y2, r, bias, scale: y1.new_empty(y1.shape)
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, y2, r, bias, ctx.scale, _ = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(y2, r)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    y2, r = ctx.saved_tensors
    flat, parts = grad.reshape(-1, grad.shape[-1]), y2.ndim > grad.ndim
    given, y2 = y2, cpu.whole(y2, grad)
    with torch.autocast(grad.device.type, enabled=False):
        grad_y2 = ctx.scale * (grad @ r.to(grad.dtype).t())
        grad_r = ctx.scale * (y2.to(grad.dtype).reshape(len(flat), len(r)).t() @ flat)
    grad_bias = None if ctx.bias_dtype is None else flat.sum(0).to(ctx.bias_dtype)
    grad_y2 = grad_y2.unsqueeze(-2).expand_as(given) if parts else grad_y2
    return grad, grad_y2.to(y2.dtype), grad_r.to(r.dtype), grad_bias, None, None


_lowrank_addmm.register_autograd(_backward, setup_context=_setup)
