"""Unbiased 2:4 sampling in Triton, bit for bit that of naive.py."""

import torch
import triton
import triton.language as tl

from common_kernels import chunks
from common_kernels.launch import launch, load_groups, store_groups
from common_kernels.mvue import naive

BLOCK = 512  # groups in a program; four of them share a counter of the generator


def mvue24(
    x: torch.Tensor, seed: torch.Tensor, offset: torch.Tensor, design: str, dim: int
) -> torch.Tensor:
    if design == "sequential":  # a test arm without a kernel of its own
        return naive.mvue24(x, seed, offset, design, dim)
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    if not x.is_contiguous():  # the groups are numbered in row-major order
        return out.copy_(mvue24(x.contiguous(), seed, offset, design, dim))
    groups, results = chunks.as_groups(x, dim, 4), chunks.as_groups(out, dim, 4)
    lanes, count = groups.shape[-1], groups.numel() // 4
    key = torch.stack([t.to(x.device, non_blocking=True) for t in (seed, offset)])
    launch(
        mvue_kernel, triton.cdiv(count, BLOCK), x.device,
        groups, results, key, count, lanes, BLOCK=BLOCK, NEIGHBOURS=lanes == 1,
    )  # fmt: skip
    return out


@triton.jit
def mvue_kernel(x, out, key, count, lanes, BLOCK: tl.constexpr, NEIGHBOURS: tl.constexpr):
    seed, offset = tl.load(key), tl.load(key + 1)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    u = uniform(words(seed, offset + start, BLOCK))
    x0, x1, x2, x3 = load_groups(x, start, count, lanes, BLOCK, NEIGHBOURS)
    y0, y1, y2, y3 = sample(
        x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32), u
    )
    store_groups(out, y0, y1, y2, y3, start, count, lanes, BLOCK, NEIGHBOURS)


@triton.jit
def words(seed, first, COUNT: tl.constexpr):
    """The words of COUNT groups, four to a counter of the generator; the first may be any of its
    counter's, at twice the cost."""
    counters, skipped = (first >> 2) + tl.arange(0, COUNT // 4), first & 3
    w0, w1, w2, w3 = tl.randint4x(seed, counters)
    if skipped != 0:
        v0, v1, v2, _ = tl.randint4x(seed, counters + 1)
        w0, w1, w2, w3 = (
            tl.where(skipped == 1, w1, tl.where(skipped == 2, w2, w3)),
            tl.where(skipped == 1, w2, tl.where(skipped == 2, w3, v0)),
            tl.where(skipped == 1, w3, tl.where(skipped == 2, v0, v1)),
            tl.where(skipped == 1, v0, tl.where(skipped == 2, v1, v2)),
        )
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [COUNT])


@triton.jit
def uniform(words):
    """[0, 1) in steps of 2^-24."""
    return (words.to(tl.uint32, bitcast=True) >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def sample(x0, x1, x2, x3, u):
    """naive.exact: systematic sampling with inclusion probabilities min(1, |x| / H)."""
    a0, a1, a2, a3 = tl.abs(x0), tl.abs(x1), tl.abs(x2), tl.abs(x3)
    s01, s23 = a0 + a1, a2 + a3
    o0, o1, o2, o3 = a1 + s23, a0 + s23, a3 + s01, a2 + s01
    h = least(least(o0, o1), least(o2, o3))
    h = least(h, (s01 + s23) * 0.5)
    d0, d1, d2, d3 = a0 > o0, a1 > o1, a2 > o2, a3 > o3  # one at most is dominant
    bits = (u * h).to(tl.int32, bitcast=True)
    p = tl.minimum(bits, h.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True)
    line0 = tl.where(d0, 0.0, a0)
    line1 = tl.where(d1, 0.0, a1) + line0
    line2 = tl.where(d2, 0.0, a2) + line1
    # A line only grows: what one comparison says of an entry holds for those before it.
    c0, c1, c2 = line0 <= p, line1 <= p, line2 <= p
    # Where an entry is dominant it takes the second place: no other entry may.
    d = d0 | d1 | d2 | d3
    e0, e1, e2 = (line0 - h <= p) | d, (line1 - h <= p) | d, (line2 - h <= p) & ~d
    return (
        value(x0, a0, h, d0 | ~c0 | ~e0),
        value(x1, a1, h, d1 | (c0 & ~c1) | (e0 & ~e1)),
        value(x2, a2, h, d2 | (c1 & ~c2) | (e1 & ~e2 & ~d)),
        value(x3, a3, h, d3 | c2 | e2),
    )


@triton.jit
def least(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def value(x, a, h, kept):
    """max(a, H) with the sign of x if the entry is kept."""
    bits = tl.maximum(a, h, propagate_nan=tl.PropagateNan.ALL).to(tl.int32, bitcast=True)
    sign = x.to(tl.int32, bitcast=True) & -2147483648
    return tl.where(kept, bits | sign, 0).to(tl.float32, bitcast=True)
