"""Unbiased 2:4 sampling in Triton, bit for bit that of cpu.py."""

import torch
import triton
import triton.language as tl

from common_kernels import layout
from common_kernels.launch import INTERPRETED, cast, launch, load_groups, store_groups
from common_kernels.masks.triton import tile
from common_kernels.mvue import cpu, ptx

BLOCK = 512  # groups per program; four of them share a counter of the random generator
PTX_BF16, PTX_F16 = tl.constexpr(ptx.sample("bf16")), tl.constexpr(ptx.sample("f16"))
PTX_BF16_80 = tl.constexpr(ptx.sample("bf16", xorsign=False))
PTX_F16_80 = tl.constexpr(ptx.sample("f16", xorsign=False))
CONSTRAINTS = tl.constexpr(ptx.CONSTRAINTS)


def mvue24(x: torch.Tensor, key: torch.Tensor, stride: int, design: str, dim: int) -> torch.Tensor:
    if design == "sequential":  # a test variant without a kernel of its own
        return cpu.mvue24(x, key, stride, design, dim)
    out = torch.empty_like(x)
    if not x.is_contiguous():  # the groups are numbered in row-major order
        return out.copy_(mvue24(x.contiguous(), key, stride, design, dim))
    groups, results = layout.as_groups(x, dim, 4), layout.as_groups(out, dim, 4)
    rows, _, lanes = groups.shape
    key = key.contiguous()
    if lanes == 1:
        launch(
            neighbours_kernel, triton.cdiv(rows, BLOCK), x.device,
            groups, results, key, stride, rows, BLOCK=BLOCK,
        )  # fmt: skip
    else:
        height, width = tile(lanes, BLOCK)
        launch(
            lanes_kernel, triton.cdiv(rows, height) * triton.cdiv(lanes, width), x.device,
            groups, results, key, stride, rows, lanes,
            ROWS=height, LANES=width, SHARED=lanes % 4 == 0,
        )  # fmt: skip
    return out


@triton.jit
def neighbours_kernel(x, out, key, stride, count, BLOCK: tl.constexpr):
    """Sample groups whose entries are neighbours in memory."""
    seed, offset = tl.load(key), tl.load(key + 1) * stride
    start = tl.program_id(0).to(tl.int64) * BLOCK
    u = uniform(words(seed, (offset + start) >> 2, offset & 3, 1, BLOCK))
    x0, x1, x2, x3 = load_groups(x, start, count, 1, BLOCK, True)
    y0, y1, y2, y3 = sample(
        x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32),
        tl.reshape(u, [BLOCK]),
    )  # fmt: skip
    store_groups(out, y0, y1, y2, y3, start, count, 1, BLOCK, True)


@triton.jit
def lanes_kernel(
    x, out, key, stride, rows, lanes, ROWS: tl.constexpr, LANES: tl.constexpr, SHARED: tl.constexpr
):
    """Sample `[rows, 4, lanes]`: groups whose entries lie `lanes` apart."""
    seed, offset = tl.load(key), tl.load(key + 1) * stride
    across = tl.cdiv(lanes, LANES)
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    first = tl.program_id(0) % across * LANES
    lane = first + tl.arange(0, LANES)[None, :]
    if SHARED:
        bits = words(seed, (offset + row * lanes + first) >> 2, offset & 3, ROWS, LANES)
    else:
        group = offset + row * lanes + lane
        w0, w1, w2, w3 = philox(seed, group >> 2)
        bits = tl.where(group & 2 == 0, tl.where(group & 1 == 0, w0, w1),
                        tl.where(group & 1 == 0, w2, w3))  # fmt: skip
    inside = (row < rows) & (lane < lanes)
    at, places, entries = row * 4 * lanes + lane, (), ()
    for _ in tl.static_range(4):
        places += (at,)
        entries += (tl.load(x + at, mask=inside, other=0).to(tl.float32),)
        at += lanes
    y = sample(entries[0], entries[1], entries[2], entries[3], uniform(bits))
    for i in tl.static_range(4):
        tl.store(out + places[i], cast(y[i], out.dtype.element_ty), mask=inside)


@triton.jit
def words(seed, counter, skipped, ROWS: tl.constexpr, COUNT: tl.constexpr):
    """The random words of COUNT groups in each row, four from each counter, beginning at `counter`
    after `skipped` words. Skipping doubles the cost."""
    counters = counter + tl.arange(0, COUNT // 4)[None, :]
    w0, w1, w2, w3 = philox(seed, counters)
    if skipped != 0:
        v0, v1, v2, _ = philox(seed, counters + 1)
        w0, w1, w2, w3 = (
            tl.where(skipped == 1, w1, tl.where(skipped == 2, w2, w3)),
            tl.where(skipped == 1, w2, tl.where(skipped == 2, w3, v0)),
            tl.where(skipped == 1, w3, tl.where(skipped == 2, v0, v1)),
            tl.where(skipped == 1, v0, tl.where(skipped == 2, v1, v2)),
        )
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [ROWS, COUNT])


