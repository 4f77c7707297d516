"""The products of a layer whose N:M weight is stored compressed, with or without low-rank adapters,
in the dtype of the run and in FP8.

Shapes: T tokens, X [T, in], `values` [out, in * n / m] (common_kernels.compressed), L^T [r, in],
R [r, out]. W_R is the weight [out, in] expanded by the row mask, W_RC the same without the entries
that the column mask drops.

    fprop  Y        = X W_R^T + (X L) R / r + b     a product with W_R, one with L, then
                                                    lowrank_addmm
    dgrad  dX       = dY W_RC + dY2 L^T             dY2 = dY R^T / r
    wgrad  dvalues  = the kept entries of dY^T X    a dense product, compressed
           dL^T, dR = dY2^T X, (X L)^T dY / r

In FP8 (fp8_gemms.py) the formats are

    fprop    X, W_R      e4m3, e4m3; on FP8 units a sparse product of packed codes
    dgrad    dY, W_RC    e5m2, the recipe's format; on FP8 units sparse as well
    wgrad    dY, X       e5m2, the recipe's format

and adapters compute in the dtype of the run; while they are in use, X is also kept unquantised.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from common_kernels import expand_nm, lowrank_addmm, unpack_mask
from common_kernels.compressed import compress_checked

from .fp8_gemms import quantized_gradient, quantized_input, weight_gradient
from .gemms import without_autocast
from .operands import Dense, flat, save, saved

Pattern = tuple[int, int]  # (n, m)


def adapter_gradients(
    dy: Tensor, x: Tensor, left: Tensor, right: Tensor, grad_x: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of `left` and `right`. The adapters' part of dX is added to `grad_x` in place.

    Args:
        dy, x: [T, out] and [T, in].
        grad_x: [..., in], or None if x needs no gradient.
    """
    used = left.to(x.dtype)
    dy2 = dy @ right.to(x.dtype).t() / len(right)
    grad_left, grad_right = dy2.t() @ x, (x @ used.t()).t() @ dy / len(right)
    if grad_x is not None:
        flat(grad_x).addmm_(dy2, used)
    return grad_left.to(left.dtype), grad_right.to(right.dtype)


class Product(torch.autograd.Function):
    """The products of the module docstring. Only compressed operands are saved for the backward
    pass; dense ones would be held for all layers at once.
    """

    @staticmethod
    def forward(
        ctx, x, values, left, right, bias, row_mask, column_mask, fprop, dgrad, pattern, adapting
    ):
        ctx.pattern, ctx.adapting = pattern, adapting
        ctx.bias_dtype = None if bias is None else bias.dtype
        save(ctx, dgrad, x, values, left, right, row_mask, column_mask)
        if fprop is None:
            fprop = Dense(expand_nm(values.to(x.dtype), row_mask, *pattern))
        if not adapting:
            return fprop.linear(x, bias)
        y1, y2 = fprop.linear(x, None), F.linear(x, left.to(x.dtype))
        return lowrank_addmm(y1, y2, right.to(x.dtype), bias, 1 / len(right))

    @staticmethod
    def backward(ctx, grad_y):
        dgrad, x, values, left, right, row_mask, column_mask = saved(ctx)
        of_x, of_values, _, _, of_bias, *_ = ctx.needs_input_grad
        dy, x2d = flat(grad_y), flat(x)
        grad_x = grad_values = grad_left = grad_right = grad_bias = None
        with without_autocast(grad_y):
            if of_x:
                if dgrad is None:
                    kept = unpack_mask(column_mask, values.shape[-1])
                    twice_pruned = torch.where(kept, values, 0.0).to(x.dtype)
                    dgrad = Dense(expand_nm(twice_pruned, row_mask, *ctx.pattern))
                grad_x = dgrad.grad(grad_y)
            if of_values:
                grad_values = compress_checked(
                    dy.t() @ x2d, row_mask, *ctx.pattern, dtype=values.dtype
                )
            # Adapters are inputs even before their phase, when they get no gradient: DDP waits for
            # every parameter that it knows.
            if ctx.adapting:
                grad_left, grad_right = adapter_gradients(dy, x2d, left, right, grad_x)
            if of_bias:
                grad_bias = dy.sum(0).to(ctx.bias_dtype)
        return grad_x, grad_values, grad_left, grad_right, grad_bias, *(None,) * 6


class Fp8Product(torch.autograd.Function):
    """The same in FP8."""

    @staticmethod
    def forward(
        ctx, x, values, left, right, bias, row_mask, fprop, dgrad, pattern, adapting, formats,
        amax, seen,
    ):  # fmt: skip
        ctx.pattern, ctx.adapting, ctx.formats = pattern, adapting, formats
        ctx.on_units = fprop.on_units
        ctx.dtypes = values.dtype, None if bias is None else bias.dtype
        ctx.seen = seen  # not saved by autograd: it changes before the backward pass
        with without_autocast(x):
            codes, kept, scale = quantized_input(x, formats, fprop.on_units, amax, seen)
            adapters = (x, left, right) if adapting else (None,) * 3
            save(ctx, dgrad, kept, scale, amax, row_mask, *adapters)
            y = fprop.linear(codes, None if adapting else bias, x.dtype)
            if adapting:
                y2 = F.linear(x, left.to(x.dtype))
                y = lowrank_addmm(y, y2, right.to(x.dtype), bias, 1 / len(right))
            return y

    @staticmethod
    def backward(ctx, dy):
        dgrad, x, x_scale, amax, row_mask, given, left, right = saved(ctx)
        of_x, of_values, _, _, of_bias, *_ = ctx.needs_input_grad
        grad_x = grad_values = grad_left = grad_right = grad_bias = None
        with without_autocast(dy):
            codes, turned = quantized_gradient(dy, ctx.formats, ctx.on_units, amax, ctx.seen)
            if of_x:
                grad_x = dgrad.grad(codes, dy.dtype)
            if of_values:
                fp32 = torch.float32
                product = weight_gradient(codes, turned, x, x_scale, ctx.on_units, fp32)
                grad_values = compress_checked(product, row_mask, *ctx.pattern, dtype=ctx.dtypes[0])
                del product
            if ctx.adapting:
                own = flat(dy), flat(given)
                grad_left, grad_right = adapter_gradients(*own, left, right, grad_x)
            if of_bias:
                grad_bias = flat(dy).sum(0).to(ctx.dtypes[1])
        return grad_x, grad_values, grad_left, grad_right, grad_bias, *(None,) * 8
