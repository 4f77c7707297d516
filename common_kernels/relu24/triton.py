"""Squared ReLU pruned to 2:4 in Triton: activation, choice of two, FP8 and packing in one pass, and
its gradient, FP8 and packing in one."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common_kernels.fp8.cpu import FORMATS
from common_kernels.fp8.operands_triton import encode
from common_kernels.fp8.triton import scale_from
from common_kernels.launch import cast, keep24, launch, magnitude
from common_kernels.pack import VENDOR
from common_kernels.pack import triton as packing
from common_kernels.relu24 import cpu


def relu24(z: Tensor, prune: bool, layout: str) -> tuple[Tensor, Tensor]:
    return run(z.contiguous(), None, prune, layout)[:2]


def relu24_backward(dh: Tensor, h: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    return run(dh.contiguous(), h.contiguous(), True, layout)[:2]


def relu24_codes(
    x: Tensor, h: Tensor | None, fmt: str, layout: str, amax: Tensor | None, seen: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if layout == VENDOR or not x.numel():
        return cpu.relu24_codes(x, h, fmt, layout, amax, seen)
    h = None if h is None else h.contiguous()
    return run(x.contiguous(), h, True, layout, fmt, amax, seen)


def run(
    x: Tensor, h: Tensor | None, prune: bool, layout: str, fmt: str = "", *scaling: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result, of x's shape, its packed bytes, and with `fmt` the codes of its transpose and
    their scale. h: given for the gradient."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    own, dtype = "" if layout == VENDOR else layout, FORMATS[fmt] if fmt else x.dtype
    order, (groups, warps) = ("", (8, 4)) if not own else (packing.order_of(own, dtype), (16, 8))
    buffer = torch.empty(0, dtype=torch.uint8, device=x.device)
    values = meta = turned = scale = bits = buffer
    amax, seen = scaling or (None, None)
    if own:
        buffer = packing.new_buffer(*x.shape, dtype, x.device, own)
        values, meta = packing.split(buffer, x.numel(), dtype)
    if fmt:
        turned, scale = x.new_empty(x.shape[::-1], dtype=dtype), torch.empty((), device=x.device)
        bits = (torch.zeros_like(scale) if amax is None else amax).view(torch.int32)
    stages = (0,) if not fmt else (1, 2) if amax is None else (2,)
    if x.numel():
        rows, columns = x.shape if own else (x.numel(), 4 * groups)
        for stage in stages:
            launch(
                relu24_kernel, triton.cdiv(x.numel(), 256 * groups), x.device,
                x, x if h is None else h, out, values, meta, rows, columns, turned, scale, bits,
                bits if seen is None else seen.view(torch.int32),
                FMT=fmt or "e4m3", BACKWARD=h is not None, PRUNE=prune, ORDER=order,
                GROUPS=groups, STAGE=stage, SEEN=seen is not None, num_warps=warps,
            )  # fmt: skip
    if layout == VENDOR:  # which packs a pruned matrix itself
        buffer = cpu.packed(out, (out if h is None else h) != 0, layout)
    return out, buffer, turned, scale


@triton.jit
def root(b, h):
    """The square root of b in fp32, an entry of h. The hardware's shortens the pass by a third. In
    bf16 it gives the same dZ (a test has all values), but 0 for subnormals."""
    return tl.sqrt(b) if h.dtype.element_ty == tl.bfloat16 else tl.sqrt_rn(b)


@triton.jit
def relu24_kernel(
    x, h, out, values, meta, rows, columns, turned, scale, amax, seen,
    FMT: tl.constexpr, BACKWARD: tl.constexpr, PRUNE: tl.constexpr, ORDER: tl.constexpr,
    GROUPS: tl.constexpr, STAGE: tl.constexpr, SEEN: tl.constexpr,
):  # fmt: skip
    """Blocks of 64 rows by GROUPS groups; without ORDER nothing is packed, `rows` is the number of
    entries, and a row of the block follows the other in memory. For codes STAGE is 1, which only
    raises `amax` to the largest magnitude, and then 2, which writes."""
    across = columns // (4 * GROUPS)
    stripe = (tl.program_id(0) // across).to(tl.int64)
    first_group = (tl.program_id(0) % across) * GROUPS
    r = tl.arange(0, 64)[:, None]
    start = stripe * 64 * columns + 4 * first_group
    at = start + r * columns + tl.arange(0, 4 * GROUPS)[None, :]
    inside = at < rows if ORDER == "" else at >= 0
    a = packing.split_fours(tl.load(x + at, mask=inside, other=0).to(tl.float32), 64, GROUPS)
    if BACKWARD:
        b = packing.split_fours(tl.load(h + at, mask=inside, other=0).to(tl.float32), 64, GROUPS)
        k = b[0] != 0, b[1] != 0, b[2] != 0, b[3] != 0
        e0, e1 = 2 * a[0] * root(b[0], h), 2 * a[1] * root(b[1], h)
        e2, e3 = 2 * a[2] * root(b[2], h), 2 * a[3] * root(b[3], h)
    else:
        # NaN is not at most 0 and stays.
        a0, a1 = tl.where(a[0] <= 0, 0.0, a[0]), tl.where(a[1] <= 0, 0.0, a[1])
        a2, a3 = tl.where(a[2] <= 0, 0.0, a[2]), tl.where(a[3] <= 0, 0.0, a[3])
        k = keep24(magnitude(a0), magnitude(a1), magnitude(a2), magnitude(a3))
        e0, e1, e2, e3 = a0 * a0, a1 * a1, a2 * a2, a3 * a3
    if PRUNE:
        e0, e1 = tl.where(k[0], e0, 0.0), tl.where(k[1], e1, 0.0)
        e2, e3 = tl.where(k[2], e2, 0.0), tl.where(k[3], e3, 0.0)
    whole = tl.reshape(tl.join(tl.join(e0, e2), tl.join(e1, e3)), [64, 4 * GROUPS])
    if STAGE != 0:
        whole = cast(whole, out.dtype.element_ty).to(tl.float32)
    if STAGE == 1:
        tl.atomic_max(amax, tl.max(magnitude(whole)))
        return
    tl.store(out + at, cast(whole, out.dtype.element_ty), mask=inside)
    if STAGE == 2:
        s = scale_from(tl.load(amax), FMT)
        if tl.program_id(0) == 0:
            tl.store(scale, s)
        if SEEN:
            tl.atomic_max(seen, tl.max(magnitude(whole)))
        c = (4 * first_group + tl.arange(0, 4 * GROUPS)[:, None]).to(tl.int64)
        codes = tl.trans(encode(whole * s, FMT)).to(turned.dtype.element_ty)
        tl.store(turned + c * rows + stripe * 64 + tl.arange(0, 64)[None, :], codes)
    if ORDER != "":
        pairs, nibbles = packing.entries_stored(e0, e1, e2, e3, k)
        half = r * (columns // 2) + tl.arange(0, 2 * GROUPS)[None, :]
        both = cast(tl.reshape(pairs, [64, 2 * GROUPS]), out.dtype.element_ty)
        if STAGE == 2:
            both = encode(both.to(tl.float32) * s, FMT).to(values.dtype.element_ty)
        tl.store(values + start // 2 + half, both)
        packing.store_meta(meta, nibbles, stripe, first_group, rows, columns, ORDER, GROUPS)
