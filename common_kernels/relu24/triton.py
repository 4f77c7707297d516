"""Squared ReLU pruned to 2:4 in Triton: activation, choice of two, FP8 and packing in one pass, and
its gradient, FP8 and packing in one."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from common_kernels.fp8.cpu import FORMATS
from common_kernels.fp8.operands_triton import encode
from common_kernels.fp8.triton import constants, scale_from
from common_kernels.launch import cast, keep24, launch, magnitude
from common_kernels.pack import VENDOR
from common_kernels.pack.triton import (
    entries_stored,
    is_written,
    new_buffer,
    order_of,
    split,
    split_fours,
    store_meta,
)
from common_kernels.relu24 import cpu


def relu24(z: Tensor, prune: bool, layout: str) -> tuple[Tensor, Tensor]:
    return run(z.contiguous(), None, prune, layout)


def relu24_backward(dh: Tensor, h: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    return run(dh.contiguous(), h.contiguous(), True, layout)


def run(x: Tensor, h: Tensor | None, prune: bool, layout: str) -> tuple[Tensor, Tensor]:
    """The result, of x's shape, and its packed bytes. h: given for the gradient."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    own = "" if layout == VENDOR else layout
    # As for `pack.triton.pack`: the smallest whole blocks of metadata.
    order = order_of(own, x.dtype) if own else ""
    groups, warps = (8, 4) if not own or is_written(order, 8) else (16, 8)
    buffer = torch.empty(0, dtype=torch.uint8, device=x.device)
    values = meta = buffer
    if own:
        buffer = new_buffer(*x.shape, x.dtype, x.device, own)
        values, meta = split(buffer, x.numel(), x.dtype)
    if x.numel():
        rows, columns = x.shape if own else (x.numel(), 4 * groups)
        launch(
            relu24_kernel, triton.cdiv(x.numel(), 256 * groups), x.device,
            x, x if h is None else h, out, values, meta, rows, columns, x, x, x, x, 0.0, 0, 0,
            BACKWARD=h is not None, PRUNE=prune, ORDER=order, GROUPS=groups, DENSE=True, CODES=0,
            SEEN=False, num_warps=warps,
        )  # fmt: skip
    if layout == VENDOR:  # which packs a pruned matrix itself
        buffer = cpu.packed(out, (out if h is None else h) != 0, layout)
    return out, buffer


def relu24_codes(
    z: Tensor,
    dh: Tensor | None,
    fmt: str,
    layout: str,
    dense: bool,
    amax: Tensor | None,
    seen: Tensor | None,
) -> tuple[Tensor, ...]:
    if layout == VENDOR or not z.numel():
        return cpu.relu24_codes(z, dh, fmt, layout, dense, amax, seen)
    z, x, (rows, columns), dtype = z.contiguous(), dh, z.shape, FORMATS[fmt]
    x = z if x is None else x.contiguous()
    out, buffer, turned, scale = cpu.room_for_codes(z, fmt, layout, dense)
    bits = scale.new_zeros((), dtype=torch.int32) if amax is None else amax.view(torch.int32)
    for codes in (1, 2) if amax is None else (2,):
        launch(
            relu24_kernel, z.numel() // 4096, z.device,
            x, z, out, *split(buffer, z.numel(), dtype), rows, columns,
            turned, scale, bits, bits if seen is None else seen.view(torch.int32), *constants(fmt),
            BACKWARD=dh is not None, PRUNE=True, ORDER=order_of(layout, dtype), GROUPS=16,
            DENSE=dense, CODES=codes, SEEN=seen is not None, num_warps=8,
        )  # fmt: skip
    return out, buffer, turned, scale


