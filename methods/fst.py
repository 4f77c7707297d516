"""FST: one transposable 2:4 mask for fprop and dgrad, MVUE on dY, masked decay, a dense end.

    GEMM   operand 1   operand 2     sparse operand, along
    fprop  X           W * M         weight, 2:4 along `in`
    dgrad  dY          W * M         the same weight, 2:4 along `out` as well: a sparse product
    wgrad  MVUE(dY)    X             dY, 2:4 along tokens; flows to W, plus alpha * W * (1 - M)

FST (arXiv 2404.01847). In each 4x4 tile M keeps the pattern with two entries in every row and
column that has the largest sum of magnitudes (section 5). It is chosen before the first step and
then every `refresh_every` optimizer steps; in between the weights change and the mask stays. The
decay is that of SR-STE (arXiv 2102.04010) on the gradient, added after unscaling and clipping
(section 4.2), so it is neither clipped nor counted in the norm.

The last `dense_fraction` of the steps trains all weights without pruning, MVUE or decay (section
4), and the model ends dense. With `dense_fraction=0` it ends 2:4 sparse along both dims. In the
dense phase the masks are virtual, as in `methods.dense`: chosen and counted, but not applied. With
`fp8` the products of the sparse phase are in FP8 (nn/fp8_gemms.py), all three sparse.

The released code keeps masks and counters as attributes of Parameters, which checkpoints do not
contain, and enters the dense phase at exactly one step number, so a run resumed after it stays
sparse. It advances its counters in forward passes, so that gradient accumulation needs help from
the training loop. Here both depend only on the number of the optimizer step. The released code also
trains one step more before the dense phase.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from common_kernels.masks import ALGORITHMS

from . import sr_ste
from .nn import base
from .nn.gemms import Products
from .nn.optimizer import StepWork
from .nn.phases import SwitchedMethod, TransposableLinear


@dataclass(frozen=True, kw_only=True)
class Config(sr_ste.Decay):
    """Options of FST besides the decay (6e-5 on the gradients); the defaults are the paper's for
    GPT-2 124M.

    refresh_every: optimizer steps between two choices of the masks.
    algorithm: the mask search: `exact`, or the baselines `greedy` and `two_approx`, which may keep
        fewer than two entries in a row or column.
    mvue: sample dY for wgrad: `exact` (minimum variance), `sequential` (the released code's design)
        or `off`.
    dense_fraction: fraction of `total_steps` that is dense; above 0, at least one step.
    dense_phase: position of the dense steps: at the `end`, or at the `start` as in the paper's
        comparison (section 4.3), in which case the model ends 2:4 sparse.
    fp8: FP8 products in the sparse phase: `off`, `paper`, `hybrid`, `hopper` or `hopper_delayed`,
        as in `methods.s_ste`, except that the last two have W in e5m2 for dgrad, which is a sparse
        product here.
    """

    refresh_every: int = base.number(40, 1)
    algorithm: str = base.choice("exact", ALGORITHMS)
    mvue: str = "exact"
    dense_fraction: float = base.number(1 / 6, 0, 1)
    dense_phase: str = base.choice("end", ("end", "start"))
    fp8: str = "off"

    alpha_on_gradients: ClassVar[float] = 6e-5


class Linear(TransposableLinear):
    """A transposable layer that samples dY for wgrad while its mask is in use."""

    config: Config

    def sparse_products(self) -> Products:
        return replace(super().sparse_products(), wgrad=self.config.mvue == "exact")

    @property
    def mvue(self) -> str | None:
        return None if self.is_dense or self.config.mvue == "off" else self.config.mvue


class Method(SwitchedMethod, sr_ste.Method):
    Config = Config
    Linear = Linear

    @property
    def capabilities(self) -> base.Capabilities:
        total = self.config.total_steps
        return replace(
            super().capabilities,
            mask_period=self.config.refresh_every,
            ends_dense=bool(total) and self.dense_at(total - 1),
        )

    @property
    def fraction(self) -> str:
        return "dense_fraction" if self.config.dense_fraction else ""

    @property
    def dense_steps(self) -> tuple[float, float]:
        """The first dense step, and the first one after the dense phase."""
        total, fraction = self.config.total_steps, self.config.dense_fraction
        dense = max(1, round(fraction * total)) if fraction else 0
        if self.config.dense_phase == "start" and dense < total:
            return 0, dense
        return total - dense if fraction else math.inf, math.inf

    def dense_at(self, step: int) -> bool:
        start, stop = self.dense_steps
        return start <= step < stop

    def alpha(self, step: int) -> float:
        return 0.0 if self.dense_at(step) else super().alpha(step)

    def step_work(self, layer: Any, step: int) -> StepWork | None:
        return layer.step_work(self.decay_of_gradient(step), self._chooses(step))
