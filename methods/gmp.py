"""Gradual magnitude pruning: from dense to 2:4 along a cubic schedule.

    GEMM   operand 1   operand 2   sparse operand, along
    fprop  X           W           weight, towards 2:4 along `in`
    dgrad  dY          W           the same weight
    wgrad  dY          X           none; flows to W under the mask

Zhu and Gupta, arXiv 1710.01878: the sparsity rises from 0 to its final value s as s - s (1 - tau)^3
while tau goes from 0 to 1. Every `prune_every` steps each layer's smallest weights are removed for
good, as many as the schedule asks for. Their pattern is unstructured. Here s is 1/2, and a group of
four may lose only its two smallest: a layer removes, smallest magnitude first, the entries that a
2:4 mask would remove. At tau = 1 the mask is exactly 2:4; the model ends sparse.

A model trained from scratch should first train densely for a while (`begin_fraction`). As in the
paper a removed weight gets no gradient; unlike there it is also set to zero, so that it cannot
return. AST (arXiv 2407.20584, Table 1) retrains this baseline with distillation: set `kl_weight`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from common_kernels import nm_mask

from . import one_shot
from .nn import base, distillation, sharding


@dataclass(frozen=True, kw_only=True)
class Config(distillation.Config):
    """Options besides those of distillation, which is off by default.

    begin_fraction, end_fraction: the fractions of `total_steps` between which the sparsity rises.
    prune_every: optimizer steps between two prunings.
    permute: as in `methods.one_shot`.
    """

    task_weight: float = 1.0
    kl_weight: float = 0.0
    begin_fraction: float = 0.1
    end_fraction: float = 0.6
    prune_every: int = base.number(10, 1)
    permute: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.begin_fraction <= self.end_fraction <= 1.0:
            raise ValueError(
                f"begin_fraction={self.begin_fraction}, end_fraction={self.end_fraction}; they "
                "must lie in [0, 1], in this order"
            )


def prune_towards24(weight: Tensor, mask: Tensor, share: float) -> Tensor:
    """`mask` without a `share` of the entries that a 2:4 mask along `in` removes.

    Smallest magnitudes are removed first, ties by position. Entries that `mask` has already lost
    come first and count towards the share.

    Args:
        weight, mask: [out, in]; the mask has lost at most two entries of each group.
        share: from 0, which removes nothing, to 1, which gives a 2:4 mask.
    """
    # A kept weight that happens to be zero must rank above a removed one.
    magnitude = torch.where(mask, weight.detach().float().abs().clamp_min(2.0**-149), 0.0)
    candidates = (~nm_mask(magnitude)).flatten().nonzero().squeeze(1)
    order = magnitude.flatten()[candidates].argsort(stable=True)
    removed = candidates[order[: round(share * len(candidates))]]
    return mask.flatten().index_fill(0, removed, False).view(mask.shape)


class Method(distillation.Method):
    """Gradual pruning. `pruned`: the share, 0 to 1, of the entries to remove that are gone."""

    Config = Config
    Linear = one_shot.Linear
    abilities = base.Capabilities(changes_only_weights=True)
    fraction = "end_fraction"
    saved = ("pruned",)
    pruned = 0.0

    def share(self, step: int) -> float:
        """The share that should be pruned at optimizer step `step`."""
        config = self.config
        begin = round(config.begin_fraction * config.total_steps)
        # End in the last step at the latest, because the model must end 2:4.
        end = min(round(config.end_fraction * config.total_steps), config.total_steps - 1)
        if step >= end:
            return 1.0
        if step < begin:
            return 0.0
        done = (step - begin) // config.prune_every * config.prune_every
        return 1.0 - (1.0 - done / (end - begin)) ** 3

    def on_step_begin(self, step: int) -> None:
        super().on_step_begin(step)
        share = self.share(step)
        if share > self.pruned:
            self.pruned = share
            for layer in self.layers.values():
                with sharding.unsharded(layer):
                    layer.prune(prune_towards24(layer.weight, layer.mask, share))
            self._remember(step)  # so that pruning is not taken for an optimizer step

    @property
    def unfinished(self) -> bool:
        """True if it is not 2:4 yet."""
        return self.pruned < 1.0

    def phase(self) -> str:
        if self.pruned == 0.0:
            return "dense"
        return "sparse" if self.pruned == 1.0 else "pruning"
