"""A fused AdamW step for 2:4 sparse weights, which reads and writes each weight once: masked decay,
update, the choice of the mask, and the next products' operands. Weights of a shape share a launch.

The masks and operands equal, bit for bit, those of the separate operators (`nm_mask`,
`transposable_mask24`, `pack24_`, `pack_both24_`) applied to the updated weights. The updated
weights agree with `masked_decay_` followed by torch's fused AdamW up to the rounding of fp32.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from common_kernels import backend as backends
from common_kernels import checks
from common_kernels.adamw import cpu
from common_kernels.adamw.weights import CHOICES, Rates, Rule, Step, Weight24

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

    All weights are on one device; those of equal shape, dtypes and layout share a launch. Nothing
    waits for the device, and the step can be captured in a CUDA graph.

    Args:
        grad_scale: fp32 []; gradients are divided by it, as in torch's fused optimizers. It is a
            loss scale, or norm / max_norm to clip the gradient.
        found_inf: fp32 []; if it is 1, weights, moments and step stay as they are, and the masks
            and operands are made from the unchanged weights.
    """
    if not weights:
        return
    device = checks.one_device(grad_scale=grad_scale, found_inf=found_inf, weight=weights[0].weight)
    kinds: dict[tuple, list[Weight24]] = {}
    for weight in weights:
        kinds.setdefault(weight.kind, []).append(weight)
    for first, *_ in kinds.values():  # refuse what a cast or a move of the model leaves behind
        checks.one_device(**first.tensors)
        packed = [t for t in (first.packed, first.transposed) if t is not None]
        written = {t.dtype for t in (first.dense, *packed) if t is not None}
        if len(written) > 1 or (packed and written - {torch.bfloat16, torch.float16}):
            raise ValueError(
                f"operands have dtypes {' and '.join(sorted(map(str, written)))}: they must share "
                "one, 16-bit if packed; convert the model again after a cast"
            )
    step = Step(rates, rule, grad_scale, found_inf)
    if backends.resolve(device, backend) == "triton":
        from common_kernels.adamw import triton

        triton.adamw24_(list(kinds.values()), step)
    else:
        cpu.adamw24_(weights, step)
