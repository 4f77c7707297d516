"""Unbiased 2:4 sampling by definition: what the tests hold every backend against."""

import torch

from common_kernels.masks.reference import each_group
from common_kernels.philox import philox4x32


def mvue24(
    x: torch.Tensor, seed: int, offset: int = 0, design: str = "exact", dim: int = -1
) -> torch.Tensor:
    """Sample two of each four entries along dim, so that the mean over seeds is x. Let q be the
    index of a group plus `offset`. `exact` draws one number in [0, 1) from word q % 4 of Philox at
    counter q // 4; `sequential` draws two, from words 0 and 1 at counter q. A number takes 24 bits
    of a word."""

    def sample(group: list[float], number: int) -> list[float]:
        q = number + offset
        counter = torch.tensor(q // 4 if design == "exact" else q)
        u = [float(word // 256) / 2**24 for word in philox4x32(seed, counter)]
        return exact(group, u[q % 4]) if design == "exact" else sequential(group, u[0], u[1])

    return each_group(sample, x, 4, dim, torch.float32).to(x.dtype)


def exact(group: list[float], u: float) -> list[float]:
    """Systematic sampling, which has the least variance of all unbiased samples of two entries.

    Entry a is kept with probability min(1, |a| / H) and then becomes max(|a|, H) with its sign. H
    is half the sum of the magnitudes, or, if one entry is dominant (larger than the sum of the
    others), the sum of the others. A dominant entry is always kept. The others are laid end to end
    on a line, in fp32, and those that contain the points u * H and (u + 1) * H are kept; beside a
    dominant entry the line ends at H, so that one is.
    """
    x = torch.tensor(group)
    a0, a1, a2, a3 = a = x.abs()
    first, last = a0 + a1, a2 + a3
    others = torch.stack([a1 + last, a0 + last, a3 + first, a2 + first])
    total = first + last
    half = first / 2 + last / 2 if total.isinf() else total / 2
    h = torch.minimum(half, others.min())
    dominant = a > others
    ends = torch.where(dominant, 0.0, a).cumsum(0)[:3]  # where one entry ends, the next begins
    point = u * h
    kept = {int((ends <= point).sum()), int((ends - h <= point).sum())}
    if dominant.any():
        kept = {int((ends <= point).sum()), int(dominant.int().argmax())}
    return [float(x[i].sign() * torch.maximum(a[i], h)) if i in kept else 0.0 for i in range(4)]


def sequential(group: list[float], u: float, v: float) -> list[float]:
    """Two draws without replacement with probability proportional to |x|, as in the released code
    of FST; a kept entry is divided by its inclusion probability pi.
    """
    a = [abs(entry) for entry in group]
    total = sum(a)

    def drawn(weights: list[float], u: float) -> int:
        point = u * sum(weights)
        return sum(sum(weights[: i + 1]) <= point for i in range(3))

    def pi(i: int) -> float:
        return a[i] / total + sum(
            a[j] / total * a[i] / (total - a[j]) for j in range(4) if j != i and a[j]
        )

    first = drawn(a, u)
    second = drawn([0.0 if i == first else entry for i, entry in enumerate(a)], v)
    return [group[i] / pi(i) if i in (first, second) and a[i] else 0.0 for i in range(4)]
