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
            x, x if h is None else h, out, values, meta, rows, columns,
            BACKWARD=h is not None, PRUNE=prune, ORDER=order, GROUPS=groups, num_warps=warps,
        )  # fmt: skip
    if layout == VENDOR:  # which packs a pruned matrix itself
        buffer = cpu.packed(out, (out if h is None else h) != 0, layout)
    return out, buffer


@triton.jit
def relu24_kernel(
    x, h, out, values, meta, rows, columns,
    BACKWARD: tl.constexpr, PRUNE: tl.constexpr, ORDER: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Blocks of 64 rows by GROUPS groups; without ORDER nothing is packed, `rows` is the number of
    entries, and a row of the block follows the other in memory."""
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
        e, k = gradient(a, b)
    else:
        e, k = squares(a, PRUNE)
    tl.store(out + at, cast(whole(e, GROUPS), out.dtype.element_ty), mask=inside)
    if ORDER != "":
        pairs, nibbles = entries_stored(e[0], e[1], e[2], e[3], k)
        half = r * (columns // 2) + tl.arange(0, 2 * GROUPS)[None, :]
        both = cast(tl.reshape(pairs, [64, 2 * GROUPS]), values.dtype.element_ty)
        tl.store(values + start // 2 + half, both)
        store_meta(meta, nibbles, stripe, first_group, rows, columns, ORDER, GROUPS)


@triton.jit
def squares(a, PRUNE: tl.constexpr):
    """H' of the four entries of groups of Z, and which of them are kept."""
    # NaN is not at most 0 and stays.
    a0, a1 = tl.where(a[0] <= 0, 0.0, a[0]), tl.where(a[1] <= 0, 0.0, a[1])
    a2, a3 = tl.where(a[2] <= 0, 0.0, a[2]), tl.where(a[3] <= 0, 0.0, a[3])
    k = keep24(magnitude(a0), magnitude(a1), magnitude(a2), magnitude(a3))
    e = a0 * a0, a1 * a1, a2 * a2, a3 * a3
    return kept(e, k) if PRUNE else e, k


@triton.jit
def gradient(dh, h):
    """dZ of the four entries of groups, and which of them are kept."""
    k = h[0] != 0, h[1] != 0, h[2] != 0, h[3] != 0
    e0, e1 = 2 * dh[0] * tl.sqrt_rn(h[0]), 2 * dh[1] * tl.sqrt_rn(h[1])
    e2, e3 = 2 * dh[2] * tl.sqrt_rn(h[2]), 2 * dh[3] * tl.sqrt_rn(h[3])
    return kept((e0, e1, e2, e3), k), k


@triton.jit
def kept(e, k):
    e0, e1 = tl.where(k[0], e[0], 0.0), tl.where(k[1], e[1], 0.0)
    return e0, e1, tl.where(k[2], e[2], 0.0), tl.where(k[3], e[3], 0.0)


@triton.jit
def whole(e, GROUPS: tl.constexpr):
    return tl.reshape(tl.join(tl.join(e[0], e[2]), tl.join(e[1], e[3])), [64, 4 * GROUPS])


@triton.jit
def rounded(a, dtype: tl.constexpr):
    """a in fp32, rounded to `dtype`."""
    return cast(a, dtype).to(tl.float32)


def relu24_codes(
    z: Tensor, dh: Tensor | None, fmt: str, layout: str, amax: Tensor | None, seen: Tensor | None
) -> tuple[Tensor, ...]:
    if layout == VENDOR or not z.numel():
        return cpu.relu24_codes(z, dh, fmt, layout, amax, seen)
    z, dh = z.contiguous(), None if dh is None else dh.contiguous()
    (rows, columns), dtype = z.shape, FORMATS[fmt]
    buffer = new_buffer(rows, columns, dtype, z.device, layout)
    turned = z.new_empty((columns, rows), dtype=dtype)
    scale, sums = z.new_empty((), dtype=torch.float32), z.new_empty(0, dtype=torch.float32)
    if dh is not None:
        sums = sums.new_empty(rows // 64, columns)
    bits = scale.new_zeros((), dtype=torch.int32) if amax is None else amax.view(torch.int32)
    for searches in (True, False) if amax is None else (False,):
        launch(
            relu24_codes_kernel, rows // 64 * (columns // 64), z.device,
            z, z if dh is None else dh, *split(buffer, z.numel(), dtype), turned, sums, scale, bits,
            bits if seen is None else seen.view(torch.int32), rows, columns, *constants(fmt),
            BACKWARD=dh is not None, SEARCHES=searches, SEEN=seen is not None and not searches,
            ORDER=order_of(layout, dtype), num_warps=8,
        )  # fmt: skip
    return buffer, turned, scale, sums


@triton.jit
def relu24_codes_kernel(
    z, dh, values, meta, turned, sums, scale, amax, seen, rows, columns,
    TOP: tl.constexpr, SMALLEST: tl.constexpr, LIFT: tl.constexpr,
    BACKWARD: tl.constexpr, SEARCHES: tl.constexpr, SEEN: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    """The codes of a block of 64 rows by 16 groups, packed and transposed; with SEARCHES only its
    largest magnitude."""
    across = columns // 64
    stripe = (tl.program_id(0) // across).to(tl.int64)
    first_group = (tl.program_id(0) % across) * 16
    r, c = stripe * 64 + tl.arange(0, 64), 4 * first_group + tl.arange(0, 64)
    at = r[:, None] * columns + c[None, :]
    dtype: tl.constexpr = z.dtype.element_ty
    e, k = squares(split_fours(tl.load(z + at).to(tl.float32), 64, 16), True)
    if BACKWARD:
        h = rounded(e[0], dtype), rounded(e[1], dtype), rounded(e[2], dtype), rounded(e[3], dtype)
        e, k = gradient(split_fours(tl.load(dh + at).to(tl.float32), 64, 16), h)
    entries = rounded(whole(e, 16), dtype)
    if SEARCHES:
        tl.atomic_max(amax, tl.max(magnitude(entries)))
        return
    if SEEN:
        tl.atomic_max(seen, tl.max(magnitude(entries)))
    s = scale_from(tl.load(amax), TOP)
    if tl.program_id(0) == 0:
        tl.store(scale, s)
    if BACKWARD:
        tl.store(sums + stripe * columns + c, tl.sum(entries, 0))
    codes = tl.trans(encode(entries * s, TOP, SMALLEST, LIFT))
    tl.store(
        turned + c[:, None].to(tl.int64) * rows + r[None, :], codes.to(turned.dtype.element_ty)
    )
    pairs, nibbles = entries_stored(e[0], e[1], e[2], e[3], k)
    pairs = encode(rounded(tl.reshape(pairs, [64, 32]), dtype) * s, TOP, SMALLEST, LIFT)
    half = r[:, None] * (columns // 2) + 2 * first_group + tl.arange(0, 32)[None, :]
    tl.store(values + half, pairs.to(values.dtype.element_ty))
    store_meta(meta, nibbles, stripe, first_group, rows, columns, ORDER, 16)
