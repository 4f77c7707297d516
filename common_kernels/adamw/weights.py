"""The tensors of a weight that AdamW updates, and what a step does with them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from torch import Tensor

from common_kernels.pack import Packed24

CHOICES = ("rows", "exact", "greedy")


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

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        """Every field by name; a packed matrix is given by its buffer of bytes."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {n: t.buffer if isinstance(t, Packed24) else t for n, t in found.items()}

    def with_grad(self, grad: Tensor) -> Weight24:
        """The same weight in another step, in which only the gradient is another tensor."""
        new = object.__new__(Weight24)
        vars(new).update(vars(self), grad=grad)  # with what was found out about the others
        return new

    @cached_property
    def kept(self) -> tuple[Tensor | None, ...]:
        """All tensors but the gradient, in the order of the fields."""
        return tuple(t for name, t in self.tensors.items() if name != "grad")

    @cached_property
    def written(self) -> list[Tensor]:
        """The tensors that a step may write."""
        own = self.tensors.items()
        return [t for name, t in own if t is not None and name not in ("grad", "scale")]

    @property
    def kind(self) -> tuple[Any, ...]:
        """The properties that must be equal for weights to share one check and one launch."""
        return *_form(self.grad), self._kind

    @cached_property
    def _kind(self) -> tuple[Any, ...]:
        packed = [p and (p.shape, p.dtype, p.layout) for p in (self.packed, self.transposed)]
        return *(t if t is None else _form(t) for t in self.kept), *packed


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.is_contiguous()


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


@dataclass(frozen=True, kw_only=True)
class Rates:
    """AdamW's hyperparameters, as in `torch.optim.AdamW`. lr is a number or a 0-dim tensor on the
    weights' device."""

    lr: float | Tensor
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
