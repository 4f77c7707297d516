"""The three GEMMs in FP8, as S-STE has them (section 5 of the paper); notation as in gemms.py.

    GEMM   operands      paper          hybrid         hopper
    fprop  X, Wf         e4m3, e4m3     e4m3, e4m3     e4m3, e4m3
    dgrad  dY, Wb        e5m2, e5m2     e5m2, e4m3     e5m2, e4m3 (e5m2 where Wb is 2:4 along `out`)
    wgrad  S(dY), X      e5m2, e5m2     e5m2, e4m3     e5m2, e5m2

Every operand is quantised once in each format that takes it, with one scale for the whole tensor of
a micro-batch; a product of codes is divided by both scales in fp32 and rounded once. Of X the
backward pass keeps codes, a byte each. The sample of dY comes first and is then quantised.

Simulated (all recipes, on any device): what codes hold is exact in bf16, so that on a GPU the
products are those of bf16 operands, accumulated in fp32 and given in fp32. Nothing but the scale
is computed from the values: numerics, and no time saved.

On FP8 units (compute capability 9.0; for `hopper`, whose formats are what they multiply: dense
products with e5m2 in one operand at most, sparse ones with both operands in one format):

    fprop  sparse (cuSPARSELt), or dense where faster               given in bf16
    dgrad  dense (cuBLAS), or of e5m2 sparse or bf16 codes          given in bf16
    wgrad  sparse along the tokens, or bf16 codes where faster      given in fp32

They differ from the simulation of the same recipe by the accumulation of the FP8 units and by the
rounding of Y and dX to bf16. For them `hopper` gives the sample of dY half of dY's scale instead of
one of its own, so that dY is searched for its largest magnitude once. `hopper_delayed` is the same
with delayed scaling: X and dY are not searched at all (delayed.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from common_kernels import quantize_fp8
from common_kernels.fp8.cpu import FORMATS
from common_kernels.fp8.operands import quantize_and_sample, quantize_both, rescale
from common_kernels.matmul import mm24

from . import delayed
from .gemms import groups_of, sample_tokens
from .operands import Fp8, exact_product, save, saved, with_leading_dims


@dataclass(frozen=True)
class Fp8Formats:
    """FP8 format of each kind of operand, `e4m3` or `e5m2`."""

    fprop: str  # X and W in fprop
    gradient: str  # dY in dgrad and wgrad
    dgrad: str  # W in dgrad
    wgrad: str  # X in wgrad
    on_units: bool = False  # what FP8 units multiply; the sample of dY has half of dY's scale
    delayed: bool = False  # scales of X and dY follow from the steps before (delayed.py)


FP8: dict[str, Any] = {
    "off": None,
    # S-STE: both operands of a product share a format, so the backward pass is all e5m2.
    "paper": Fp8Formats(fprop="e4m3", gradient="e5m2", dgrad="e5m2", wgrad="e5m2"),
    # The usual recipe of FP8 training: only gradients need the range of e5m2.
    "hybrid": Fp8Formats(fprop="e4m3", gradient="e5m2", dgrad="e4m3", wgrad="e4m3"),
    "hopper": Fp8Formats("e4m3", "e5m2", dgrad="e4m3", wgrad="e5m2", on_units=True),
}
FP8["hopper_delayed"] = replace(FP8["hopper"], delayed=True)
# Of weights that are 2:4 along `out` as well: a sparse product takes both operands in one format.
FP8_BOTH_WAYS = {
    name: replace(formats, dgrad="e5m2") if name.startswith("hopper") else formats
    for name, formats in FP8.items()
}


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, fprop, dgrad, bias, key, mvue, formats, packs_sample, amax, seen):
        ctx.mvue, ctx.formats, ctx.packs_sample = mvue, formats, packs_sample
        ctx.shape, ctx.on_units = x.shape, fprop.on_units
        ctx.weight_dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype
        with torch.autocast(x.device.type, enabled=False):
            x2d = x.reshape(-1, x.shape[-1])
            given = delayed.given(0, x2d, amax, seen)
            if ctx.on_units:
                codes, kept, scale, kept_scale = quantize_both(
                    x2d, formats.fprop, formats.wgrad, *given
                )
            else:
                codes, scale = kept, kept_scale = quantize_fp8(x2d, formats.fprop, *given)
                if formats.wgrad != formats.fprop:
                    kept, kept_scale = quantize_fp8(x2d, formats.wgrad, *given)
            ctx.seen = seen  # not saved: it changes before the backward pass
            save(ctx, dgrad, kept, kept_scale, key, amax)
            return with_leading_dims(fprop.linear(Fp8(codes, scale), bias, x.dtype), x)

    @staticmethod
    def backward(ctx, grad_y):
        with torch.autocast(grad_y.device.type, enabled=False):
            return _Fp8Linear._backward(ctx, grad_y)

    @staticmethod
    def _backward(ctx, grad_y):
        dgrad, x, x_scale, key, amax = saved(ctx)
        formats = ctx.formats
        packs_sample = ctx.packs_sample if ctx.needs_input_grad[1] else None
        dy = grad_y.reshape(-1, grad_y.shape[-1])
        grad_x = grad_weight = grad_bias = None
        given = delayed.given(1, dy, amax, ctx.seen)
        if packs_sample:
            codes, sample, scale = quantize_and_sample(
                dy, key, groups_of(dy), formats.gradient, *given, layout=packs_sample
            )
        else:
            codes, scale = quantize_fp8(dy, formats.gradient, *given)
        if ctx.needs_input_grad[0]:
            grad_x = dgrad.grad(Fp8(codes, scale), grad_y.dtype).reshape(ctx.shape)
        if ctx.needs_input_grad[1]:
            if packs_sample:
                scales = 0.5 * scale, x_scale
                grad_weight = mm24(sample, x, ctx.weight_dtype, transposed=True, scales=scales)
            else:
                if ctx.mvue:
                    codes, scale = quantized_sample(dy, scale, key, ctx.mvue, formats)
                product = exact_product(codes.t(), x.t()[: len(dy)] if ctx.on_units else x)
                grad_weight = rescale(product, scale, x_scale, dtype=ctx.weight_dtype)
        if ctx.needs_input_grad[4]:
            grad_bias = dy.sum(0).to(ctx.bias_dtype)
        return grad_x, grad_weight, None, None, grad_bias, *(None,) * 6


def quantized_sample(
    dy: Tensor, scale: Tensor, key: Tensor, mvue: str, formats: Fp8Formats
) -> tuple[Tensor, Tensor]:
    """Codes of the sample of dY [T, out], and their scale; `scale` is that of dY."""
    if not formats.on_units or mvue != "exact":
        return quantize_fp8(sample_tokens(dy, key, mvue), formats.gradient)
    # An entry of the sample is at most twice the largest of dY.
    scale, dtype = 0.5 * scale, FORMATS[formats.gradient]
    top = torch.finfo(dtype).max
    return (sample_tokens(dy.float(), key, mvue) * scale).clamp(-top, top).to(dtype), scale


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    fprop: Fp8,
    dgrad: Fp8,
    bias: Tensor | None,
    key: Tensor,
    mvue: str | None,
    formats: Fp8Formats,
    packs_sample: str | None = None,
    amax: delayed.Amax = delayed.NONE,
) -> Tensor:
    """`x` [..., in] times the operand of fprop, with the backward pass of the module docstring.

    Args:
        weight: dense master weight [out, in]; it only receives dW.
        fprop, dgrad: codes in these formats, both for FP8 units or both for the simulation.
        bias, key, mvue, packs_sample: as for `gemms.sparse_linear`.
        amax: state of delayed scaling.
    """
    return _Fp8Linear.apply(x, weight, fprop, dgrad, bias, key, mvue, formats, packs_sample, *amax)
