"""SLoPe whose kept weights get the gradients of their pruned neighbours.

In the released package (github.com/Mohammad-Mozaffari/slope) the pruning kernel's masks are True
for pruned weights. `prune_model` (slope/slope.py) makes the layer's mask from them, and the kernel
that compresses dW (prune_and_compress of pruning_kernels) keeps the entries where this mask is
True. So in each group of four the gradients of the two pruned weights are applied, in order, to the
two kept values: the weights do not move along their own gradient.

Y, dX and the bias gradient are those of `methods.slope`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from common_kernels import compress_nm

from .. import slope
from ..nn.compressed import CompressedLinear
from ..nn.compressed_gemms import Product
from ..nn.gemms import DENSE, Products
from . import needs

Config = slope.Config


class _WeightGradient(torch.autograd.Function):
    """Returns y [..., out]; dvalues are the entries of dY^T X under another mask than y's."""

    @staticmethod
    def forward(ctx, y, x, values, mask, pattern):
        ctx.pattern, ctx.dtype = pattern, values.dtype
        ctx.save_for_backward(x, mask)
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad_y):
        x, mask = ctx.saved_tensors
        dy, x2d = grad_y.reshape(-1, grad_y.shape[-1]), x.reshape(-1, x.shape[-1])
        grad_values = compress_nm(dy.t() @ x2d, mask, *ctx.pattern, dtype=ctx.dtype)
        return grad_y, None, grad_values, None, None


class Linear(CompressedLinear):
    def sparse_products(self) -> Products:
        return DENSE

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        x, pattern = self.checked_input(x), self.pattern
        masks, none = (self.row_mask, self.column_mask), (None, None)
        y = Product.apply(x, self.values.detach(), *none, self.bias, *masks, *none, pattern, False)
        return _WeightGradient.apply(y, x.detach(), self.values, ~self.row_mask, pattern)


class Method(slope.Method):
    Linear = Linear

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        # It must prune as many weights as it keeps.
        needs(config, "slope_mask", adapter_rank=0, fp8="off", patterns=(), m=2 * config.n)
