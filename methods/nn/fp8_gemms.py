"""The three GEMMs of S-STE in FP8 (section 5 of the paper); notation as in gemms.py.

    GEMM   operands      paper          hybrid         hopper
    fprop  X, Wf         e4m3, e4m3     e4m3, e4m3     e4m3, e4m3
    dgrad  dY, Wb        e5m2, e5m2     e5m2, e4m3     e5m2, e4m3
    wgrad  S(dY), X      e5m2, e5m2     e5m2, e4m3     e5m2, e5m2

Every operand is quantised once in each format that takes it, with one scale for the whole tensor of
a micro-batch; a product of codes is divided by both scales in fp32 and rounded once. Of X the
backward pass keeps codes, a byte each. The sample of dY comes first and is then quantised.

Simulated (all recipes, on any device): what codes hold is exact in bf16, so that on a GPU the
products are those of bf16 operands, accumulated in fp32 and given in fp32. Nothing but the scale
is computed from the values: numerics, and no time saved.

On FP8 units (compute capability 9.0; `hopper` alone, whose formats are what they multiply: dense
products with e5m2 in one operand at most, sparse ones with both operands in one format):

    fprop  sparse (cuSPARSELt), or dense where faster               given in bf16
    dgrad  dense (cuBLAS)                                           given in bf16
    wgrad  sparse along the tokens, or bf16 codes where faster      given in fp32

They differ from the simulation of the same recipe by the accumulation of the FP8 units and by the
rounding of Y and dX to bf16. For them `hopper` gives the sample of dY half of dY's scale instead of
one of its own, so that dY is searched for its largest magnitude once (prepare.fp8).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common_kernels import quantize_fp8
from common_kernels.fp8.cpu import FORMATS
from common_kernels.matmul import blob_linear, blob_matmul
from common_kernels.prepare.fp8 import (
    quantize_and_sample,
    quantize_both,
    rescale,
    scaled_linear,
)

from .gemms import Products, groups_of, sample_tokens, with_leading_dims


@dataclass(frozen=True)
class Fp8Formats:
    """FP8 format of each kind of operand, `e4m3` or `e5m2`."""

    fprop: str  # X and W in fprop
    gradient: str  # dY in dgrad and wgrad
    dgrad: str  # W in dgrad
    wgrad: str  # X in wgrad
    on_units: bool = False  # what FP8 units multiply; the sample of dY has half of dY's scale


FP8 = {
    "off": None,
    # S-STE: both operands of a product share a format, so the backward pass is all e5m2.
    "paper": Fp8Formats(fprop="e4m3", gradient="e5m2", dgrad="e5m2", wgrad="e5m2"),
    # The usual recipe of FP8 training: only gradients need the range of e5m2.
    "hybrid": Fp8Formats(fprop="e4m3", gradient="e5m2", dgrad="e4m3", wgrad="e4m3"),
    "hopper": Fp8Formats("e4m3", "e5m2", dgrad="e4m3", wgrad="e5m2", on_units=True),
}


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x, weight, fprop_codes, dgrad_codes, scales, bias, key, mvue, fp8, products
    ):
        ctx.mvue, ctx.fp8, ctx.products, ctx.shape = mvue, fp8, products, x.shape
        ctx.weight_dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype
        with torch.autocast(x.device.type, enabled=False):
            x2d = x.reshape(-1, x.shape[-1])
            if products.fp8:
                codes, kept, scale, kept_scale = quantize_both(x2d, fp8.fprop, fp8.wgrad)
            else:
                codes, scale = kept, kept_scale = quantize_fp8(x2d, fp8.fprop)
                if fp8.wgrad != fp8.fprop:
                    kept, kept_scale = quantize_fp8(x2d, fp8.wgrad)
            ctx.save_for_backward(kept, kept_scale, dgrad_codes, scales, key)
            if products.fp8 and not products.fprop:
                y = scaled_linear(codes, fprop_codes, scale, scales[0], bias)
                # A `to` that changes nothing, as the output, makes torch.compile of torch 2.11 drop
                # this function's backward pass without a word.
                y = y if y.dtype == x.dtype else y.to(x.dtype)
            else:
                if products.fprop:
                    y = blob_linear(fprop_codes, codes, out_dtype=torch.bfloat16)
                else:
                    y = exact_product(codes, fprop_codes.t())
                y = rescale(y, scale, scales[0], bias=bias, dtype=x.dtype)
            return with_leading_dims(y, x)

    @staticmethod
    def backward(ctx, grad_y):
        with torch.autocast(grad_y.device.type, enabled=False):
            return _Fp8Linear._backward(ctx, grad_y)

    @staticmethod
    def _backward(ctx, grad_y):
        x, x_scale, dgrad_codes, scales, key = ctx.saved_tensors
        fp8, products = ctx.fp8, ctx.products
        dy = grad_y.reshape(-1, grad_y.shape[-1])
        grad_x = grad_weight = grad_bias = None
        if products.wgrad and ctx.needs_input_grad[1]:
            codes, blob, scale = quantize_and_sample(dy, key, groups_of(dy), fp8.gradient)
        else:
            codes, scale = quantize_fp8(dy, fp8.gradient)
        if ctx.needs_input_grad[0]:
            if products.fp8:
                grad_x = scaled_linear(codes, dgrad_codes, scale, scales[1]).to(grad_y.dtype)
            else:
                product = exact_product(codes, dgrad_codes)
                grad_x = rescale(product, scale, scales[1], dtype=grad_y.dtype)
            grad_x = grad_x.reshape(ctx.shape)
        if ctx.needs_input_grad[1]:
            if products.wgrad:
                product = blob_matmul(blob, x, torch.float32, transposed=True)
                scale = 0.5 * scale
            else:
                if ctx.mvue:
                    codes, scale = quantized_sample(dy, scale, key, ctx.mvue, fp8)
                rows = x.t()[: len(dy)] if products.fp8 else x
                product = exact_product(codes.t(), rows)
            grad_weight = rescale(product, scale, x_scale, dtype=ctx.weight_dtype)
        if ctx.needs_input_grad[5]:
            grad_bias = dy.sum(0).to(ctx.bias_dtype)
        return grad_x, grad_weight, None, None, None, grad_bias, *(None,) * 4


def exact_product(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k] b [k, n] in fp32, a and b being codes: bf16 holds them exactly."""
    if a.is_cuda:
        return torch.mm(a.to(torch.bfloat16), b.to(torch.bfloat16), out_dtype=torch.float32)
    return a.float() @ b.float()


