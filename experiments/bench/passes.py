"""Compares a weight's optimizer step in one pass with separate passes; a part of `ops` on a GPU.

The least bytes: weight, moments, gradient and (if needed) mask read once; weight, moments, a new
mask and the packed operands written once. The bytes of separate passes are counted in the same way.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from common_kernels import masked_decay_, nm_mask, transposable_mask24
from common_kernels.adamw import Rates, Rule, Weight24, adamw24_
from common_kernels.pack import Packed24
from common_kernels.pack.operands import pack24_, pack_both24_
from experiments.bench.operators import Op

RATES = Rates(lr=1e-5, weight_decay=0.1)
ALPHA = 1e-6  # small, because the separate passes add to the same gradient repeatedly
UPDATE = 16 + 12  # weight, gradient and two moments read, all but the gradient written
PACKED = 1.125  # bytes of values and positions per entry of a 16-bit type


def inputs(w: Tensor, both: bool) -> Weight24:
    """The fp32 state of an optimizer step of `w` [64 a, 64 b]. both: also pack for dgrad."""
    return Weight24(
        weight=w.clone(),
        grad=w.flip(0),
        exp_avg=w.flip(1),
        exp_avg_sq=w.square(),
        step=torch.tensor(10.0, device=w.device),
        mask=transposable_mask24(w),
        scale=torch.tensor(1.5, device=w.device),
        packed=Packed24.empty(w.shape, torch.bfloat16, w.device),
        transposed=(Packed24.empty(w.shape[::-1], torch.bfloat16, w.device) if both else None),
    )


def one_pass(rule: Rule, given: Weight24, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """The weight and its first moment after the step in one pass, which also leaves a mask and
    operands; tests/common_kernels compares these."""
    adamw24_([given], RATES, rule, backend=backend)
    return given.weight, given.exp_avg


def apart(rule: Rule, given: Weight24) -> None:
    """Do the same step by separate operators."""
    weight, mask = given.weight, given.mask
    assert mask is not None and given.packed is not None
    if rule.alpha:
        masked_decay_(given.grad, weight, mask, rule.alpha)
    adamw(
        [weight], [given.grad], [given.exp_avg], [given.exp_avg_sq], [], [given.step],
        fused=True, amsgrad=False, maximize=False, lr=RATES.lr, eps=RATES.eps,
        beta1=RATES.betas[0], beta2=RATES.betas[1], weight_decay=RATES.weight_decay,
    )  # fmt: skip
    if rule.choose == "rows":
        mask.copy_(nm_mask(weight))
    elif rule.choose:
        mask.copy_(transposable_mask24(weight, rule.choose))
    if given.transposed is not None:
        pack_both24_(given.packed, given.transposed, weight, mask)
    elif rule.source == "soft":
        pack24_(given.packed, weight, "soft", scale=given.scale)
    else:
        pack24_(given.packed, weight, "mask", mask)


def step(rule: Rule, both: bool = False) -> Op:
    """The step in one pass beside the same step by separate operators."""
    packed = PACKED * (1 + both)
    reads_mask = rule.alpha or not (rule.choose or rule.source == "soft")
    moved = UPDATE + bool(reads_mask) + bool(rule.choose) + packed
    decay, choice = 13 if rule.alpha else 0, 4 + 1 + 2 if rule.choose else 0
    separately = UPDATE + decay + choice + 4 + (rule.source == "mask") + packed
    return Op(
        partial(one_pass, rule), lambda _: moved, lambda w: (inputs(w, both),),
        libraries={"separate passes": partial(apart, rule)}, gpu_only=True,
        figures={"bytes a weight": moved, "bytes a weight, separate passes": separately},
    )  # fmt: skip


PASSES = {
    "step, decay, pack both ways": step(Rule(alpha=ALPHA), both=True),
    "step, decay, exact search, pack both ways": step(Rule(alpha=ALPHA, choose="exact"), both=True),
    "step, greedy search, pack both ways": step(Rule(choose="greedy"), both=True),
    "step, decay, mask by rows, pack": step(Rule(alpha=ALPHA, choose="rows")),
    "step, soft threshold and scale, pack": step(Rule(source="soft")),
}
