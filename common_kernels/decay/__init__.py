"""Masked decay: decay of pruned weights (SR-STE, arXiv 2102.04010), applied to the gradient as in
FST (arXiv 2404.01847)."""

from typing import Any

import torch

from common_kernels import backend as backends
from common_kernels import checks
from common_kernels.decay import cpu
from common_kernels.library import operator_of


def masked_decay_(
    grad: torch.Tensor,
    weight: torch.Tensor,
    mask: torch.Tensor,
    alpha: float,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """Add alpha * weight in place to grad where mask is False, keep its bits elsewhere; return it.
    The three tensors have one shape and any strides; the sum is computed in fp32 and rounded once.
    grad must not require grad unless gradients are disabled, as for torch's in-place operators.
    DTensors of equal placement are handled shard by shard."""
    if hasattr(grad, "to_local"):
        sharded: tuple[Any, ...] = (grad, weight, mask)
        own_grad, own_weight, own_mask = (tensor.to_local() for tensor in sharded)
        masked_decay_(own_grad, own_weight, own_mask, alpha, backend=backend)
        return grad
    checks.float_tensor(grad, "grad")
    checks.float_tensor(weight, "weight")
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool, not {mask.dtype}")
    checks.same_shape(grad, weight, "grad and weight")
    checks.same_shape(grad, mask, "grad and mask")
    name = backends.resolve(checks.one_device(grad=grad, weight=weight, mask=mask), backend)
    _masked_decay_(grad, weight, mask, alpha, name)
    return grad


_masked_decay_ = operator_of(cpu.masked_decay_, mutates_args=("grad",))