@triton.jit
def relu24_kernel(
    x, h, out, values, meta, rows, columns, turned, scale, amax, seen,
    TOP: tl.constexpr, SMALLEST: tl.constexpr, LIFT: tl.constexpr,
    BACKWARD: tl.constexpr, PRUNE: tl.constexpr, ORDER: tl.constexpr, GROUPS: tl.constexpr,
    DENSE: tl.constexpr, CODES: tl.constexpr, SEEN: tl.constexpr,
):  # fmt: skip
    """Blocks of 64 rows by GROUPS groups; without ORDER nothing is packed, `rows` is the number of
    entries, and a row of the block follows the other in memory. CODES: 1 only raises `amax` to the
    largest magnitude; 2 packs codes and also writes their transpose. h is then Z."""
    across = columns // (4 * GROUPS)
    stripe = (tl.program_id(0) // across).to(tl.int64)
    first_group = (tl.program_id(0) % across) * GROUPS
    r = tl.arange(0, 64)[:, None]
    start = stripe * 64 * columns + 4 * first_group
    at = start + r * columns + tl.arange(0, 4 * GROUPS)[None, :]
    inside = at < rows if ORDER == "" else at >= 0
    a = split_fours(tl.load(x + at, mask=inside, other=0).to(tl.float32), 64, GROUPS)
    if BACKWARD:
        b = split_fours(tl.load(h + at, mask=inside, other=0).to(tl.float32), 64, GROUPS)
        if CODES != 0:
            b = squares(b, True, h.dtype.element_ty)[0]
        k = b[0] != 0, b[1] != 0, b[2] != 0, b[3] != 0
        e0, e1 = 2 * a[0] * tl.sqrt_rn(b[0]), 2 * a[1] * tl.sqrt_rn(b[1])
        e2, e3 = 2 * a[2] * tl.sqrt_rn(b[2]), 2 * a[3] * tl.sqrt_rn(b[3])
        e = kept(e0, e1, e2, e3, k, True, out.dtype.element_ty)
    else:
        e, k = squares(a, PRUNE, out.dtype.element_ty)
    whole = tl.reshape(tl.join(tl.join(e[0], e[2]), tl.join(e[1], e[3])), [64, 4 * GROUPS])
    if CODES == 1:
        tl.atomic_max(amax, tl.max(magnitude(whole)))
        return
    if DENSE:
        tl.store(out + at, whole.to(out.dtype.element_ty), mask=inside)
    if SEEN:
        tl.atomic_max(seen, tl.max(magnitude(whole)))
    if CODES == 2:
        s = scale_from(tl.load(amax), TOP)
        if tl.program_id(0) == 0:
            tl.store(scale, s)
        codes = tl.trans(encode(whole * s, TOP, SMALLEST, LIFT)).to(turned.dtype.element_ty)
        c = 4 * first_group + tl.arange(0, 4 * GROUPS)[:, None]
        row = stripe * 64 + tl.arange(0, 64)[None, :]
        tl.store(turned + c.to(tl.int64) * rows + row, codes)
    if ORDER != "":
        pairs, nibbles = entries_stored(e[0], e[1], e[2], e[3], k)
        half = r * (columns // 2) + tl.arange(0, 2 * GROUPS)[None, :]
        both = tl.reshape(pairs, [64, 2 * GROUPS])
        if CODES == 2:
            both = encode(both * s, TOP, SMALLEST, LIFT)
        tl.store(values + start // 2 + half, both.to(values.dtype.element_ty))
        store_meta(meta, nibbles, stripe, first_group, rows, columns, ORDER, GROUPS)


@triton.jit
def squares(a, PRUNE: tl.constexpr, dtype: tl.constexpr):
    """H' of the four entries of groups of Z, and which of them are kept."""
    # NaN is not at most 0 and stays.
    a0, a1 = tl.where(a[0] <= 0, 0.0, a[0]), tl.where(a[1] <= 0, 0.0, a[1])
    a2, a3 = tl.where(a[2] <= 0, 0.0, a[2]), tl.where(a[3] <= 0, 0.0, a[3])
    k = keep24(magnitude(a0), magnitude(a1), magnitude(a2), magnitude(a3))
    return kept(a0 * a0, a1 * a1, a2 * a2, a3 * a3, k, PRUNE, dtype), k


@triton.jit
def kept(e0, e1, e2, e3, k, PRUNE: tl.constexpr, dtype: tl.constexpr):
    """The kept entries, rounded to `dtype`, in fp32."""
    if PRUNE:
        e0, e1 = tl.where(k[0], e0, 0.0), tl.where(k[1], e1, 0.0)
        e2, e3 = tl.where(k[2], e2, 0.0), tl.where(k[3], e3, 0.0)
    e0, e1, e2, e3 = cast(e0, dtype), cast(e1, dtype), cast(e2, dtype), cast(e3, dtype)
    return e0.to(tl.float32), e1.to(tl.float32), e2.to(tl.float32), e3.to(tl.float32)
