"""Dense FP8 training as in other libraries, with which the sparse methods are compared.

Operands of the three products are e4m3, except the output gradient in e5m2, with one scale per
tensor that is measured each time. fprop uses fast accumulation, the others exact accumulation.
"""

import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(FP8 codes of x [rows, columns], codes of its transpose, both row-major; the inverse scale).

    Two passes when compiled: one for the largest magnitude, one that writes both.
    """
    top = torch.finfo(dtype).max
    inverse = x.abs().amax().float().clamp_min(1e-12) / top
    codes = (x.float() / inverse).clamp(-top, top).to(dtype)
    return codes, codes.t().contiguous(), inverse


@functools.cache
def compiled() -> Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor, Tensor]]:
    return torch.compile(quantize, dynamic=True)


def product(
    a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype, fast: bool = False
) -> Tensor:
    """The product a [m, k] b^T of row-major FP8 codes, b [n, k] -> [m, n]."""
    fast = fast and a.is_cuda
    return torch._scaled_mm(a, b.t(), *scales, out_dtype=dtype, use_fast_accum=fast)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        quantize_ = compiled() if x.is_cuda else quantize
        x2d = x.reshape(-1, x.shape[-1])
        codes_x, codes_x_t, scale_x = quantize_(x2d, E4M3)
        codes_w, codes_w_t, scale_w = quantize_(weight.to(x.dtype), E4M3)
        ctx.save_for_backward(codes_x_t, codes_w_t, scale_x, scale_w)
        ctx.weight_dtype = weight.dtype
        y = product(codes_x, codes_w, (scale_x, scale_w), x.dtype, fast=True)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad_y):
        codes_x_t, codes_w_t, scale_x, scale_w = ctx.saved_tensors
        dy = grad_y.reshape(-1, grad_y.shape[-1])
        codes, codes_t, scale = (compiled() if dy.is_cuda else quantize)(dy, E5M2)
        dx = product(codes, codes_w_t, (scale, scale_w), dy.dtype)
        dw = product(codes_t, codes_x_t, (scale, scale_x), dy.dtype).to(ctx.weight_dtype)
        return dx.view(*grad_y.shape[:-1], -1), dw


class Linear(nn.Linear):
    """`nn.Linear` whose three products run in FP8; widths and tokens must be multiples of 16."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        y = _Product.apply(x, self.weight)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def convert(linears: Iterable[nn.Linear]) -> None:
    """Make `linears` compute in FP8, in place."""
    for linear in linears:
        linear.__class__ = Linear
