"""The three GEMMs of S-STE on FP8 units (compute capability 9.0); notation as in gemms.py.

    GEMM   operands                    product                                      result
    Y      X, beta S(W): e4m3          sparse (cuSPARSELt), or dense where faster   bf16
    dX     dY: e5m2, beta S(W): e4m3   dense (cuBLAS)                               bf16
    dW     S(dY), X: e5m2              sparse along the tokens (cuSPARSELt)         fp32

Every tensor is quantised once for all products that take it, X and dY along with what the backward
pass needs of them: X is kept as the codes of its transpose, half of its bytes. The sample of dY has
half of dY's scale instead of one of its own (prepare.fp8). The products differ from the simulated
ones by that, by the accumulation of the FP8 units, and by the rounding of results to bf16.

With other formats: cuBLAS has no product of e5m2 by e5m2, so the paper's dX is taken in bf16, which
holds all codes exactly; dW is taken in bf16 where it is not sparse or its operands differ.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common_kernels import quantize_fp8
from common_kernels.matmul import blob_linear, blob_matmul
from common_kernels.prepare.fp8 import (
    quantize_and_sample,
    quantize_both,
    rescale,
    scaled_linear,
)

from .gemms import Fp8Formats, Products, groups_of, sample_tokens, with_leading_dims


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x, weight, forward_codes, transposed_codes, scales, bias, key, mvue, fp8, products
    ):
        ctx.mvue, ctx.fp8, ctx.products, ctx.shape = mvue, fp8, products, x.shape
        ctx.weight_dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype
        with torch.autocast(x.device.type, enabled=False):
            x2d = x.reshape(-1, x.shape[-1])
            if products.weight:
                codes, x_saved, scale, x_scale = quantize_both(x2d, fp8.forward, fp8.wgrad)
            else:
                codes, scale = quantize_fp8(x2d, fp8.forward)
                x_saved, x_scale = x2d, scale
            ctx.save_for_backward(x_saved, x_scale, transposed_codes, scales, key)
            if products.forward:
                y = blob_linear(forward_codes, codes, out_dtype=torch.bfloat16)
                y = rescale(y, scale, scales[0], bias=bias, dtype=x.dtype)
            else:
                y = scaled_linear(codes, forward_codes, scale, scales[0], bias)
            y = with_leading_dims(y, x)
            return y if y.dtype == x.dtype else y.to(x.dtype)

    @staticmethod
    def backward(ctx, grad_y):
        with torch.autocast(grad_y.device.type, enabled=False):
            return _Fp8Linear._backward(ctx, grad_y)

    @staticmethod
    def _backward(ctx, grad_y):
        x, x_scale, transposed_codes, scales, key = ctx.saved_tensors
        fp8, dy = ctx.fp8, grad_y.reshape(-1, grad_y.shape[-1])
        grad_x = grad_weight = grad_bias = None
        if ctx.products.weight and ctx.needs_input_grad[1]:
            codes, sample, scale = quantize_and_sample(dy, key, groups_of(dy), fp8.gradient)
        else:
            codes, scale = quantize_fp8(dy, fp8.gradient)
        if ctx.needs_input_grad[0]:
            grad_x = input_gradient(codes, transposed_codes, scale, scales[1])
            grad_x = grad_x.to(grad_y.dtype).reshape(ctx.shape)
        if ctx.needs_input_grad[1] and ctx.products.weight:
            grad_weight = blob_matmul(sample, x, torch.float32, transposed=True)
            grad_weight = rescale(grad_weight, scale, x_scale, 2.0, dtype=ctx.weight_dtype)
        elif ctx.needs_input_grad[1]:
            grad_weight = weight_gradient(dy, x, key, ctx.mvue, fp8, ctx.weight_dtype)
        if ctx.needs_input_grad[5]:
            grad_bias = dy.sum(0).to(ctx.bias_dtype)
        return grad_x, grad_weight, None, None, None, grad_bias, *(None,) * 4


def input_gradient(dy: Tensor, codes: Tensor, dy_scale: Tensor, scale: Tensor) -> Tensor:
    """dY W for codes dY [T, out] and codes of W^T [in, out], which are held in bf16 if they are not
    e4m3."""
    if codes.dtype is torch.float8_e4m3fn:
        return scaled_linear(dy, codes, dy_scale, scale)
    product = F.linear(dy.to(torch.bfloat16), codes)
    return rescale(product, dy_scale, scale)


def weight_gradient(
    dy: Tensor, x: Tensor, key: Tensor, mvue: str | None, fp8: Fp8Formats, dtype: torch.dtype
) -> Tensor:
    """S(dY)^T X of quantised operands, multiplied in bf16."""
    sample, scale = quantize_fp8(sample_tokens(dy, key, mvue) if mvue else dy, fp8.gradient)
    codes, x_scale = quantize_fp8(x, fp8.wgrad)
    product = sample.to(torch.bfloat16).t() @ codes.to(torch.bfloat16)
    return rescale(product, scale, x_scale, dtype=dtype)


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    forward_codes: Tensor,
    transposed_codes: Tensor,
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
        forward_codes: [out, in], or its blob if `products.forward`. transposed_codes: [in, out],
            e4m3, or e5m2 codes in bf16.
        scales: fp32 [2], theirs.
        bias, key, mvue, fp8, products: as for `gemms.sparse_linear`.
    """
    return _Fp8Linear.apply(
        x, weight, forward_codes, transposed_codes, scales, bias, key, mvue, fp8, products
    )
