"""SLoPe whose kept weights get the gradients of their pruned neighbours.

In the released package (github.com/Mohammad-Mozaffari/slope) the pruning kernel's masks are True
for pruned weights. `prune_model` (slope/slope.py) makes the layer's mask from them, and the kernel
that compresses dW (prune_and_compress of pruning_kernels) keeps the entries where this mask is
True. So in each group of four the gradients of the two pruned weights are applied, in order, to the
two kept values: the weights do not move along their own gradient.

Y, dX and the bias gradient are those of `methods.slope`.
"""

from typing import Any

import torch
from torch import Tensor

from common_kernels import expand_nm, unpack_mask

from .. import slope
from ..nn.compressed import CompressedLinear
from ..nn.compressed_gemms import Product
from ..nn.gemms import DENSE, Products
from ..nn.operands import Dense
from . import needs

Config = slope.Config


class Linear(CompressedLinear):
    def sparse_products(self) -> Products:
        return DENSE

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        x, values = self.checked_input(x), self.values.detach()
        kept = unpack_mask(self.column_mask, values.shape[-1])
        operands = (
            Dense(expand_nm(own.to(x.dtype), self.row_mask, *self.pattern))
            for own in (values, torch.where(kept, values, 0.0))
        )
        # Both operands are given, so this mask only chooses the entries of dW.
        masks = ~self.row_mask, self.column_mask
        given = x, self.values, None, None, self.bias, *masks, *operands
        return Product.apply(*given, self.pattern, False)


class Method(slope.Method):
    Linear = Linear

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        # It must prune as many weights as it keeps.
        needs(config, "slope_mask", adapter_rank=0, fp8="off", patterns=(), m=2 * config.n)
