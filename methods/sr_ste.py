"""SR-STE: hard 2:4 pruning with a decay of the pruned weights towards zero.

    GEMM   operand 1   operand 2     sparse operand, along
    fprop  X           W * M         weight, 2:4 along `in`
    dgrad  dY          W * M         the same weight (a dense product on hardware)
    wgrad  dY          X             none; flows to W, plus alpha * W * (1 - M)

SR-STE (arXiv 2102.04010) adds the decay to the gradient, for SGD. This does the same for any
optimizer, after unscaling and clipping, so that the decay is neither clipped nor counted in the
norm. AdamW divides it by sqrt(v) together with the gradient. If alpha * |w| is far below the size
of w's gradient, a step removes the fraction lr * alpha / sqrt(v) of w; if it is far above, a step
removes lr whatever alpha is, which FST (section 4.2) wants for weights with small gradients.
`decay_on="weights"` bypasses the optimizer like AdamW's weight decay: w <- w - lr * alpha * w on
pruned entries. The model ends 2:4 sparse.

Extended SR-STE, which SLoPe's paper compares with (`prune_gradient`), also keeps only the largest n
of each m consecutive outputs of dY before both products of the backward pass; its decay factor is
6e-6. The paper does not say along which dim dY is pruned; `out` is the one that dgrad sums over.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from common_kernels import masked_decay_, nm_mask
from common_kernels.adamw import Rule

from .nn import base
from .nn.linear import MaskedLinear
from .nn.optimizer import Optimizers, StepWork, each, group_of

# On the weights alpha is multiplied only by the learning rate, and 2e-4 has no effect: it removes
# 0.5 % of GPT-2's pruned weights in 300,000 steps at rate 1.5e-4. With 1 a pruned weight loses a
# fraction of 1.5e-4 per step there; with SR-STE's own SGD (rate 0.1, momentum 0.9) it is 2e-4.
ALPHA_ON_WEIGHTS = 1.0
LARGEST = 1e6  # a larger factor times a learning rate may overflow fp32


@dataclass(frozen=True, kw_only=True)
class Decay(base.Config):
    """Options of the decay.

    alpha: the decay factor, lambda_W in the papers. None takes the default and stores it: on the
        gradients that of the method's paper or code (here 2e-4), on the weights 1.
    decay_on: `gradients` or `weights`.
    """

    alpha: float | None = base.number(None, 0, LARGEST)
    decay_on: str = base.choice("gradients", ("gradients", "weights"))

    alpha_on_gradients: ClassVar[float] = 2e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha is None:
            on_weights = self.decay_on == "weights"
            alpha = ALPHA_ON_WEIGHTS if on_weights else self.alpha_on_gradients
            object.__setattr__(self, "alpha", alpha)


@dataclass(frozen=True, kw_only=True)
class Config(Decay, base.NMConfig, base.PartialConfig):
    """Options of SR-STE: those of the decay and of the pattern, and

    prune_gradient: prune dY, too, as Extended SR-STE does.
    """

    prune_gradient: bool = False


class PruneGradient(torch.autograd.Function):
    """Returns y [..., out]; its gradient keeps the largest n of each m consecutive entries."""

    @staticmethod
    def forward(ctx, y, n, m):
        ctx.pattern = n, m
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        return torch.where(nm_mask(dy, *ctx.pattern), dy, 0.0), None, None


class ExtendedLinear(MaskedLinear):
    prunes = "mask"

    def forward(self, x: Tensor) -> Tensor:
        return PruneGradient.apply(super().forward(x), *self.pattern)


class Method(base.Method):
    Config: ClassVar[type[base.Config]] = Config
    Linear = MaskedLinear
    abilities = base.Capabilities(acts_on_gradients=True, changes_only_weights=True)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if getattr(config, "prune_gradient", False):
            self.Linear = ExtendedLinear  # type: ignore[misc]

    @torch.no_grad()
    def on_gradients(self, step: int, optimizer: Optimizers = None) -> None:
        super().on_gradients(step, optimizer)
        alpha = self.alpha(step)
        if not alpha:
            return
        on_weights = self.config.decay_on == "weights"
        for name, layer in self.layers.items():
            if on_weights or name not in self._works:
                decay_(layer, alpha, on_weights, optimizer)

    def alpha(self, step: int) -> float:
        """The decay factor in optimizer step `step`."""
        return self.config.alpha

    def decay_of_gradient(self, step: int) -> float:
        """The decay factor on the gradient: 0 if the decay acts on the weights."""
        return self.alpha(step) if self.config.decay_on == "gradients" else 0.0

    def step_work(self, layer: Any, step: int) -> StepWork | None:
        rule = Rule(alpha=self.decay_of_gradient(step), choose="rows")
        return StepWork(layer=layer, rule=rule, mask=layer.mask)


def decay_(layer: Any, alpha: float, on_weight: bool, optimizer: Optimizers) -> None:
    """Add the decay to the gradient of a layer in place, or take it from the weight, before the
    optimizer's own step, as AdamW applies its weight decay."""
    weight = layer.weight
    if on_weight:
        shrink = 1.0 - float(group_of(each(optimizer), weight)[1]["lr"]) * alpha
        weight.mul_(torch.where(layer.mask, 1.0, shrink))
    elif weight.grad is not None:
        masked_decay_(weight.grad, weight, layer.mask, alpha)
