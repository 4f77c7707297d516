"""`CompressedLinear` with its three products in FP8. The trained parameters stay the compressed
values.

    fprop    X, W_R      e4m3, e4m3; on FP8 units a sparse product of packed codes
    dgrad    dY, W_RC    e5m2, the recipe's format (fp8_gemms.py); on FP8 units sparse as well
    wgrad    dY, X       e5m2, the recipe's format; a dense product, compressed afterwards

Adapters compute in the dtype of the run; while they are in use, X is also kept unquantised.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common_kernels import compress_nm, lowrank_addmm
from common_kernels.fp8.weights import quantize_compressed24_
from common_kernels.pack.compressed import Compressed24

from . import delayed
from .compressed import CompressedLinear, adapter_gradients, dense_left
from .fp8_gemms import quantized_gradient, quantized_input, weight_gradient
from .fp8_linear import Fp8Linear
from .gemms import without_autocast
from .operands import flat, save, saved


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x, values, left, right, bias, row_mask, left_mask, fprop, dgrad, pattern, adapting,
        formats, amax, seen,
    ):  # fmt: skip
        ctx.pattern, ctx.adapting, ctx.formats = pattern, adapting, formats
        ctx.on_units = fprop.on_units
        ctx.dtypes = values.dtype, None if bias is None else bias.dtype
        ctx.seen = seen  # not saved by autograd: it changes before the backward pass
        with without_autocast(x):
            codes, kept, scale = quantized_input(x, formats, fprop.on_units, amax, seen)
            adapters = (x, left, right, left_mask) if adapting else (None,) * 4
            save(ctx, dgrad, kept, scale, amax, row_mask, *adapters)
            y = fprop.linear(codes, None if adapting else bias, x.dtype)
            if adapting:
                y2 = F.linear(x, dense_left(left.to(x.dtype), left_mask, pattern))
                y = lowrank_addmm(y, y2, right.to(x.dtype), bias, 1 / len(right))
            return y

    @staticmethod
    def backward(ctx, dy):
        dgrad, x, x_scale, amax, row_mask, given, left, right, left_mask = saved(ctx)
        grad_x = grad_values = grad_left = grad_right = grad_bias = None
        with without_autocast(dy):
            codes, turned = quantized_gradient(dy, ctx.formats, ctx.on_units, amax, ctx.seen)
            if ctx.needs_input_grad[0]:
                grad_x = dgrad.grad(codes, dy.dtype)
            if ctx.needs_input_grad[1]:
                fp32 = torch.float32
                product = weight_gradient(codes, turned, x, x_scale, ctx.on_units, fp32)
                grad_values = compress_nm(product, row_mask, *ctx.pattern, dtype=ctx.dtypes[0])
                del product
            if ctx.adapting:
                to = None if grad_x is None else flat(grad_x)
                grad_left, grad_right = adapter_gradients(
                    flat(dy), flat(given), left, right, left_mask, ctx.pattern, to
                )
            if ctx.needs_input_grad[4]:
                grad_bias = flat(dy).sum(0).to(ctx.dtypes[1])
        return grad_x, grad_values, grad_left, grad_right, grad_bias, *(None,) * 9


class Fp8CompressedLinear(Fp8Linear, CompressedLinear):
    """`CompressedLinear` in FP8; its state is that of both base classes."""

    both_ways = True

    def quantize(self, amax: Tensor | None = None) -> None:
        """Derive the codes of both operands, dense or packed."""
        quantize_compressed24_(
            *self._room_for_codes(), self.code_scales, self.values.detach(), self.row_mask,
            self.column_mask, *self.pattern,
        )  # fmt: skip

    def stored(self) -> Compressed24 | None:
        return None if self.recipe else super().stored()  # with FP8 packed operands are codes

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]; in evaluation without FP8."""
        if not self.fp8 or (not self.training and not torch.is_grad_enabled()):
            return self.forward_with(x, (None, None) if self.fp8 else None)
        x = self.checked_input(x)
        amax = delayed.of(self) if self.fp8.delayed else delayed.NONE
        operands: Any = self.operands(x.dtype)
        return _Fp8Product.apply(
            x, self.values, self.left, self.right, self.bias, self.row_mask, self.left_mask,
            *operands, self.pattern, self.adapting, self.fp8, *amax,
        )  # fmt: skip
