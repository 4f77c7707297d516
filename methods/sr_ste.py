"""SR-STE: hard 2:4 pruning, and a decay that pulls the pruned weights towards zero.

    GEMM   operand 1   operand 2     sparse operand, along
    fprop  X           W * M         weight, 2:4 along `in`
    dgrad  dY          W * M         the same weight (a dense product on hardware)
    wgrad  dY          X             none; flows to W, plus alpha * W * (1 - M)

SR-STE (arXiv 2102.04010) adds the decay to the gradient, for SGD. So does this for any optimizer,
after unscaling and clipping: it is neither clipped nor counted in the norm. AdamW divides it by
sqrt(v) with the gradient: where alpha * |w| is far below the size of w's gradient, a step takes
lr * alpha / sqrt(v) of w; far above, lr whatever alpha is: FST (section 4.2) wants that for weights
with small gradients. `decay_on="weights"` goes beside the optimizer, as the weight decay of AdamW
does: w <- w - lr * alpha * w on pruned entries. The model ends 2:4 sparse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from common_kernels import masked_decay_
from common_kernels.adamw import Rule

from .nn import base
from .nn.linear import MaskedLinear, SparseLinear
from .nn.optimizer import StepWork

# On the weights alpha is multiplied by the learning rate alone, and 2e-4 does nothing: of GPT-2's
# pruned weights it takes 0.5 % in 300,000 steps at 1.5e-4. With 1 a pruned weight loses 1.5e-4 of
# itself in a step there; by SR-STE's own SGD, of rate 0.1 and momentum 0.9, it is 2e-4.
ALPHA_ON_WEIGHTS = 1.0
LARGEST = 1e6  # a factor; beyond, its product with a learning rate may overflow fp32


@dataclass(frozen=True, kw_only=True)
class Config(base.Config):
    """The decay: where it acts, and how strongly.

    alpha: the decay factor, lambda_W in the papers; None: of the gradients that of the method's
        paper or code, here 2e-4, of the weights 1. The config then holds this number.
    decay_on: `gradients` or `weights`.
    """

    alpha: float | None = None
    decay_on: str = "gradients"

    alpha_on_gradients: ClassVar[float] = 2e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        base.check_choice("decay_on", self.decay_on, ("gradients", "weights"))
        if self.alpha is None:
            on_weights = self.decay_on == "weights"
            alpha = ALPHA_ON_WEIGHTS if on_weights else self.alpha_on_gradients
            object.__setattr__(self, "alpha", alpha)
        elif not 0 <= self.alpha <= LARGEST:
            raise ValueError(f"alpha={self.alpha}; the decay factor must lie in [0, {LARGEST:g}]")


class Method(base.Method):
    Config = Config
    Linear = MaskedLinear

    @torch.no_grad()
    def on_gradients(self, step: int, optimizer: torch.optim.Optimizer | None = None) -> None:
        super().on_gradients(step, optimizer)
        alpha = self.alpha(step)
        if not alpha:
            return
        for name, layer in self.layers.items():
            assert isinstance(layer, MaskedLinear)
            if self.config.decay_on == "weights":
                # Before the optimizer's own step, as AdamW applies its weight decay.
                shrink = 1.0 - learning_rate_of(optimizer, layer.weight) * alpha
                layer.weight.mul_(torch.where(layer.mask, 1.0, shrink))
            elif name not in self._works and layer.weight.grad is not None:
                masked_decay_(layer.weight.grad, layer.weight, layer.mask, alpha)

    def alpha(self, step: int) -> float:
        """The decay factor in optimizer step `step`."""
        return self.config.alpha

    def decay_of_gradient(self, step: int) -> float:
        """The same, 0 where the decay acts on the weights."""
        return self.alpha(step) if self.config.decay_on == "gradients" else 0.0

    def step_work(self, layer: SparseLinear, step: int) -> StepWork | None:
        assert isinstance(layer, MaskedLinear)
        return StepWork(
            layer=layer,
            rule=Rule(alpha=self.decay_of_gradient(step), choose="rows"),
            mask=layer.mask,
        )


def learning_rate_of(optimizer: torch.optim.Optimizer | None, weight: Tensor) -> float:
    if optimizer is None:
        raise ValueError(
            'decay_on="weights" needs the learning rate: call on_gradients(step, optimizer)'
        )
    for group in optimizer.param_groups:
        if any(p is weight for p in group["params"]):
            return float(group["lr"])
    raise ValueError("the optimizer does not hold the weights of the converted layers")
