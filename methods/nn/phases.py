"""A layer and a method that are dense in some steps and sparse in others, and such a layer with a
mask that is 2:4 along both dims of its weight."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from common_kernels import transposable_mask24
from common_kernels.adamw.weights import CHOICES, Rule
from common_kernels.pack import Packed24
from common_kernels.pack.operands import pack_both24_

from . import base
from .fp8_gemms import Fp8Formats
from .gemms import DENSE, Products
from .linear import MaskedLinear
from .optimizer import StepWork


class SwitchedLinear(MaskedLinear):
    """A `MaskedLinear` that computes with the whole weight, and without FP8, in its dense phase.
    State besides `MaskedLinear`'s: `dense` (bool [], saved), the phase. `is_dense` is a Python copy
    of it to branch on, which only `restart` reads from the buffer, because a forward pass must not
    wait for the device."""

    dense: Tensor
    is_dense: bool = False
    prunes = "mask"

    def setup(self, name: str, config: Any, dtype: torch.dtype | None) -> None:
        super().setup(name, config, dtype)
        self.register_buffer("dense", torch.zeros_like(self.mask[0, 0]))

    @property
    def phase(self) -> str:
        return "dense" if self.is_dense else "sparse"

    @property
    def fp8(self) -> Fp8Formats | None:
        return None if self.is_dense else self.precision

    @property
    def products(self) -> Products:
        return DENSE if self.is_dense else self.accelerated

    def restart(self) -> None:
        if not self.dense.is_meta:  # a meta tensor cannot be read
            self.is_dense = bool(self.dense)
        self.allocate()

    def switch(self, dense: bool) -> None:
        self.dense.fill_(dense)
        self.is_dense = dense
        self.reload()

    def effective_weight(self) -> Tensor:
        return torch.where(self.mask | self.dense, self.weight.detach(), 0.0)


class TransposableLinear(SwitchedLinear):
    """A layer with a transposable mask, so that dgrad's operand is 2:4 along `out` as well."""

    config: Any
    rows_together = 4
    both_ways = True
    prunes = "mask"

    def sparse_products(self) -> Products:
        return replace(super().sparse_products(), dgrad=True)

    def choose_mask(self) -> None:
        self.mask.copy_(transposable_mask24(self.weight.detach(), self.config.algorithm))

    def pack(self) -> None:
        if self.packed_transposed is None:
            super().pack()
            return
        weight, (fprop, dgrad) = self.weight.detach(), self.packed_operands()
        assert dgrad is not None
        if fprop is None:  # a temporary one, as the kernel writes both
            given = self.dtype, weight.device, self.accelerated.layouts.fprop
            packed = Packed24.empty((self.out_features, self.in_features), *given)
        else:
            packed = fprop.matrix
        pack_both24_(packed, dgrad.matrix, weight, self.mask)
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
        rule = Rule(alpha=alpha, choose=choose, source="whole" if self.is_dense else source)
        return StepWork(layer=self, rule=rule, mask=self.mask)


class SwitchedMethod(base.Method):
    """A method with a dense and a sparse phase. `dense_at` says to which phase a step belongs; the
    layers hold the current phase. A subclass with further state extends `saved`."""

    saved: ClassVar[tuple[str, ...]] = ("dense",)

    @property
    def dense(self) -> bool:
        """True if the layers are dense now."""
        return any(isinstance(m, SwitchedLinear) and m.is_dense for m in self.layers.values())

    @dense.setter
    @torch.no_grad()
    def dense(self, dense: bool) -> None:
        for layer in self.sparse_layers.values():
            layer.switch(dense)

    def dense_at(self, step: int) -> bool:
        """True if optimizer step `step` is dense."""
        raise NotImplementedError(f"{type(self).__name__} does not say when it is dense")

    def convert(self, model: nn.Module, dtype: torch.dtype | None = None) -> base.Report:
        report = super().convert(model, dtype)
        self.dense = self.dense_at(0)
        return report

    def on_step_begin(self, step: int) -> None:
        if self.dense_at(step) != self.dense:
            self._begin(step)  # first, as the model may have been sharded or evaluated since
            self.dense = not self.dense
        super().on_step_begin(step)

    @property
    def unfinished(self) -> bool:
        total = self.config.total_steps
        return total > 0 and self.dense_at(total - 1) != self.dense

    def phase(self) -> str:
        return "dense" if self.dense else "sparse"
