"""The tensors of a weight that AdamW updates, and what a step does with them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from common_kernels.pack import Packed24

CHOICES = ("rows", "exact", "greedy")
SOURCES = ("whole", "mask", "soft")


@dataclass(frozen=True, eq=False, kw_only=True)
class Weight24:
    """The tensors that one step of a weight reads or writes.

    weight, exp_avg, exp_avg_sq: fp32 [rows, columns], both multiples of 4; updated in place.
    grad: [rows, columns], fp32, bf16 or fp16; only read.
    step: fp32 [], the number of steps done; incremented in place.
    mask: bool [rows, columns]; read by the decay and the operands, written if `Rule.choose` is set.
    scale: fp32 []; factor of the operand with `Rule.source` "soft".
    dense: [rows, columns]; receives the operand as a dense matrix.
    packed, transposed: receive the packed operand and its packed transpose, 16-bit.
    amax: fp32 []; receives the operand's largest magnitude. Not allowed with source "whole".
    """

    weight: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    mask: Tensor | None = None
    scale: Tensor | None = None
    dense: Tensor | None = None
    packed: Packed24 | None = None
    transposed: Packed24 | None = None
    amax: Tensor | None = None

    @cached_property
    def tensors(self) -> dict[str, Tensor | None]:
        """Every field by name; a packed matrix is given by its buffer of bytes."""
        found = vars(self).items()
        return {n: t.buffer if isinstance(t, Packed24) else t for n, t in found}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The work of a step on a weight besides AdamW's update.

    alpha: factor of the masked decay: alpha * weight is added to the gradient where the old mask is
        False.
    choose: how to choose the mask of the updated weight: `rows` as nm_mask, `exact` or `greedy` as
        transposable_mask24. None keeps the present mask.
    source: the operand: the `whole` weight, the weight under its `mask`, or `soft`, which is
        scale * soft_threshold24(weight).
    """

    alpha: float = 0.0
    choose: str | None = None
    source: str = "mask"

    def __post_init__(self) -> None:
        if self.choose is not None and self.choose not in CHOICES:
            raise ValueError(f"choose={self.choose!r}; take one of {', '.join(CHOICES)}, or None")
        if self.source not in SOURCES:
            raise ValueError(f"source={self.source!r}; take one of {', '.join(SOURCES)}")


@dataclass(frozen=True, kw_only=True)
class Rates:
    """AdamW's hyperparameters, as in `torch.optim.AdamW`. lr is a number or a 0-dim tensor on the
    weights' device."""

    lr: float | Tensor
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
