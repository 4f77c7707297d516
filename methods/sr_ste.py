"""SR-STE: hard 2:4 pruning, and a decay that pulls the pruned weights towards zero.

    GEMM   operand 1   operand 2     sparse operand, along
    Y      X           W * M         weight, 2:4 along `in`
    dX     dY          W * M         the same weight (a dense product on hardware)
    dW     dY          X             none; flows to W, plus alpha * W * (1 - M)

SR-STE (arXiv 2102.04010) with the decay where FST (section 4.2) puts it: on the gradient, after
unscaling and clipping, so that Adam normalises it; it is neither clipped nor counted in the norm.
`decay_on="weights"` is the original form for Adam, w <- w - lr * alpha * w on pruned entries,
which FST finds too weak where gradients are small. The model ends 2:4 sparse.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from common_kernels import masked_decay_

from . import base, ste


@dataclass(frozen=True, kw_only=True)
class Config(base.Config):
    """alpha: the decay factor, lambda_W in the papers. decay_on: `gradients` or `weights`."""

    alpha: float = 6e-5
    decay_on: str = "gradients"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha < math.inf:
            raise ValueError(f"alpha={self.alpha}; the decay factor must not be negative")
        base.check_choice("decay_on", self.decay_on, ("gradients", "weights"))


class Method(base.Method):
    Config = Config
    Linear = ste.Linear

    @torch.no_grad()
    def on_gradients(self, step: int, optimizer: torch.optim.Optimizer | None = None) -> None:
        alpha = self.config.alpha
        for layer in self.layers.values():
            assert isinstance(layer, ste.Linear)
            if self.config.decay_on == "weights":
                # Before the optimizer's own step, as AdamW applies its weight decay.
                shrink = 1.0 - learning_rate_of(optimizer, layer.weight) * alpha
                layer.weight.mul_(torch.where(layer.mask, 1.0, shrink))
            elif layer.weight.grad is not None:
                masked_decay_(layer.weight.grad, layer.weight, layer.mask, alpha)


def learning_rate_of(optimizer: torch.optim.Optimizer | None, weight: Tensor) -> float:
    if optimizer is None:
        raise ValueError(
            'decay_on="weights" needs the learning rate: call on_gradients(step, optimizer)'
        )
    for group in optimizer.param_groups:
        if any(p is weight for p in group["params"]):
            return float(group["lr"])
    raise ValueError("the optimizer does not hold the weights of the converted layers")
