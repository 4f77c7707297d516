"""The fused AdamW step as a sequence of separate operators, in plain PyTorch."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from common_kernels.adamw.weights import Rule, Step, Weight24
from common_kernels.decay import cpu as decay
from common_kernels.fp8.cpu import amax_of
from common_kernels.masks import nm_mask, transposable_mask24
from common_kernels.pack.operands import pack24_
from common_kernels.soft_threshold import soft_threshold24


def adamw24_(weights: Sequence[Weight24], step: Step) -> None:
    for given in weights:
        update(given, step)
        write_operands(given, step.rule)


def update(given: Weight24, step: Step) -> None:
    """Apply AdamW's update with torch's fused kernel, which needs row-major tensors."""
    rates, alpha = step.rates, step.rule.alpha
    grad = given.grad.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if step.grad_scale is not None:
        grad /= step.grad_scale
    if alpha and given.mask is not None:
        decay.masked_decay_(grad, given.weight, given.mask, alpha)
    written = given.weight, given.exp_avg, given.exp_avg_sq
    weight, exp_avg, exp_avg_sq = rows = [t.contiguous() for t in written]
    adamw(
        [weight], [grad], [exp_avg], [exp_avg_sq], [], [given.step],
        fused=True, found_inf=step.found_inf, amsgrad=False, maximize=False, lr=rates.lr,
        beta1=rates.betas[0], beta2=rates.betas[1], eps=rates.eps, weight_decay=rates.weight_decay,
    )  # fmt: skip
    for tensor, row in zip(written, rows, strict=True):
        if row is not tensor:
            tensor.copy_(row)


def write_operands(given: Weight24, rule: Rule) -> None:
    """Write the mask and the operands of the weight as it is now."""
    weight, mask = given.weight, given.mask
    if rule.choose is not None:
        assert mask is not None
        mask.copy_(
            nm_mask(weight) if rule.choose == "rows" else transposable_mask24(weight, rule.choose)
        )
    if given.amax is not None:
        given.amax.copy_(amax_of(operand(given, rule)))
    if given.dense is not None:
        given.dense.copy_(operand(given, rule))
    if given.packed is None and given.transposed is None:
        return
    kept, pruned = (nm_mask(weight) if rule.source == "soft" else mask), operand(given, rule)
    assert kept is not None
    if given.packed is not None:
        pack24_(given.packed, pruned, "mask", kept)
    if given.transposed is not None:
        pack24_(given.transposed, pruned.t().contiguous(), "mask", kept.t().contiguous())


def operand(given: Weight24, rule: Rule) -> Tensor:
    """The operand of the products, fp32 [rows, columns], before its cast."""
    if rule.source == "whole":
        return given.weight
    if rule.source == "soft":
        assert given.scale is not None
        return given.scale * soft_threshold24(given.weight)
    assert given.mask is not None
    return torch.where(given.mask, given.weight, 0.0)
