"""A layer and a method that are dense in some steps and sparse in others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import base
from .gemms import DENSE, Products
from .linear import MaskedLinear


class SwitchedLinear(MaskedLinear):
    """A `MaskedLinear` that computes with the whole weight in its dense phase.

    State besides `MaskedLinear`'s: `dense` (bool [], saved), the phase. `is_dense` is a Python copy
    of it to branch on, which only `restart` reads from the buffer, because a forward pass must not
    wait for the device.
    """

    dense: Tensor
    is_dense: bool = False

    def setup(self, name: str, config: Any, dtype: torch.dtype | None) -> None:
        super().setup(name, config, dtype)
        self.register_buffer("dense", torch.zeros_like(self.mask[0, 0]))

    @property
    def phase(self) -> str:
        return "dense" if self.is_dense else "sparse"

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


class SwitchedMethod(base.Method):
    """A method with a dense and a sparse phase. `dense_at` says to which phase a step belongs; the
    layers hold the current phase."""

    @property
    def dense(self) -> bool:
        """True if the layers are dense now."""
        return any(isinstance(m, SwitchedLinear) and m.is_dense for m in self.layers.values())

    def dense_at(self, step: int) -> bool:
        """True if optimizer step `step` is dense."""
        raise NotImplementedError(f"{type(self).__name__} does not say when it is dense")

    def convert(self, model: nn.Module, dtype: torch.dtype | None = None) -> base.Report:
        report = super().convert(model, dtype)
        self._switch(self.dense_at(0))
        return report

    @torch.no_grad()
    def _switch(self, dense: bool) -> None:
        for layer in self.sparse_layers.values():
            layer.switch(dense)

    def on_step_begin(self, step: int) -> None:
        if self.dense_at(step) != self.dense:
            self._begin(step)  # first, as the model may have been sharded or evaluated since
            self._switch(not self.dense)
        super().on_step_begin(step)

    @property
    def unfinished(self) -> bool:
        total = self.config.total_steps
        return total > 0 and self.dense_at(total - 1) != self.dense

    def phase(self) -> str:
        return "dense" if self.dense else "sparse"

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "dense": self.dense}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._switch(state["dense"])
