"""S-STE's soft threshold in plain PyTorch."""

import functools
from collections.abc import Callable

import torch

from common_kernels import chunks
from common_kernels.masks import cpu as masks

MAGNITUDE = 0x7FFFFFFF


def soft_threshold24(x: torch.Tensor, gamma: float) -> torch.Tensor:
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    groups, results = chunks.as_groups(x, -1, 4), chunks.as_groups(out, -1, 4)
    if x.dtype == torch.float32 and groups.shape[-1] == 1:
        chunks.for_each(functools.partial(shrink_neighbours, gamma=gamma), groups, results)
    else:
        for piece, result in chunks.split(groups, results):
            legalise(piece, result, shrink_lanes(piece, result, gamma))
    return out


def shrink_lanes(x: torch.Tensor, out: torch.Tensor, gamma: float) -> torch.Tensor:
    """Write out = x - clamp(x, -t, t), which is sign(x) * max(|x| - t, 0), and return t.

    Two rounds of a sorting network leave the second and third smallest magnitude in the middle.
    They compare bits, because the bits of non-negative floats rank as the numbers do, NaN highest.
    x and out: `[rows, 4, lanes]`.
    """
    x = x.float()
    a0, a1, a2, a3 = (x.view(torch.int32) & MAGNITUDE).unbind(1)
    low = torch.maximum(torch.minimum(a0, a2), torch.minimum(a1, a3))
    high = torch.minimum(torch.maximum(a0, a2), torch.maximum(a1, a3))
    t, third = (f(low, high).view(torch.float32) for f in (torch.minimum, torch.maximum))
    if gamma:
        t = torch.lerp(t, third, gamma)
    t = t.unsqueeze(1)
    out.copy_(x - torch.clamp(x, -t, t)).add_(0.0)  # no zero is -0.0
    return t


def shrink_neighbours(x: torch.Tensor, out: torch.Tensor, gamma: float) -> Callable[..., None]:
    """The same as `shrink_lanes` for fp32 groups of neighbours in memory, moved two entries at a
    time.

    The halves of all groups, (a0, a1) and (a2, a3), are put in two planes. The second round of the
    network compares each plane with itself shifted by one entry; its results are correct at the
    even entries and are then copied to the odd ones. x and out: `[groups, 4, 1]`, contiguous.
    """
    groups, device = len(x), x.device
    halves = torch.empty(2, groups, dtype=torch.int64, device=device)
    bits, values = halves.view(torch.int32), halves.view(torch.float32)
    magnitude = torch.tensor(MAGNITUDE, dtype=torch.int32, device=device)
    even = torch.tensor(0xFFFFFFFF, device=device)
    odd = torch.tensor(32, device=device)
    a = torch.empty_like(bits)
    (a0, a1), low = a, torch.empty_like(a[0])
    # Each buffer is reused as soon as its content is no longer needed.
    inner, outer = a0[:-1], low[:-1]
    second, third = a1[:-1].view(torch.float32), inner.view(torch.float32)
    high, pairs, shifted = a1, a1.view(torch.int64), a0.view(torch.int64)
    t, negative = a1.view(torch.float32), low.view(torch.float32)
    clamped = torch.empty_like(values)

    def work(x: torch.Tensor, out: torch.Tensor) -> None:
        sources, targets = (y.view(-1, 4).view(torch.int64).unbind(1) for y in (x, out))
        for half, source in zip(halves, sources, strict=True):
            half.copy_(source)
        torch.bitwise_and(bits, magnitude, out=a)
        torch.minimum(a0, a1, out=low)
        torch.maximum(a0, a1, out=high)
        torch.maximum(low[:-1], low[1:], out=inner)
        torch.minimum(high[:-1], high[1:], out=outer)
        torch.minimum(inner, outer, out=a1[:-1])
        if gamma:
            torch.maximum(inner, outer, out=inner)
            torch.lerp(second, third, gamma, out=second)
        torch.bitwise_left_shift(pairs.bitwise_and_(even), odd, out=shifted)
        torch.bitwise_or(pairs, shifted, out=pairs)
        torch.neg(t, out=negative)
        values.sub_(torch.clamp(values, negative, t, out=clamped)).add_(0.0)
        for half, target in zip(halves, targets, strict=True):
            target.copy_(half)
        legalise(x, out, t)

    return work


def legalise(x: torch.Tensor, out: torch.Tensor, t: torch.Tensor) -> None:
    """Prune groups in which t is not finite, and so three or more entries of `out` are NaN (from
    Inf - Inf), to the two entries of the hard mask.
    """
    if x.device.type != "cpu" or not t.amax().isfinite():
        legal = torch.empty_like(x, dtype=torch.bool)
        masks.keep(masks.magnitude_bits(x), legal, 2)
        out.masked_fill_(~legal, 0)
