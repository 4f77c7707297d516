"""STEP: dense AdamW until its second moment has settled, then 2:4 training with it frozen.

    GEMM   operand 1   operand 2     sparse operand, along
    fprop  X           W * M         weight, 2:4 along `in` (phase 1: W, dense)
    dgrad  dY          W * M         the same weight (a dense product on hardware)
    wgrad  dY          X             none; flows to W unmasked

STEP (arXiv 2302.01172): pruning distorts Adam's second moment v, so v is first estimated on the
dense model. Phase 1 is plain AdamW. It ends when z, the mean of |v_t - v_(t-1)| over the entries of
the converted weights, averaged over the last 1 / (1 - beta2) steps, is below Adam's eps, but never
before `min_fraction` and never after `max_fraction` of the training. In phase 2 masks are applied,
chosen by magnitude in every step as in `methods.ste`; v of the converted weights is frozen, and

    w <- w - lr * weight_decay * w - lr / (1 - beta1^t) * m_t / (sqrt(v) + eps^(3/4))

All other parameters keep AdamW's rule. The model ends 2:4 sparse.

Phase 2 needs no special optimizer: `on_gradients` does this update with AdamW's moments and removes
the gradient, so that `optimizer.step()` changes neither weight nor moments.

The denominator (without bias correction of v) and eps as the threshold follow AdamW_STEP in the
toolkit of FST's authors (arXiv 2404.01847); they were not checked against STEP's paper. There the
window is rounded down (999 steps for beta2 = 0.999), and phase 1 may last one step longer.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .nn import base
from .nn.dtensors import full
from .nn.optimizer import Optimizers, all_finite, each, group_of
from .nn.order import without_state
from .nn.phases import SwitchedLinear, SwitchedMethod


@dataclass(frozen=True, kw_only=True)
class Config(base.Config):
    """Options of STEP; the defaults are the paper's.

    min_fraction, max_fraction: fractions of `total_steps` between which phase 1 ends.
    """

    min_fraction: float = 0.1
    max_fraction: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.min_fraction <= self.max_fraction < 1.0:
            raise ValueError(
                f"min_fraction={self.min_fraction}, max_fraction={self.max_fraction}; they must "
                "satisfy 0 <= min_fraction <= max_fraction < 1"
            )


class Method(SwitchedMethod):
    """STEP. Its state is `changes`, the values of the last steps that z averages, and `start`, the
    first step of phase 2, once it is known.

    Under DDP all ranks decide the same without communication, because gradients, and therefore
    moments, are bitwise equal on all ranks.
    """

    Config = Config
    Linear = SwitchedLinear
    abilities = base.Capabilities(
        acts_on_gradients=True, changes_only_weights=True, needs_adamw=True
    )
    fraction = "max_fraction"
    saved = (*SwitchedMethod.saved, "changes", "start")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.changes: list[float] = []
        self.start: int | None = None

    def dense_at(self, step: int) -> bool:
        return self.start is None or step < self.start

    @property
    def unfinished(self) -> bool:
        return self.start is None or super().unfinished

    @torch.no_grad()
    def on_gradients(self, step: int, optimizer: Optimizers = None) -> None:
        super().on_gradients(step, optimizer)
        optimizers = each(optimizer)
        weights = [layer.weight for layer in self.layers.values() if layer.weight.grad is not None]
        held = [(weight, *_adam_group(optimizers, weight)) for weight in weights]
        groups = [group for own in optimizers for group in own.param_groups]
        if not all_finite(p for group in groups for p in group["params"]):
            return  # a GradScaler will skip this step, and our update could not be undone
        if self.dense_at(step):
            if held:
                self._watch(step + 1, held)
            return
        for weight, own, group in held:
            _update_with_frozen_moment(weight, group, own.state[weight])
            weight.grad = None

    def _watch(self, steps: int, held: list[tuple[Tensor, Any, dict[str, Any]]]) -> None:
        """Decide whether phase 1 ends with this step, the last of `steps` steps done so far."""
        total, entries = torch.zeros((), dtype=torch.float64, device=held[0][0].device), 0
        for weight, optimizer, group in held:
            assert weight.grad is not None
            # v_t - v_(t-1) = (1 - beta2) (g^2 - v_(t-1)); the optimizer still holds v_(t-1).
            change = weight.grad.float().square()
            if weight in optimizer.state:
                change -= optimizer.state[weight]["exp_avg_sq"]
            change.abs_().mul_(1 - group["betas"][1])
            total += full(change.sum(dtype=torch.float64))
            entries += change.numel()
        group = held[0][2]
        window = round(1 / (1 - group["betas"][1]))
        self.changes = [*self.changes, float(total) / entries][-window:]
        settled = sum(self.changes) / len(self.changes) < group["eps"]
        total = self.config.total_steps
        settled &= steps >= int(self.config.min_fraction * total)
        if settled or steps >= max(1, int(self.config.max_fraction * total)):
            self.start = steps

    def _check_state(self, step: int) -> None:
        effect = "it does not know whether phase 2 has begun, and would be dense"
        raise RuntimeError(without_state(step, effect))


def _adam_group(optimizers: list[Any], weight: Tensor) -> tuple[Any, dict[str, Any]]:
    """The AdamW that holds `weight`, and its parameter group. Raises ValueError if no optimizer
    holds it, or one that is not a plain AdamW."""
    own, group = group_of(optimizers, weight)
    plain = not group.get("amsgrad") and not group.get("maximize")
    if not group.get("decoupled_weight_decay") or not plain:
        raise ValueError(
            "STEP needs the moments of torch.optim.AdamW without amsgrad or maximize, not of "
            f"a {type(own).__name__}; method.optimizer(parameters, lr=...) makes one"
        )
    return own, group


def _update_with_frozen_moment(
    weight: Tensor, group: dict[str, Any], state: dict[str, Tensor]
) -> None:
    """Update one weight by phase 2's rule (module docstring) from its gradient."""
    assert weight.grad is not None
    if "exp_avg_sq" not in state:
        raise ValueError("the optimizer has no second moment of the weights; load its state, too")
    beta1, lr = group["betas"][0], group["lr"]
    state["step"] += 1
    state["exp_avg"].lerp_(weight.grad, 1 - beta1)
    weight.mul_(1 - lr * group["weight_decay"])
    denominator = state["exp_avg_sq"].sqrt().add_(group["eps"] ** 0.75)
    weight.sub_(state["exp_avg"].div(denominator).mul_(lr / (1 - beta1 ** state["step"])))
