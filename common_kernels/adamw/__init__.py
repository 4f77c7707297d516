"""A fused AdamW step for 2:4 sparse weights, which reads and writes each weight once: masked decay,
update, the choice of the new mask, and the operands of the next products. All weights of one shape
share a launch.

The masks and operands equal, bit for bit, those of the separate operators (`nm_mask`,
`transposable_mask24`, `pack24_`, `pack_both24_`) applied to the updated weights. The updated
weights agree with `masked_decay_` followed by torch's fused AdamW up to the rounding of a few fp32
operations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common_kernels import backend as backends
from common_kernels import checks
from common_kernels.adamw import cpu
from common_kernels.adamw.weights import CHOICES, Rates, Rule, Weight24

__all__ = ["CHOICES", "Rates", "Rule", "Weight24", "adamw24_"]


def adamw24_(
    weights: Sequence[Weight24],
    rates: Rates,
    rule: Rule,
    *,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Take one AdamW step of each weight in place, then update its mask and operands.

    Weights of equal shape, dtypes and layout share a launch. Nothing waits for the device, and the
    step can be captured in a CUDA graph.

    Args:
        grad_scale: fp32 []; gradients are divided by it, as in torch's fused optimizers. It is a
            loss scale, or norm / max_norm to clip the gradient.
        found_inf: fp32 []; if it is 1, weights, moments and step stay as they are, and the masks
            and operands are made from the unchanged weights.

    Raises ValueError or TypeError, before anything is written, for tensors that do not fit
    together.
    """
    if not weights:
        return
    device = checks.one_device(grad_scale=grad_scale, found_inf=found_inf, weight=weights[0].weight)
    kinds: dict[tuple, list[Weight24]] = {}
    for weight in weights:
        kinds.setdefault(weight.kind, []).append(weight)
    for first, *_ in kinds.values():
        _check(first, rule, device)
    if backends.resolve(device, backend) == "triton":
        from common_kernels.adamw import triton

        triton.adamw24_(list(kinds.values()), rates, rule, grad_scale, found_inf)
    else:
        cpu.adamw24_(weights, rates, rule, grad_scale, found_inf)


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
            f"amax must be float32, not {given.amax.dtype}, and needs a source other than 'whole', "
            f"not {rule.source!r}"
        )
    if rule.source == "soft" and given.scale is None:
        raise ValueError("source='soft' needs a scale")
    for packed, shape in (given.packed, weight.shape), (given.transposed, weight.shape[::-1]):
        if packed is None:
            continue
        if rule.source == "whole":
            raise ValueError("source='whole' is not 2:4 and cannot be packed; give `dense` only")
        if packed.shape != shape:
            raise ValueError(f"a packed operand has shape {packed.shape}, not {tuple(shape)}")
    written = {t.dtype for t in (given.dense, given.packed, given.transposed) if t is not None}
    packs = given.packed is not None or given.transposed is not None
    if len(written) > 1 or (packs and written - {torch.bfloat16, torch.float16}):
        raise ValueError(
            f"operands have dtypes {' and '.join(sorted(map(str, written)))}: they must share one, "
            "16-bit if packed; convert the model again after a cast"
        )
    if checks.one_device(**given.tensors) != device:
        raise ValueError(
            f"weights are on {device} and {weight.device}: call adamw24_ once for each device"
        )
