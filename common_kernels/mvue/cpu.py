"""Unbiased 2:4 sampling in plain PyTorch."""

import torch

from common_kernels.philox import philox4x32

Scalar = int | torch.Tensor
PIECE = 1 << 15  # groups that are sampled at once


def mvue24(x: torch.Tensor, key: torch.Tensor, stride: int, design: str, dim: int) -> torch.Tensor:
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    # Use plain ints if that needs no device synchronisation; they are faster to work with.
    numbers = key[0], key[1] * stride
    seed, first = (int(t) if t.device.type == "cpu" else t for t in numbers)
    draw, sample = {"exact": (one_uniform, exact), "sequential": (two_uniforms, sequential)}[design]
    groups, results = (t.unflatten(dim, (-1, 4)).movedim(dim + 1, 0) for t in (x, out))
    u = draw(seed, first, x.numel() // 4, x.device).view(-1, *groups.shape[1:])
    rows = max(1, PIECE // groups[0, 0].numel())  # a piece fits into the CPU's cache
    pieces = (t.split(rows, 1) for t in (groups, results, u))
    for piece, result, random in zip(*pieces, strict=True):
        result.copy_(sample(piece.float(), random))
    return out


def uniform(word: torch.Tensor) -> torch.Tensor:
    """A uniform number in [0, 1) from a word, in steps of 2^-24, exact in fp32."""
    return (word >> 8).to(torch.float32).mul_(2.0**-24)


def one_uniform(seed: Scalar, first: Scalar, count: int, device: torch.device) -> torch.Tensor:
    """A uniform `[count]` for each group q from `first` on: of word q % 4 of counter q // 4."""
    counter = (first >> 2) + torch.arange(count // 4 + 2, device=device)
    u = torch.empty(len(counter), 4, device=device)
    for i, word in enumerate(philox4x32(seed, counter)):
        u[:, i] = uniform(word)
    if isinstance(first, int):
        return u.view(-1)[first & 3 :][:count]
    return u.view(-1)[(first & 3) + torch.arange(count, device=device)]


def two_uniforms(seed: Scalar, first: Scalar, count: int, device: torch.device) -> torch.Tensor:
    """Two uniforms `[2, count]` for each group q from `first` on: of words 0 and 1 of counter q."""
    words = philox4x32(seed, first + torch.arange(count, device=device))
    return torch.stack([uniform(word) for word in words[:2]])


def exact(x: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Systematic sampling with inclusion probabilities min(1, |x| / H).

    Let S be the sum of the magnitudes a_i and o_i the sum of the other three. H = min(S/2, o_0, ..,
    o_3) is half the sum, or the sum of the rest if one entry is dominant, a_i > o_i. A dominant
    entry is always kept. The others form a line of intervals of length a_i, and those that contain
    the points u*H and (u+1)*H are kept. A kept entry becomes max(a_i, H) with its sign.
    x: `[4, ...]`, u: `[1, ...]`.
    """
    a = x.abs()
    s01, s23 = a[0] + a[1], a[2] + a[3]
    others = torch.stack([a[1] + s23, a[0] + s23, a[3] + s01, a[2] + s01])
    total = s01 + s23
    half = torch.where(total.isinf(), s01 * 0.5 + s23 * 0.5, total * 0.5)
    h = torch.minimum(others.amin(0), half)
    dominant = a > others  # at most one entry
    p = u[0] * h
    # p < H fails only if u*H rounds up to H among the subnormals.
    p = torch.where(p < h, p, torch.nextafter(h, h.new_tensor(-torch.inf)))
    lengths = torch.where(dominant, 0.0, a)
    end0, end01 = lengths[0], lengths[0] + lengths[1]
    line = torch.stack([end0, end01, end01 + lengths[2]])
    one = (line <= p).sum(0, dtype=torch.int8)
    two = (line - h <= p).sum(0, dtype=torch.int8)
    lane = torch.arange(4, dtype=torch.int8, device=x.device).view(4, *[1] * (x.ndim - 1))
    # A dominant entry replaces the second one.
    kept = dominant | (lane == one) | ((lane == two) & ~dominant.any(0))
    return torch.where(kept, torch.copysign(torch.maximum(a, h), x), 0.0)


def sequential(x: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
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
