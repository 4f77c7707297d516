"""Projected training: after each step the n largest of m weights stay and the others become zero.

    GEMM   operand 1   operand 2   sparse operand, along
    fprop  X           W * M       weight, 2:4 along `in`
    dgrad  dY          W * M       the same weight (2:4 along `in`: a dense product on hardware)
    wgrad  dY          X           none; flows to W unmasked

It is the hard N:M constraint of torchao's pruning-aware training (prototype/pat:
`NMSparseConstraint` in `PruneOptimizer`). The optimizer steps from latent weights, which the
projection leaves alone, by the gradient at the projected ones; this is `ste` until the "healing",
the last steps. Then the mask is frozen, the latent weights of pruned entries are given up, and only
the kept entries train on. The model ends 2:4 sparse.

torchao masks the gradient in the healing; here pruned entries are set to zero again after a step,
which is the same for every optimizer that treats entries separately.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import ste
from .nn import base
from .nn.linear import MaskedLinear
from .nn.optimizer import StepWork


@dataclass(frozen=True, kw_only=True)
class Config(base.NMConfig, base.PartialConfig):
    """Options of projected training.

    healing_fraction: share of `total_steps`, the last ones, in which the mask is frozen. torchao
        leaves it to the user; 0 = never.
    """

    healing_fraction: float = base.number(0.2, 0, 1)


class Linear(MaskedLinear):
    """A masked linear whose weight itself has the zeros of its mask from the healing on.

    State besides `MaskedLinear`'s: `frozen` (bool [], saved), True in the healing, and `is_frozen`,
    a Python copy of it, because a step must not wait for the device.
    """

    frozen: Tensor
    is_frozen: bool = False

    def setup(self, name: str, config: Any, dtype: torch.dtype | None) -> None:
        super().setup(name, config, dtype)
        self.register_buffer("frozen", torch.zeros_like(self.mask[0, 0]))

    def choose_mask(self) -> None:
        chosen = self.best_of(self.weight.detach())
        self.mask.copy_(torch.where(self.frozen, self.mask, chosen))

    @torch.no_grad()
    def update_buffers(self) -> None:
        self.weight.masked_fill_(~self.mask & self.frozen, 0.0)

    def restart(self) -> None:
        if not self.frozen.is_meta:  # a meta tensor cannot be read
            self.is_frozen = bool(self.frozen)
        super().restart()

    def freeze(self) -> None:
        self.frozen.fill_(True)
        self.is_frozen = True
        self.refresh()


class Method(ste.Method):
    Config = Config  # type: ignore[assignment]  # has no fp8
    Linear = Linear

    @property
    def fraction(self) -> str:
        return "healing_fraction" if self.config.healing_fraction else ""

    def heals_at(self, step: int) -> bool:
        """True if the mask is frozen in optimizer step `step`."""
        length = round(self.config.healing_fraction * self.config.total_steps)
        return length > 0 and step >= self.config.total_steps - length

    @torch.no_grad()
    def on_step_begin(self, step: int) -> None:
        super().on_step_begin(step)
        if self.heals_at(step) and self.phase() != "healing":
            for layer in self.sparse_layers.values():
                layer.freeze()
            self._remember(step)  # so that the zeros are not taken for an optimizer step

    def step_work(self, layer: Any, step: int) -> StepWork | None:
        return None if self.heals_at(step) else super().step_work(layer, step)

    @property
    def unfinished(self) -> bool:
        total = self.config.total_steps
        return total > 0 and self.heals_at(total - 1) and self.phase() != "healing"

    def phase(self) -> str:
        healing = any(layer.is_frozen for layer in self.sparse_layers.values())
        return "healing" if healing else "sparse"
