"""CAST: retraining of a dense model by a decay that makes it 2:4 at the end.

    GEMM   operand 1   operand 2   sparse operand, along
    fprop  X           W * A       none; 2:4 along `in` at the end and in evaluation
    dgrad  dY          W * A       none
    wgrad  dY          X           none; times A it flows to W, times W and summed to A

CAST (arXiv 2509.25996). Training computes with the whole weight; the mask M, chosen by magnitude
every `refresh_every` steps, serves the optimizer alone ("AdamS"). In step t of T = `total_steps`,
with a = t / T, m the first moment and w a weight,

    m' = m where M keeps w, else (1 - a) m + a lambda sign(w)
    v <- b2 v + (1 - b2) m'^2;   w <- w - lr / (1 - b1^(t+1)) m' / (sqrt(v / (1 - b2^(t+1))) + eps)

so that pruned weights are near zero when `finalize` removes them. A [out, 2], from ones, scales
both halves of each row and is folded into the weight at the end. The loss is a third of
the KL divergence from the dense model, at temperature 1, and two thirds of the task's.

The authors published no code. Default values are the paper's for LLaMA2-7B, and the indices of t
those of its algorithm 1, as read in an independent reproduction (github.com/liuhanzuo/
Mixture-of-Memory, baselines/cast_repro), which applies the rule without a mask (v averages m^2) to
all other parameters, too; here these follow AdamW. Steps are divided by sqrt(v), so lambda decides
only when the decay begins to outweigh gradients: a pruned weight then moves by about lr in a step,
and ends within about lr of zero. A small last learning rate is therefore part of the recipe, and so
are master weights in fp32, in which such steps are not rounded away.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from . import ast
from .nn import base, distillation, dtensors, sharding
from .nn.gemms import DENSE, Products
from .nn.linear import MaskedLinear
from .nn.operands import Dense
from .nn.optimizer import Optimizers


@dataclass(frozen=True, kw_only=True)
class Config(distillation.Config, base.PartialConfig):
    """Options of CAST, besides those of distillation.

    refresh_every: optimizer steps between two choices of the masks.
    decay: lambda.
    """

    task_weight: float = 2 / 3
    kl_weight: float = 1 / 3
    temperature: float = 1.0
    refresh_every: int = base.number(10, 1)
    decay: float = base.number(4e-7, 0)


class Linear(MaskedLinear):
    """A linear that trains dense and evaluates under its mask.

    State besides `MaskedLinear`'s: the Parameter `weight_scale` [out, 2].
    """

    config: Config
    weight_scale: nn.Parameter

    def setup(self, name: str, config: Any, dtype: torch.dtype | None) -> None:
        super().setup(name, config, dtype)
        self.weight_scale = nn.Parameter(self.weight.detach().new_ones(self.out_features, 2))

    def sparse_products(self) -> Products:
        return DENSE

    def scaled_weight(self) -> Tensor:
        """W * A [out, in], through which gradients flow to both."""
        return (self.weight.unflatten(1, (2, -1)) * self.weight_scale.unsqueeze(2)).flatten(1)

    def effective_weight(self) -> Tensor:
        return torch.where(self.mask, self.scaled_weight().detach(), 0.0)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        if not self.training and not torch.is_grad_enabled():
            return super().forward(x)
        x = self.checked_input(x)
        return Dense(self.scaled_weight().to(x.dtype)).linear(x, self.bias)

    def restore(self) -> None:
        super().restore()
        del self.weight_scale


class Method(distillation.Method):
    Config = Config
    Linear = Linear

    @property
    def capabilities(self) -> base.Capabilities:
        period = self.config.refresh_every
        return replace(
            super().capabilities, mask_period=period, acts_on_gradients=True, needs_adamw=True
        )

    def convert(self, model: nn.Module, dtype: torch.dtype | None = None) -> base.Report:
        if not self.config.total_steps:
            raise ValueError("the decay rises over total_steps; set total_steps")
        return super().convert(model, dtype)

    def optimizer(self, groups: Any, **options: Any) -> torch.optim.Optimizer:
        return AdamS(groups, **options)

    def on_gradients(self, step: int, optimizer: Optimizers = None) -> None:
        super().on_gradients(step, optimizer)
        share = min(1.0, step / self.config.total_steps)
        for own in ast.give_masks(AdamS, self.layers.values(), optimizer):
            own.share, own.decay = share, self.config.decay

    def metrics(self) -> dict[str, float | int | str]:
        """The base class's, and `pruned_magnitude`: the share of the sum of magnitudes that pruned
        weights still have, which `finalize` would remove."""
        counts = []
        for layer in self.layers.values():
            with sharding.rows(layer):
                sizes = layer.weight.detach().abs()
                pruned = torch.where(layer.mask, 0.0, sizes)
                counts.append((layer, [float(x.sum(dtype=torch.float64)) for x in (pruned, sizes)]))
        lost, whole = dtensors.total(counts)
        return {**super().metrics(), "pruned_magnitude": lost / max(whole, 1e-300)}


class AdamS(ast.AdamW):
    """AdamW with CAST's rule for masked weights (module docstring). share: a in this step."""

    METHOD = "CAST"
    share: float = 0.0

    def decay_of(self, weight: Tensor, mask: Tensor) -> Tensor:
        first = self.state[weight]["exp_avg"]
        added = self.share * (self.decay * weight.sign() - first)
        return torch.where(mask, 0.0, added)
