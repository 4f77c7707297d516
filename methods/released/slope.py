"""SLoPe whose second copy of the weight, for dgrad, is never updated.

The released package keeps the twice-pruned W^T as a separate sparse tensor, which its optimizer
tries to update after each step by `weight_t.values().data = ...`
(github.com/Mohammad-Mozaffari/slope, optimizers/adamw_sparse.py). But `values()` returns a new
tensor object, and only its `.data` is replaced: the stored numbers do not change, and neither do
the positions when the column mask is chosen again. So dX is computed with the initial weights
throughout training, while the layer's own weights move.

Y, dW and the bias gradient are those of `methods.slope`, and so is dX in the first step.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from common_kernels import expand_nm, unpack_mask

from .. import slope
from ..nn.compressed import CompressedLinear
from ..nn.gemms import Products
from ..nn.operands import Dense
from . import needs

Config = slope.Config


class Linear(CompressedLinear):
    """Saved besides `CompressedLinear`'s state: `first`, the initial values under both masks."""

    first: Tensor

    def setup(self, name: str, config: Any, dtype: torch.dtype | None) -> None:
        super().setup(name, config, dtype)
        super().choose_mask()
        kept = unpack_mask(self.column_mask, self.values.shape[-1])
        self.register_buffer("first", torch.where(kept, self.values.detach(), 0.0))

    def choose_mask(self) -> None:
        """Do nothing: the column mask is never updated, either."""

    def sparse_products(self) -> Products:
        return replace(super().sparse_products(), dgrad=False)

    def operands(self, dtype: torch.dtype) -> tuple[Any, Any]:
        first = expand_nm(self.first.to(dtype), self.row_mask, *self.pattern)
        return super().operands(dtype)[0], Dense(first)


class Method(slope.Method):
    Linear = Linear

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        needs(config, "slope", adapter_rank=0, fp8="off")

    def _chooses(self, step: int) -> bool:
        return False
