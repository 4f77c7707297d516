"""S-STE's soft threshold in Triton, bit for bit that of cpu.py (up to rounding if gamma > 0)."""

import torch
import triton
import triton.language as tl

from common_kernels import layout
from common_kernels.launch import BLOCK, cast, keep24, launch, load_groups, magnitude, store_groups


def soft_threshold24(x: torch.Tensor, gamma: float) -> torch.Tensor:
    out = torch.empty_like(x)
    groups, results = layout.as_groups(x, -1, 4), layout.as_groups(out, -1, 4)
    lanes, count = groups.shape[-1], groups.numel() // 4
    launch(
        soft_kernel, triton.cdiv(count, BLOCK), x.device, groups, results, count, lanes, gamma,
        BLOCK=BLOCK, NEIGHBOURS=lanes == 1, GAMMA=gamma != 0,
    )  # fmt: skip
    return out


@triton.jit
def soft_kernel(
    x, out, count, lanes, gamma,
    BLOCK: tl.constexpr, NEIGHBOURS: tl.constexpr, GAMMA: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    a0, a1, a2, a3 = load_groups(x, start, count, lanes, BLOCK, NEIGHBOURS)
    y0, y1, y2, y3 = shrink(a0, a1, a2, a3, gamma, GAMMA)
    if GAMMA:  # the result may be far smaller than x, so the cast may round it to -0.0
        y0, y1 = unsigned_zeros(y0, x.dtype.element_ty), unsigned_zeros(y1, x.dtype.element_ty)
        y2, y3 = unsigned_zeros(y2, x.dtype.element_ty), unsigned_zeros(y3, x.dtype.element_ty)
    store_groups(out, y0, y1, y2, y3, start, count, lanes, BLOCK, NEIGHBOURS)


@triton.jit
def shrink(a0, a1, a2, a3, gamma, GAMMA: tl.constexpr):
    """sign(a) * max(|a| - t, 0) of four entries in fp32, where t is their `threshold`."""
    a0, a1, a2, a3 = a0.to(tl.float32), a1.to(tl.float32), a2.to(tl.float32), a3.to(tl.float32)
    m0, m1, m2, m3 = magnitude(a0), magnitude(a1), magnitude(a2), magnitude(a3)
    t = threshold(m0, m1, m2, m3, gamma, GAMMA)
    # Inf - Inf = NaN may appear in three entries; only the two of the hard mask are kept.
    finite = magnitude(t) < 0x7F800000
    k = keep24(m0, m1, m2, m3)
    a, shrunk = (a0, a1, a2, a3), ()
    for i in tl.static_range(4):
        shrunk += (tl.where(finite | k[i], less(a[i], t), 0.0),)
    return shrunk


@triton.jit
def threshold(m0, m1, m2, m3, gamma, GAMMA: tl.constexpr):
    """t in fp32, from the bits of the four magnitudes."""
    low = tl.maximum(tl.minimum(m0, m2), tl.minimum(m1, m3))
    high = tl.minimum(tl.maximum(m0, m2), tl.maximum(m1, m3))
    t = tl.minimum(low, high).to(tl.float32, bitcast=True)
    if GAMMA:
        t += gamma * (tl.maximum(low, high).to(tl.float32, bitcast=True) - t)
    return t


@triton.jit
def less(a, t):
    """sign(a) * max(|a| - t, 0), whose zeros are all +0.0."""
    inner = tl.maximum(a, -t, propagate_nan=tl.PropagateNan.ALL)
    return a - tl.minimum(inner, t, propagate_nan=tl.PropagateNan.ALL) + 0.0


@triton.jit
def unsigned_zeros(y, dtype: tl.constexpr):
    """y rounded to `dtype`, in fp32, without -0.0."""
    return cast(y, dtype).to(tl.float32) + 0.0
