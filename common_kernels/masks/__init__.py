"""Hard masks: N:M along one dim, 2:4 along both dims of a tile, and measures of masks.

The lower index wins a tie. Magnitudes are ranked by their bit pattern, NaN above Inf above every
finite number. So exactly n of m entries are kept whatever the input holds, and a NaN is not hidden.
"""

import torch

from common_kernels import backend as backends
from common_kernels import checks
from common_kernels.library import operator_of
from common_kernels.masks import cpu

ALGORITHMS = ("exact", "greedy", "two_approx")


def nm_mask(
    x: torch.Tensor, n: int = 2, m: int = 4, dim: int = -1, *, backend: str | None = None
) -> torch.Tensor:
    """Bool mask that keeps the n largest magnitudes of each m consecutive entries along dim.

    It has x's shape, and x's strides if x is dense. Raises TypeError for a dtype other than fp32,
    bf16 and fp16, and ValueError if the dim's size is no multiple of m.
    """
    checks.float_tensor(x)
    if not (0 <= n <= m and 1 <= m <= 128):
        raise ValueError(f"an N:M mask needs 0 <= n <= m and 1 <= m <= 128, not n={n} and m={m}")
    dim = checks.group_dim(x, m, dim)
    return _nm_mask(x, n, m, dim, backends.resolve(x.device, backend))


_nm_mask = operator_of(cpu.nm_mask, lambda x, n, m, dim: torch.empty_like(x, dtype=torch.bool))


def double_prune_mask(
    w: torch.Tensor, n: int = 2, m: int = 4, *, backend: str | None = None
) -> torch.Tensor:
    """SLoPe's second mask (arXiv 2405.16325): n:m along dim 0 of a `w [out, in]` that is already
    pruned along dim 1.

    If a group of a column has fewer than n non-zeros left, the mask also keeps zeros of w.
    """
    return nm_mask(w, n, m, dim=0, backend=backend)


def transposable_mask24(
    w: torch.Tensor, algorithm: str = "exact", *, backend: str | None = None
) -> torch.Tensor:
    """Bool mask that is 2:4 along both of the last two dims of `w [..., 4R, 4C]`. `exact` keeps the
    largest sum of magnitudes over the 90 patterns of each 4x4 tile (FST, arXiv 2404.01847);
    `greedy` and `two_approx` (arXiv 2102.08124) are baselines, whose masks may keep fewer than two
    in a row or column. NaN counts as Inf in the exact search."""
    checks.float_tensor(w, "w")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {algorithm!r}: choose one of {', '.join(ALGORITHMS)}")
    checks.group_dim(w, 4, -2)
    checks.group_dim(w, 4, -1)
    return _transposable_mask24(w, algorithm, backends.resolve(w.device, backend))


_transposable_mask24 = operator_of(
    cpu.transposable_mask24, lambda w, algorithm: torch.empty_like(w, dtype=torch.bool)
)


def check_nm(
    x: torch.Tensor, n: int = 2, m: int = 4, dim: int = -1, *, backend: str | None = None
) -> torch.Tensor:
    """Number of groups of m along dim with more than n non-zeros: a 0-dim int64 tensor.

    NaN is a non-zero. x may have any dtype, dense or not.
    """
    dim = checks.group_dim(x, m, dim)
    return _check_nm(x, n, m, dim, backends.resolve(x.device, backend))


_check_nm = operator_of(cpu.check_nm, lambda x, n, m, dim: x.new_empty((), dtype=torch.int64))


def check24(x: torch.Tensor, dim: int = -1, *, backend: str | None = None) -> torch.Tensor:
    """Number of groups of four along dim with more than two non-zeros: a 0-dim int64 tensor."""
    return check_nm(x, 2, 4, dim, backend=backend)


def flip_rate(old: torch.Tensor, new: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """Fraction of mask bits that differ (FST, section 4.1): a 0-dim fp32 tensor, 0 if empty."""
    checks.same_shape(old, new, "old and new")
    name = backends.resolve(checks.one_device(old=old, new=new), backend)
    return _flips(old, new, name) / max(old.numel(), 1)


_flips = operator_of(cpu.flips, lambda old, new: old.new_empty((), dtype=torch.int64))
