"""Unbiased 2:4 sampling in plain PyTorch."""

import torch

from common_kernels import chunks
from common_kernels.philox import philox4x32

MAGNITUDE, SIGN = 0x7FFFFFFF, -(1 << 31)
Scalar = int | torch.Tensor
PIECE = 1 << 20  # elements; the operators here work on a quarter or a sixteenth of a piece


def mvue24(
    x: torch.Tensor, seed: torch.Tensor, offset: torch.Tensor, design: str, dim: int
) -> torch.Tensor:
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    # Use plain ints if that needs no device synchronisation; they are faster to work with.
    key, first = (int(t) if t.device.type == "cpu" else t for t in (seed, offset))
    groups, results = chunks.as_groups(x, dim, 4), chunks.as_groups(out, dim, 4)
    rows, _, lanes = groups.shape
    draw, sample = {"exact": (one_uniform, exact), "sequential": (two_uniforms, sequential)}[design]
    reordered = None
    if not x.is_contiguous():
        grouped = [*x.shape[:dim], x.shape[dim] // 4, *x.shape[dim + 1 :]]
        u = draw(key, first, x.numel() // 4, x.device).view(-1, *grouped)
        order = [0, *(1 + d for d in chunks.memory_order(out))]
        reordered = u.permute(order).reshape(-1, rows, lanes).transpose(0, 1)
    scratch = chunks.Scratch(x.device)
    start = 0
    for piece, result in chunks.split(groups, results, size=PIECE):
        length = len(piece)
        if reordered is None:
            u = draw(key, first + start * lanes, length * lanes, x.device).view(-1, length, lanes)
        else:
            u = reordered[start : start + length].transpose(0, 1)
        v = chunks.gather_lanes(piece, scratch("v", 4, length, lanes))
        chunks.scatter_lanes(sample(v, u, scratch), result)
        start += length
    return out


def uniform(word: torch.Tensor) -> torch.Tensor:
    """A uniform number in [0, 1) from a word, in steps of 2^-24, exact in fp32."""
    return (word >> 8).to(torch.float32).mul_(2.0**-24)


def one_uniform(seed: Scalar, first: Scalar, count: int, device: torch.device) -> torch.Tensor:
    """One uniform `[count]` for each group q = first, first + 1, ...: from word q % 4 of counter
    q // 4."""
    counter = (first >> 2) + torch.arange(count // 4 + 2, device=device)
    u = torch.empty(len(counter), 4, device=device)
    for i, word in enumerate(philox4x32(seed, counter)):
        u[:, i] = uniform(word)
    if isinstance(first, int):
        return u.view(-1)[first & 3 :][:count]
    return u.view(-1)[(first & 3) + torch.arange(count, device=device)]


def two_uniforms(seed: Scalar, first: Scalar, count: int, device: torch.device) -> torch.Tensor:
    """Two uniforms `[2, count]` for each group q = first, first + 1, ...: from words 0 and 1 of
    counter q."""
    words = philox4x32(seed, first + torch.arange(count, device=device))
    return torch.stack([uniform(word) for word in words[:2]])


def exact(x: torch.Tensor, u: torch.Tensor, scratch: chunks.Scratch) -> torch.Tensor:
    """Systematic sampling with inclusion probabilities min(1, |x| / H); x is overwritten.

    Let S be the sum of the magnitudes a_i and o_i the sum of the other three. H = min(S/2, o_0, ..,
    o_3) is half the sum, or the sum of the rest if one entry is dominant, a_i > o_i. A dominant
    entry is always kept. The others form a line of intervals of length a_i, and those that contain
    the points u*H and (u+1)*H are kept. A kept entry becomes max(a_i, H) with its sign.
    x: `[4, ...]`, u: `[1, ...]`.
    """
    shape, u = x.shape[1:], u[0]
    a, others = scratch("a", *x.shape), scratch("others", *x.shape)
    bits = torch.bitwise_and(x.view(torch.int32), MAGNITUDE, out=a.view(torch.int32))
    s01 = torch.add(a[0], a[1], out=scratch("s01", *shape))
    s23 = torch.add(a[2], a[3], out=scratch("s23", *shape))
    for i, (neighbour, rest) in enumerate(((1, s23), (0, s23), (3, s01), (2, s01))):
        torch.add(a[neighbour], rest, out=others[i])
    h = torch.amin(others, 0, out=scratch("h", *shape))
    halves = s01 * 0.5 + s23 * 0.5  # differs from S/2 only where S overflows, and in subnormals
    total = s01.add_(s23)
    torch.minimum(h, torch.where(total.isinf(), halves, total.mul_(0.5)), out=h)
    value = torch.maximum(a, h, out=scratch("value", *x.shape))
    # Comparisons give 0.0 or 1.0, which is faster than bool; the bits of 1.0 shifted right by 29
    # are 1. At most one entry is dominant.
    dominant = torch.gt(a, others, out=others)
    kept = scratch("kept", *x.shape)
    flags = torch.bitwise_right_shift(dominant.view(torch.int32), 29, out=kept.view(torch.int32))
    bits.bitwise_and_(flags.sub_(1))  # a dominant entry leaves the line
    # Enforce p < H, which fails only if u*H rounds up to H among the subnormals.
    p = torch.mul(u, h, out=s01)
    torch.minimum(p.view(torch.int32), h.view(torch.int32) - 1, out=p.view(torch.int32))
    line = a[:3]
    line[1].add_(line[0])
    line[2].add_(line[1])
    one = torch.sum(torch.le(line, p, out=kept[:3]), 0, out=s23)
    two = torch.sum(torch.le(line.sub_(h), p, out=kept[:3]), 0, out=p)
    two.add_(torch.sum(dominant, 0, out=h), alpha=4)  # a dominant entry replaces the second one
    lane = torch.arange(4.0, device=x.device).view(4, *[1] * len(shape))
    mask = dominant.view(torch.int32)
    for index in (one, two):
        mask.bitwise_or_(torch.eq(index, lane, out=kept).view(torch.int32))
    mask.bitwise_right_shift_(29).neg_()
    sign = x.view(torch.int32).bitwise_and_(SIGN)
    return sign.bitwise_or_(value.view(torch.int32)).bitwise_and_(mask).view(torch.float32)


def sequential(x: torch.Tensor, u: torch.Tensor, scratch: chunks.Scratch) -> torch.Tensor:
    """Two draws with probability proportional to |x|, the second from the other three entries.

    A kept entry becomes x / pi_i, where pi_i = t_i + sum over j != i of t_j * a_i / o_j, t = a / S,
    and o_j is the sum of all but a_j, computed without a_j so that nothing cancels.
    x: `[4, ...]`, u: `[2, ...]`.
    """
    a = x.abs() / 4  # only ratios matter, and the sum of these cannot overflow
    others = torch.stack([a[[j for j in range(4) if j != i]].sum(0) for i in range(4)])
    total = a[0] + others[0]
    lane = torch.arange(4, device=x.device).view(4, *[1] * (x.ndim - 1))

    def drawn(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        line = weights.cumsum(0)
        return (line[:3] <= u * line[3]).sum(0) == lane

    first = drawn(a, u[0])
    second = drawn(a.masked_fill(first, 0), u[1])
    t = a / total
    pi = [t[i] + sum(t[j] * (a[i] / others[j]) for j in range(4) if j != i) for i in range(4)]
    value = torch.where(x == 0, 0 * total, x / torch.stack(pi))
    return value.masked_fill_(~(first | second), 0)
