"""A layer under a mask that is 2:4 along both dims of its weight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from common_kernels import transposable_mask24
from common_kernels.adamw.weights import CHOICES, Rule
from common_kernels.pack.operands import pack_both24_

from .fp8_gemms import Fp8Formats
from .gemms import Products
from .optimizer import StepWork
from .phases import SwitchedLinear


class TransposableLinear(SwitchedLinear):
    """A layer with a transposable mask, so that dgrad's operand is 2:4 along `out` as well. FP8 is
    used only in the sparse phase."""

    config: Any
    rows_together = 4
    both_ways = True

    @property
    def fp8(self) -> Fp8Formats | None:
        own = self.precision  # not super().fp8, which torch.compile mistakes
        return None if self.is_dense or own is None else own.formats

    def sparse_products(self) -> Products:
        return replace(super().sparse_products(), dgrad=True)

    def choose_mask(self) -> None:
        self.mask.copy_(transposable_mask24(self.weight.detach(), self.config.algorithm))

    def pack(self) -> None:
        if self.packed_transposed is None:
            super().pack()
            return
        pack_both24_(*self.both_packed(), self.weight.detach(), self.mask)
        if self.operand is not None:
            self.operand.copy_(self.effective_weight())

    def step_work(self, alpha: float, chooses: bool) -> StepWork | None:
        """The work of a step on the weight, for `Method.step_work`.

        Args:
            alpha: factor of the masked decay.
            chooses: True if a mask is due.
        """
        if self.config.algorithm not in CHOICES:
            return None
        choose, source = self.config.algorithm if chooses else None, "mask"
        if self.is_dense:
            source = "whole"
        rule = Rule(alpha=alpha, choose=choose, source=source)
        return StepWork(layer=self, rule=rule, mask=self.mask)