@triton.jit
def philox(seed, counters):
    """tl.randint4x(seed, counters) for int64 counters, as uint32. It gets both words of a product
    from one multiplication, where Triton's takes two."""
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c1 = counters.to(tl.uint32), (counters >> 32).to(tl.uint32)
    c2, c3 = tl.zeros_like(c0), tl.zeros_like(c0)
    for _ in tl.static_range(10):
        left, right = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c1 = (right >> 32).to(tl.uint32) ^ c1 ^ k0, right.to(tl.uint32)
        c2, c3 = (left >> 32).to(tl.uint32) ^ c3 ^ k1, left.to(tl.uint32)
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def uniform(words):
    """A uniform number in [0, 1) from each word, in steps of 2^-24."""
    return (words.to(tl.uint32, bitcast=True) >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def sample(x0, x1, x2, x3, u):
    """cpu.exact: systematic sampling with inclusion probabilities min(1, |x| / H)."""
    h, one, other = draw(x0, x1, x2, x3, u)
    # With H = 0 cpu.py keeps entry 0 as it is; any other zero kept here must become +0.
    return (
        tl.where((h == 0) | ~one[0], value(x0, h), 0.0),
        tl.where((one[0] & ~one[1]) | (other[0] & ~other[1]), value(x1, h), 0.0),
        tl.where(one[1] | (other[1] & ~other[2]), value(x2, h), 0.0) + 0.0,
        tl.where(other[2], value(x3, h), 0.0) + 0.0,
    )


@triton.jit
def sample_stored(x0, x1, x2, x3, u):
    """Return what `sample` draws as the two entries that a packed matrix stores and the nibble of
    their positions. If fewer than two are kept, +0 is stored where pack.cpu.choose says."""
    h, one, other = draw(x0, x1, x2, x3, u)
    # Positions are counted in floats: a comparison can give 1.0 or 0.0 directly, without one of the
    # few predicate registers.
    i = flag(one[0]) + flag(one[1])
    j = flag(other[0]) + flag(other[1]) + flag(other[2])
    first = value(tl.where(i == 2, x2, tl.where(i == 1, x1, x0)), h)
    second = value(tl.where(j == 3, x3, tl.where(j == 2, x2, x1)), h)
    # A constant holds the nibble for (i, j) at bit 16 i + 4 j. With H = 0 there is at most one
    # non-zero, and entry 3 is not stored beside entry 0 or 1.
    at = (i * 16 + tl.where(h == 0, 2.0, j) * 4 + 8388608.0).to(tl.int32, bitcast=True) & 63
    nibble = (tl.full(at.shape, 0xEE00D990C848, tl.int64) >> at).to(tl.int32) & 15
    return first + 0.0, tl.where(i == j, 0.0, second) + 0.0, nibble


@triton.jit
def sample_pairs(x0, x1, x2, x3, words, dtype: tl.constexpr):
    """Return what `sample_stored` does, from one random word per group: the two entries in the
    16-bit `dtype` as one int32, the first in the lower half, and the nibble minus 4 as a float."""
    if x0.dtype == dtype and not INTERPRETED:
        bf16: tl.constexpr = dtype == tl.bfloat16
        if tl.target_info.cuda_capability_geq(8, 6):
            code: tl.constexpr = PTX_BF16 if bf16 else PTX_F16
        else:
            code: tl.constexpr = PTX_BF16_80 if bf16 else PTX_F16_80
        return tl.inline_asm_elementwise(
            code, CONSTRAINTS, [x0, x1, x2, x3, words], dtype=(tl.int32, tl.float32), is_pure=True,
            pack=2,
        )  # fmt: skip
    else:
        one, other, nibble = sample_stored(
            x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32),
            uniform(words),
        )  # fmt: skip
        low = cast(one, dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        high = cast(other, dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16
        return low | high, (nibble - 4).to(tl.float32)


@triton.jit
def flag(condition):
    return tl.where(condition, 1.0, 0.0)


@triton.jit
def draw(x0, x1, x2, x3, u):
    """H, flags for whether the first kept entry comes after entry 0 and after entry 1, and flags
    for whether the second comes after entries 0, 1 and 2. If both are one entry, it alone is kept.

    This is the line of intervals of cpu.exact, except that a dominant entry j stays on the line
    with length H. Since p < H: if p lies before j, the second draw is j; if p lies in j, the second
    draw is among the entries after j. The first draw is never entry 3, since p < H <= the sum of
    the others. With H = 0 the first draw is the only non-zero entry if that is 0 or 1, else 2, and
    the second is 3.
    """
    a0, a1, a2, a3 = tl.abs(x0), tl.abs(x1), tl.abs(x2), tl.abs(x3)
    s01, s23 = a0 + a1, a2 + a3
    m01 = tl.minimum(a0, a1)
    total = s01 + s23
    half = tl.where(total == float("inf"), s01 * 0.5 + s23 * 0.5, total * 0.5)
    h = least(least(m01 + s23, tl.minimum(a2, a3) + s01), half)
    d0 = a0 > a1 + s23
    d01 = (a1 > a0 + s23) | d0
    d2 = a2 > a3 + s01
    # Enforce p < H, which fails only if u*H rounds up to H among the subnormals.
    bits = (u * h).to(tl.uint32, bitcast=True)
    p = tl.minimum(bits, h.to(tl.uint32, bitcast=True) - 1).to(tl.float32, bitcast=True)
    line1 = tl.where(d01, m01, s01)  # without the dominant entry
    line2 = line1 + tl.where(d2, 0.0, a2)
    other = (
        (a0 - h <= p) | d0,
        tl.where(d01, line1, line1 - h) <= p,
        tl.where(d01 | d2, line2, line2 - h) <= p,
    )
    return h, (a0 <= p, s01 <= p), other


@triton.jit
def least(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def value(x, h):
    """max(|x|, H) with the sign of x."""
    bits = tl.maximum(tl.abs(x), h, propagate_nan=tl.PropagateNan.ALL).to(tl.int32, bitcast=True)
    return (bits | x.to(tl.int32, bitcast=True) & -2147483648).to(tl.float32, bitcast=True)
