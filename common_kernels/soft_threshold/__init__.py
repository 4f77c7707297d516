"""The continuous 2:4 projection of S-STE (arXiv 2409.09099, section 4.1)."""

import torch

from common_kernels import backend as backends
from common_kernels import checks
from common_kernels.library import operator_of
from common_kernels.soft_threshold import cpu


def soft_threshold24(
    x: torch.Tensor, gamma: float = 0.0, *, backend: str | None = None
) -> torch.Tensor:
    """sign(x) * max(|x| - t, 0) for each group of four along the last dim.

    t = (1 - gamma) * t2 + gamma * t3, where t2 <= t3 are the second and third smallest magnitudes
    of the group, so at most two entries survive. The paper chooses gamma = 0 and compares others in
    its Table 1. The result has x's shape, dtype and strides; its zeros are +0.0. NaN and Inf
    propagate. No gradient is defined; the caller supplies a straight-through rule.
    """
    checks.float_tensor(x)
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma must lie in [0, 1], not {gamma}")
    checks.group_dim(x, 4, -1)
    return _soft_threshold24(x, gamma, backends.resolve(x.device, backend))


_soft_threshold24 = operator_of(cpu.soft_threshold24, lambda x, gamma: torch.empty_like(x))
