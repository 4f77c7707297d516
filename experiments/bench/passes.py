"""Compares a weight's optimizer step in one pass with separate passes; a part of `ops` on a GPU.

The least bytes: weight, moments, gradient and (if needed) mask read once; weight, moments, a new
mask and the packed operands written once. The bytes of separate passes are counted in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from common_kernels import masked_decay_, nm_mask, transposable_mask24
from common_kernels.adamw import Rates, Rule, Weight24, adamw24_
from common_kernels.pack import Packed24
from common_kernels.pack.operands import pack24_, pack_both24_
from experiments.bench.timing import Call
from experiments.support.errors import UserError

RATES = Rates(lr=1e-5, weight_decay=0.1)
ALPHA = 1e-6  # small, because the separate passes add to the same gradient repeatedly
UPDATE = 16 + 12  # weight, gradient and two moments read, all but the gradient written
PACKED = 1.125  # bytes of values and positions per entry of a 16-bit type


@dataclass(frozen=True)
class Pass:
    """A variant of the one-pass step. rule: what it does to the weight. both: also pack for
    dgrad."""

    rule: Rule
    both: bool

    @property
    def moved(self) -> float:
        """Bytes read and written per weight."""
        reads_mask = self.rule.alpha or not (self.rule.choose or self.rule.source == "soft")
        return UPDATE + bool(reads_mask) + bool(self.rule.choose) + PACKED * (1 + self.both)

    @property
    def moved_apart(self) -> float:
        """Bytes read and written per weight by separate decay, update, mask, masked copy and
        packing."""
        decay = 13 if self.rule.alpha else 0
        choice = 4 + 1 + 2 if self.rule.choose else 0
        packing = 4 + (self.rule.source == "mask") + PACKED * (1 + self.both)
        return UPDATE + decay + choice + packing


PASSES = {
    "step, decay, pack both ways": Pass(Rule(alpha=ALPHA), both=True),
    "step, decay, exact search, pack both ways": Pass(Rule(alpha=ALPHA, choose="exact"), both=True),
    "step, greedy search, pack both ways": Pass(Rule(choose="greedy"), both=True),
    "step, decay, mask by rows, pack": Pass(Rule(alpha=ALPHA, choose="rows"), both=False),
    "step, soft threshold and scale, pack": Pass(Rule(source="soft"), both=False),
}


def inputs(w: Tensor, name: str) -> Weight24:
    """The fp32 state of an optimizer step of `w` [64 a, 64 b]."""
    return Weight24(
        weight=w.clone(),
        grad=w.flip(0),
        exp_avg=w.flip(1),
        exp_avg_sq=w.square(),
        step=torch.tensor(10.0, device=w.device),
        mask=transposable_mask24(w),
        scale=torch.tensor(1.5, device=w.device),
        packed=Packed24.empty(w.shape, torch.bfloat16, w.device),
        transposed=(
            Packed24.empty(w.shape[::-1], torch.bfloat16, w.device) if PASSES[name].both else None
        ),
    )


def one_pass(name: str, given: Weight24, backend: str | None = None) -> None:
    adamw24_([given], RATES, PASSES[name].rule, backend=backend)


def apart(name: str, given: Weight24) -> None:
    """Do the same step by separate operators."""
    rule, weight, mask = PASSES[name].rule, given.weight, given.mask
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


def check(name: str, w: Tensor) -> None:
    """Raise a `UserError` unless one pass gives the weights and moments of plain PyTorch up to
    rounding, and exactly the mask and operands that belong to its own weights."""
    got, want = inputs(w, name), inputs(w, name)
    one_pass(name, got)
    one_pass(name, want, backend="cpu")
    derived = inputs(got.weight, name)
    assert got.mask is not None and derived.mask is not None
    derived.mask.copy_(got.mask)
    skip = torch.ones((), device=w.device)  # skip the update, only derive mask and operands
    adamw24_([derived], RATES, PASSES[name].rule, found_inf=skip, backend="cpu")
    # The errors are roundings of terms that may cancel: old weight and step, old moment and
    # gradient.
    step = (got.weight - want.weight).abs() <= 1e-4 * (w.abs() + want.weight.abs())
    moment = (got.exp_avg - want.exp_avg).abs() <= 1e-5 * (w.flip(0).abs() + w.flip(1).abs())
    theirs, names = derived.tensors, ("mask", "packed", "transposed")
    pairs = [(a, theirs[n]) for n, a in got.tensors.items() if n in names]
    same = [torch.equal(a, b) for a, b in pairs if a is not None and b is not None]
    if not (step.all() and moment.all() and all(same)):
        raise UserError(
            f"{name} differs from plain PyTorch on shape {tuple(w.shape)}: no time is reported; "
            "run `pytest tests/common_kernels/test_adamw.py`"
        )


def calls(name: str, given: list[Weight24]) -> dict[str, Call]:
    def on_buffer(run: Callable[[str, Weight24], None], i: int) -> None:
        run(name, given[i])

    return {name: partial(on_buffer, one_pass), "separate passes": partial(on_buffer, apart)}
