"""Sampling of an output's gradient, packed transposed, in one read, in Triton."""

import torch
import triton
import triton.language as tl

from common_kernels import launch
from common_kernels.mvue.triton import philox, sample_pairs
from common_kernels.pack.cpu import BUFFERED
from common_kernels.pack.triton import join_words, new_buffer, order_of, split, store_words

# Groups of each of 64 features per program: with four warps, a thread has four groups of four
# features. Twice as many double the code's length and take 12 % longer on an H200.
GROUPS = 32


def pack_sample(
    dy: torch.Tensor, key: torch.Tensor, dtype: torch.dtype, stride: int = 1, layout: str = BUFFERED
) -> torch.Tensor:
    """The buffer of the packed transpose [out, T] of mvue24(dy, dim=0) of a row-major dy [T, out].
    T is a multiple of 16 and of what the layout needs, out a multiple of 64. key: int64 [2] on dy's
    device, (seed, offset / stride); the offset must be a multiple of 4, as it is if it counts whole
    micro-batches. dtype: 16-bit."""
    tokens, out = dy.shape
    buffer = new_buffer(out, tokens, dtype, dy.device, layout)
    launch.by_triton(
        sample_kernel, triton.cdiv(tokens, 4 * GROUPS) * (out // 64), dy.device,
        dy, key, stride, *split(buffer, dy.numel(), dtype), tokens, out,
        ORDER=order_of(layout, dtype), GROUPS=GROUPS, num_warps=4,
        maxnreg=56 if dy.dtype.itemsize == 2 else None,  # fp32 has more to hold
    )  # fmt: skip
    return buffer


@triton.jit
def sample_kernel(
    dy, key, stride, values, meta, tokens, OUT: tl.constexpr, ORDER: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """Sample and pack GROUPS groups of tokens for 64 features. A thread has four neighbouring
    features, which share random counters, in four groups whose nibbles share words."""
    QUARTER: tl.constexpr = GROUPS // 4
    seed, offset = tl.load(key), tl.load(key + 1) * stride
    first_group = (tl.program_id(0) // (OUT // 64)).to(tl.int64) * GROUPS
    stripe = (tl.program_id(0) % (OUT // 64)).to(tl.int64)
    count = tl.minimum(tokens // 4 - first_group, GROUPS).to(tl.int32)
    start = first_group * OUT + stripe * 64  # the first group's index in dy's order
    at = dy + (start + 3 * first_group * OUT) + tl.max_contiguous(tl.arange(0, 64), 4)[None, :]
    q = tl.arange(0, QUARTER)[:, None]
    pairs, nibbles = (), ()
    for t in tl.static_range(4):
        group = 4 * q + t
        rows, inside = at + 4 * group * OUT, group < count
        x0 = tl.load(rows, mask=inside, other=0)
        x1 = tl.load(rows + OUT, mask=inside, other=0)
        x2 = tl.load(rows + 2 * OUT, mask=inside, other=0)
        x3 = tl.load(rows + 3 * OUT, mask=inside, other=0)
        counters = (offset + start >> 2) + (group * (OUT // 4) + tl.arange(0, 16)[None, :])
        w0, w1, w2, w3 = philox(seed, counters)
        words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [QUARTER, 64])
        pair, nibble = sample_pairs(x0, x1, x2, x3, words, values.dtype.element_ty)
        pairs += (pair,)
        nibbles += (nibble,)
    pair = tl.join(tl.join(pairs[0], pairs[2]), tl.join(pairs[1], pairs[3]))
    pair = tl.permute(pair, 1, 0, 2, 3)
    place = tl.arange(0, GROUPS)[None, :]
    row = stripe * 16 * tokens + tl.arange(0, 64)[:, None] * (tokens // 4)
    both = values.to(tl.pointer_type(tl.int32))
    tl.store(both + (row + first_group) + place, tl.reshape(pair, [64, GROUPS]), mask=place < count)
    nibble = tl.join(tl.join(nibbles[0], nibbles[2]), tl.join(nibbles[1], nibbles[3]))
    nibble = tl.reshape(tl.permute(nibble, 1, 0, 2, 3), [64, GROUPS]).to(tl.int32) + 4
    words = join_words(nibble, ORDER, GROUPS)
    store_words(meta, words, stripe, first_group, OUT, tokens, ORDER, GROUPS, False)
