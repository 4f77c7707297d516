"""One-shot pruning: a 2:4 mask chosen once, by magnitude, Wanda or SparseGPT, then fine-tuning.

    GEMM   operand 1   operand 2   sparse operand, along
    fprop  X           W           weight, 2:4 along `in`
    dgrad  dY          W           the same weight (2:4 along `in`: a dense product on hardware)
    wgrad  dY          X           none; flows to W under the mask

`convert` prunes, and the mask never changes afterwards. Removed entries are exact zeros of the
Parameter and stay zero, because their gradient is masked (so it does not count in the clipped norm,
either). Without training this is the training-free baseline of AST (arXiv 2407.20584, Table 1);
with training it is "naive training" (Table 4), and with distillation "fixed mask". The model ends
2:4 sparse.

Wanda and SparseGPT prune the layers in the model's order, each for the inputs that come from the
layers already pruned, as both papers do. The released codes measure a whole transformer block
before any of its layers is pruned; here every layer is measured separately.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common_kernels import nm_mask

from .nn import base, distillation
from .nn.calibration import collect
from .nn.gemms import DENSE, Products
from .nn.linear import MaskedLinear
from .nn.sparsegpt import prune

METRICS = ("magnitude", "wanda", "sparsegpt")


@dataclass(frozen=True, kw_only=True)
class Config(distillation.Config, base.NMConfig):
    """Options besides those of distillation, which is off by default.

    n, m: keep n of m consecutive inputs.
    metric: the score of a weight: `magnitude` |W_ij|, `wanda` |W_ij| |X_j| (arXiv 2306.11695), or
        `sparsegpt` (arXiv 2301.00774), which also updates the kept weights. The latter two need
        `Method.calibrate`.
    calibration_sequences: number of sequences that a driver gives to `Method.calibrate`.
    damping: added to the diagonal of SparseGPT's Hessian, as a fraction of its mean.
    """

    task_weight: float = 1.0
    kl_weight: float = 0.0
    metric: str = "magnitude"
    calibration_sequences: int = 128
    damping: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        base.check_choice("metric", self.metric, METRICS)
        base.check_range(self, 1, math.inf, "calibration_sequences")
        if not 0 < self.damping < 1:
            raise ValueError(f"damping={self.damping}; it must lie between 0 and 1")


class Linear(MaskedLinear):
    """A linear whose `mask` (bool [out, in], saved) only `prune` changes. Entries outside the mask
    are zeros of `weight` itself."""

    masks_gradient = True

    def setup(self, name: str, config: Any, dtype: torch.dtype | None) -> None:
        super().setup(name, config, dtype)
        self.mask.fill_(True)

    @property
    def phase(self) -> str:
        kept = int(self.mask.count_nonzero())  # gradual methods remove entries over many steps
        whole, (n, m) = self.mask.numel(), self.pattern
        return "dense" if kept == whole else "sparse" if m * kept <= n * whole else "pruning"

    def sparse_products(self) -> Products:
        return DENSE

    def choose_mask(self) -> None:
        """Do nothing: the mask does not follow the weights."""

    @torch.no_grad()
    def prune(self, mask: Tensor) -> None:
        """Keep the entries under `mask` [out, in] and set all others to zero."""
        self.mask.copy_(mask)
        self.refresh()

    @torch.no_grad()
    def update_buffers(self) -> None:
        # The optimizer's momentum can still move an entry that was pruned during training.
        self.weight.masked_fill_(~self.mask, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        x = self.checked_input(x)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.in_place(x.dtype), bias)


class Method(distillation.Method):
    Config = Config
    Linear = Linear

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._batches: list[Mapping[str, Any]] = []

    @property
    def capabilities(self) -> base.Capabilities:
        wanted = 0 if self.config.metric == "magnitude" else self.config.calibration_sequences
        given = super().capabilities
        return replace(given, changes_only_weights=True, calibration_sequences=wanted)

    def calibrate(self, model: nn.Module, batches: Iterable[Mapping[str, Any]]) -> None:
        """Keep the batches for `convert`, which runs the model on them once per layer.

        Args:
            batches: keyword arguments of the model; in a process group, equal on every rank.
        """
        self._batches = list(batches)

    @torch.no_grad()
    def convert(self, model: nn.Module, dtype: torch.dtype | None = None) -> base.Report:
        if self.capabilities.calibration_sequences and not self._batches:
            raise ValueError(
                f"metric={self.config.metric} needs inputs: call method.calibrate(model, batches) "
                "before convert, or choose metric=magnitude"
            )
        # The operands get their dtype last: calibration must not see rounded weights.
        report = super().convert(model)
        for name, layer in self.layers.items():
            layer.prune(self._mask(model, name, layer))
        for layer in self.sparse_layers.values():
            layer.dtype = dtype or layer.weight.dtype
            layer.operand = layer.sparse_weight.to(layer.dtype)
        self._batches = []
        return report

    def _mask(self, model: nn.Module, name: str, layer: MaskedLinear) -> Tensor:
        """The mask of a layer by the metric; SparseGPT also updates the weight."""
        metric, weight = self.config.metric, layer.weight
        if metric == "magnitude":
            return nm_mask(weight, *layer.pattern)
        inputs = collect(model, {name: layer}, self._batches, hessian=metric == "sparsegpt")[name]
        if inputs.hessian is None:
            return nm_mask(weight.float() * inputs.square_sum.sqrt(), *layer.pattern)
        mask, updated = prune(weight, inputs.hessian, self.config.damping, *layer.pattern)
        weight.copy_(updated)
        return mask
