"""Unbiased 2:4 samples of minimum variance."""

import torch

from common_kernels import backend as backends
from common_kernels import checks
from common_kernels.library import operator_of
from common_kernels.mvue import cpu

DESIGNS = ("exact", "sequential")


def mvue24(
    x: torch.Tensor,
    seed: int | torch.Tensor,
    offset: int | torch.Tensor = 0,
    design: str = "exact",
    dim: int = -1,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """A random tensor with mean x and at most two non-zeros in each group of four along dim.

    Design `exact` has the smallest variance of all unbiased 2:4 estimators, the aim of FST (arXiv
    2404.01847, section 5.2): one uniform number draws two entries by systematic sampling with the
    inclusion probabilities min(1, c|x|), which minimise the sum of x^2 / probability. `sequential`,
    the design of FST's released code, draws two entries in turn with probability proportional to
    |x| and divides each by its inclusion probability.

    The random bits depend only on seed and on offset + the group's index in the row-major order of
    x's shape. A part of a batch therefore draws the same bits as the whole batch, if its offset is
    given. seed and offset are ints or 0-dim int64 tensors; a tensor does not become a constant of a
    compiled graph. The result has x's shape, dtype and strides. NaN and Inf propagate, and so does
    the overflow of a sum of three magnitudes in fp32. No gradient is defined.
    """
    key = [_scalar(seed, "seed", x), _scalar(offset, "offset", x)]
    key = [t.to(x.device, non_blocking=True) for t in key]
    return sampled24(x, torch.stack(key), 1, design, dim, backend=backend)


def sampled24(
    x: torch.Tensor,
    key: torch.Tensor,
    stride: int,
    design: str = "exact",
    dim: int = -1,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """mvue24(x, key[0], key[1] * stride, design, dim), in one launch; key: int64 [2]."""
    checks.float_tensor(x)
    if design not in DESIGNS:
        raise ValueError(f"unknown design {design!r}: choose one of {', '.join(DESIGNS)}")
    dim = checks.group_dim(x, 4, dim)
    name = backends.resolve(checks.one_device(x=x, key=key), backend)
    return _mvue24(x, key, stride, design, dim, name)


def _scalar(value: int | torch.Tensor, name: str, x: torch.Tensor) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        if value.dtype != torch.int64 or value.ndim:
            kind = f"{value.dtype} of shape {tuple(value.shape)}"
            raise TypeError(f"{name} must be an int or a 0-dim int64 tensor, not {kind}")
        if value.device.type != "cpu":  # as in torch, a 0-dim CPU tensor combines with any device
            checks.one_device(x=x, **{name: value})
        return value
    return torch.tensor(value, dtype=torch.int64)


_mvue24 = operator_of(cpu.mvue24, lambda x, *_: torch.empty_like(x))
