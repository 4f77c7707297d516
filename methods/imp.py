"""Iterative magnitude pruning: rounds of pruning and retraining, until the weights are 2:4.

    GEMM   operand 1   operand 2   sparse operand, along
    fprop  X           W           weight, towards 2:4 along `in`
    dgrad  dY          W           the same weight
    wgrad  dY          X           none; flows to W under the mask

Han et al. (arXiv 1506.02626), Frankle and Carbin (arXiv 1803.03635): every round removes the same
share of the remaining weights, smallest magnitudes first, and then trains on. After round k of K a
layer keeps 2^(-k/K) of its weights. As in `gmp` a group of four may lose only its two smallest, so
the last round gives a 2:4 mask; the model ends sparse. Weights are not rewound between rounds, and
the learning rate follows the run's own schedule. AST (arXiv 2407.20584, Table 1) retrains this
baseline with distillation: set `kl_weight`.
"""

from dataclasses import dataclass

from . import gmp
from .nn import base, distillation


@dataclass(frozen=True, kw_only=True)
class Config(distillation.Config):
    """Options besides those of distillation, which is off by default.

    begin_fraction: the fraction of `total_steps` that is dense, at the start; the rest is divided
        into equal rounds.
    rounds: number of rounds of pruning and retraining.
    permute: as in `methods.one_shot`.
    """

    task_weight: float = 1.0
    kl_weight: float = 0.0
    begin_fraction: float = 0.1
    rounds: int = base.number(4, 1)
    permute: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.begin_fraction < 1.0:
            raise ValueError(f"begin_fraction={self.begin_fraction}; it must lie in [0, 1)")


class Method(gmp.Method):
    Config = Config  # type: ignore[assignment]  # has no end_fraction
    fraction = "begin_fraction"

    def share(self, step: int) -> float:
        """The share that should be pruned at optimizer step `step`, by the rounds begun so far."""
        config = self.config
        begun = sum(step >= self.round_start(index) for index in range(config.rounds))
        return 2.0 * (1.0 - 0.5 ** (begun / config.rounds))

    def round_start(self, index: int) -> int:
        """The optimizer step at which round `index` (from 0) prunes."""
        config = self.config
        dense = config.begin_fraction
        start = dense + (1.0 - dense) * index / config.rounds
        return min(round(start * config.total_steps), config.total_steps - 1)
