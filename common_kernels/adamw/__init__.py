"""A step of AdamW that reads and writes each sparse weight once: masked decay, update, choice of
the mask and the operands of the products in one pass, for all weights of a shape in one launch.

Each part is that of an operator of its own: `masked_decay_`, torch's fused AdamW, `nm_mask` or
`transposable_mask24`, `pack24_` or `pack_both24_`. Masks and operands are, to the bit, what
those give of the weights that this one leaves, and these are AdamW's to the rounding of a few
operations in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from common_kernels import backend as backends
from common_kernels import checks
from common_kernels.adamw import cpu
from common_kernels.pack import Packed24

CHOICES = ("rows", "exact", "greedy")
SOURCES = ("whole", "mask", "soft")


@dataclass(frozen=True, eq=False, kw_only=True)
class Weight24:
    """A weight and all that a step of it reads or writes.

    weight, exp_avg, exp_avg_sq: fp32 [rows, columns], both multiples of 4; written.
    grad: [rows, columns] of any dtype; only read.
    step: fp32 [], the steps done; counted up.
    mask: bool [rows, columns]; read for decay and operands, written where one is chosen.
    scale: fp32 []; operands of the soft threshold are multiplied by it.
    dense: [rows, columns], receives the operand as a dense matrix.
    packed, transposed: room for the operand and its transpose, packed, of a 16-bit type.
    amax: fp32 [], receives the largest magnitude of the operand, which is not the whole weight.
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
        """All fields by name, of packed matrices their bytes."""
        found = vars(self).items()
        return {n: t.buffer if isinstance(t, Packed24) else t for n, t in found}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The work of a step on a weight beside AdamW's update.

    alpha: factor of the masked decay, added to the gradient under the mask before this step.
    choose: the mask of the updated weight: `rows` is nm_mask's, `exact` and `greedy` are
        transposable_mask24's; None keeps the mask that there is.
    source: of the operands: the `whole` weight, the weight under its `mask`, or `soft`, scale times
        soft_threshold24 of the weight.
    """

    alpha: float = 0.0
    choose: str | None = None
    source: str = "mask"

    def __post_init__(self) -> None:
        if self.choose is not None and self.choose not in CHOICES:
            raise ValueError(f"choose={self.choose!r}; choose one of {', '.join(CHOICES)} or None")
        if self.source not in SOURCES:
            raise ValueError(f"source={self.source!r}; choose one of {', '.join(SOURCES)}")


@dataclass(frozen=True, kw_only=True)
class Rates:
    """AdamW's hyperparameters, as those of `torch.optim.AdamW`. lr: a number, or a tensor [] on the
    weights' device."""

    lr: float | Tensor
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2


def adamw24_(
    weights: Sequence[Weight24],
    rates: Rates,
    rule: Rule,
    *,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """In place: one step of AdamW for each of `weights`, their masks and operands after it.

    Weights of one shape and kind share a launch. Nothing waits for the device, and the step can be
    captured in a CUDA graph.

    Args:
        grad_scale: fp32 []; gradients are divided by it, as in torch's fused optimizers: a loss
            scale, or norm / largest norm to clip by.
        found_inf: fp32 []; where it is 1 weight, moments and step stay, and masks and operands
            are those of the weight as it was.
    """
    if not weights:
        return
    device = checks.one_device(grad_scale=grad_scale, found_inf=found_inf, weight=weights[0].weight)
    kinds: dict[tuple, list[Weight24]] = {}
    for weight in weights:
        kinds.setdefault(_kind(weight), []).append(weight)
    for first, *_ in kinds.values():
        _check(first, rule, device)
    if backends.resolve(device, backend) == "triton":
        from common_kernels.adamw import triton

        triton.adamw24_(list(kinds.values()), rates, rule, grad_scale, found_inf)
    else:
        cpu.adamw24_(weights, rates, rule, grad_scale, found_inf)


def _kind(given: Weight24) -> tuple:
    """All that is checked of the tensors of a weight; equal within a launch."""
    return (
        *[
            None if t is None else (t.shape, t.dtype, t.device, t.is_contiguous())
            for t in given.tensors.values()
        ],
        *[
            None if p is None else (p.shape, p.dtype, p.layout)
            for p in (given.packed, given.transposed)
        ],
    )


def _check(given: Weight24, rule: Rule, device: torch.device) -> None:
    weight, mask = given.weight, given.mask
    checks.float_tensor(given.grad, "grad")
    for name in ("weight", "exp_avg", "exp_avg_sq", "step"):
        tensor: Tensor = getattr(given, name)
        if tensor.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, not {tensor.dtype}")
    if weight.ndim != 2 or weight.shape[0] % 4 or weight.shape[1] % 4:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}; it must have two dims, both multiples of 4"
        )
    for name in ("grad", "exp_avg", "exp_avg_sq", "mask", "dense"):
        other = given.tensors[name]
        if other is not None and other.shape != weight.shape:
            checks.same_shape(weight, other, f"weight and {name}")
    if mask is None and (rule.alpha or rule.choose or rule.source == "mask"):
        raise ValueError(f"{rule} needs a mask")
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool, not {mask.dtype}")
    if given.amax is not None and (given.amax.dtype != torch.float32 or rule.source == "whole"):
        raise ValueError(
            f"amax must be float32, and of a part of the weight: {given.amax.dtype}, {rule}"
        )
    if rule.source == "soft" and given.scale is None:
        raise ValueError("source='soft' needs a scale")
    for packed, shape in (given.packed, weight.shape), (given.transposed, weight.shape[::-1]):
        if packed is None:
            continue
        if rule.source == "whole":
            raise ValueError("the whole weight is not 2:4: it has no packed form")
        if packed.shape != shape:
            raise ValueError(f"there is room for a {packed.shape} matrix, not for {tuple(shape)}")
    written = {t.dtype for t in (given.dense, given.packed, given.transposed) if t is not None}
    packs = given.packed is not None or given.transposed is not None
    if len(written) > 1 or (packs and written - {torch.bfloat16, torch.float16}):
        raise ValueError(
            f"operands of {' and '.join(sorted(map(str, written)))}: dense and packed ones must "
            "share a dtype, packed ones a 16-bit one; convert the model anew after a cast"
        )
    if checks.one_device(**given.tensors) != device:
        raise ValueError(f"weights on {device} and {weight.device}: step each device's apart")
