"""The tensors of a weight that AdamW updates, and what a step does with them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

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
    kept: tuple[Tensor | None, ...] = field(init=False)
    written: list[Tensor] = field(init=False)
    _kind: tuple[Any, ...] = field(init=False)

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        """Every field by name; a packed matrix is given by its buffer of bytes."""
        found = {field.name: getattr(self, field.name) for field in fields(self) if field.init}
        return {n: t.buffer if isinstance(t, Packed24) else t for n, t in found.items()}

    def __post_init__(self) -> None:
        """Find out once what is the same in each step: everything but the gradient.

        kept: all tensors but the gradient, in the order of the fields.
        written: the tensors that a step may write.
        """
        own = {name: t for name, t in self.tensors.items() if name != "grad"}
        packed = [p and (p.shape, p.dtype, p.layout) for p in (self.packed, self.transposed)]
        vars(self).update(
            kept=tuple(own.values()),
            written=[t for name, t in own.items() if t is not None and name != "scale"],
            _kind=(*(t if t is None else _form(t) for t in own.values()), *packed),
        )

    def with_grad(self, grad: Tensor) -> Weight24:
        """The same weight in another step, in which only the gradient is another tensor."""
        new = object.__new__(Weight24)
        vars(new).update(vars(self), grad=grad)
        return new

    @property
    def kind(self) -> tuple[Any, ...]:
        """The properties that must be equal for weights to share one check and one launch."""
        return *_form(self.grad), self._kind


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.is_contiguous()


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The work of a step on a weight besides AdamW's update.

    alpha: factor of the masked decay: alpha * weight is added to the gradient outside the old mask.
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
    """AdamW's hyperparameters, as in torch; lr: a number or a 0-dim tensor on the device."""

    lr: float | Tensor
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2


class Step(NamedTuple):
    """The arguments of `adamw24_` besides the weights."""

    rates: Rates
    rule: Rule
    grad_scale: Tensor | None
    found_inf: Tensor | None