def quantized_sample(
    dy: Tensor, scale: Tensor, key: Tensor, mvue: str, fp8: Fp8Formats
) -> tuple[Tensor, Tensor]:
    """Codes of the sample of dY [T, out], and their scale; `scale` is that of dY."""
    if not fp8.on_units or mvue != "exact":
        return quantize_fp8(sample_tokens(dy, key, mvue), fp8.gradient)
    # An entry of the sample is at most twice the largest of dY.
    scale, dtype = 0.5 * scale, FORMATS[fp8.gradient]
    top = torch.finfo(dtype).max
    return (sample_tokens(dy.float(), key, mvue) * scale).clamp(-top, top).to(dtype), scale


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    fprop_codes: Tensor,
    dgrad_codes: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    key: Tensor,
    mvue: str | None,
    fp8: Fp8Formats,
    products: Products,
) -> Tensor:
    """`x` [..., in] times the weight in codes, with the backward pass of the module docstring.

    Args:
        weight: dense master weight [out, in]; it only receives dW.
        fprop_codes: [out, in], or its blob if `products.fprop`. dgrad_codes: [out, in], or
            on FP8 units its transpose [in, out].
        scales: fp32 [2], theirs.
        bias, key, mvue, products: as for `gemms.sparse_linear`; `products.fp8`: on FP8 units.
    """
    return _Fp8Linear.apply(
        x, weight, fprop_codes, dgrad_codes, scales, bias, key, mvue, fp8, products
    )
