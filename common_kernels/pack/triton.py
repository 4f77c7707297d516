"""Pruning and packing in Triton, in one read of the matrix. The metadata may have any order of
`cpu.py` in which the eight nibbles of a word lie in one block of 64 rows by 8 or 16 groups.
"""

import functools

import torch
import triton
import triton.language as tl

from common_kernels.launch import cast, launch, magnitude
from common_kernels.pack.cpu import BUFFERED, LAYOUTS, new_buffer
from common_kernels.soft_threshold.triton import less, threshold

SOURCES = {"magnitude": 0, "soft": 1, "mask": 2}
BITS = 3  # the source is a mask given as its bits


@triton.constexpr_function
def words_of(order, groups):
    """How the nibbles of a block of 64 rows by `groups` groups become words of metadata; None if
    the eight nibbles of a word do not lie in one block.

    The digits of a nibble's place in the block are named as in `cpu.ORDERS`. As dims of a tensor,
    each of size 2, they are r5 .. r0 and then the group's. Returns
        dims: a permutation; first the digits of a word's place, then those inside a word;
        shifts: by which the second half of each of the last dims is shifted, the last first;
        runs: digits of a word's number that lie side by side in its address, as the lowest, their
            count, and what one adds, in words and in outer tiles;
        block: digits of the block's own place in a tile, as whether it is a group's, how far up,
            and what one adds;
        rows, columns: the digits of a row and of a group in a tile;
        by_rows: whether tiles follow one another along the columns first.
    """
    outer, _, *digits = order.split()
    count = {"r": 6, "g": groups.bit_length() - 1}
    inside = {name: sum(digit[0] == name for digit in digits) for name in count}
    weight = {digit: (1 << place, 0) for place, digit in enumerate(reversed(digits))}
    for name in count:
        for i in range(inside[name], count[name]):
            tiles = 1 << i - inside[name]
            weight[f"{name}{i}"] = (0, tiles) if name == outer else (tiles << len(digits), 0)
    names = [f"{name}{i}" for name in count for i in reversed(range(count[name]))]
    # A thread has neighbouring groups of a row, so digits of the group are joined first.
    within = [name for name in names if weight[name] in ((1, 0), (2, 0), (4, 0))]
    if len(within) < 3:
        return None
    of_words = sorted(set(names) - set(within), key=lambda name: weight[name][::-1])
    runs = []
    for i, name in enumerate(of_words):
        step, far = weight[name][0] // 8, weight[name][1]
        if runs and (runs[-1][2] << runs[-1][1], runs[-1][3] << runs[-1][1]) == (step, far):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1, *runs[-1][2:])
        else:
            runs.append((i, 1, step, far))
    dims = tuple(names.index(name) for name in (*reversed(of_words), *within))
    shifts = tuple(4 * weight[name][0] for name in reversed(within))
    block = tuple(
        (digit[0] == "g", int(digit[1:]) - count[digit[0]], weight[digit][0] // 8)
        for digit in digits
        if int(digit[1:]) >= count[digit[0]]
    )
    return dims, shifts, sum(runs, ()), sum(block, ()), inside["r"], inside["g"], outer == "r"


@functools.cache  # each launch asks
def is_written(order: str, groups: int) -> bool:
    """True if the kernels write an order of metadata in blocks of 64 rows by `groups` groups."""
    return words_of(order, groups) is not None


def order_of(layout: str, dtype: torch.dtype) -> str:
    """The order of a layout's metadata; raises ValueError if the kernels do not write it."""
    form = LAYOUTS[layout].forms.get(dtype.itemsize)
    if form is None or dtype.itemsize > 2 or not is_written(form.order, 16):
        raise ValueError(f"layout {layout!r} is not written here for {dtype}; use convert24")
    return form.order


def split(
    buffer: torch.Tensor, entries: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat views of the values and of the metadata words in a buffer; `entries`: of the matrix."""
    end = entries // 2 * dtype.itemsize
    return buffer[:end].view(dtype), buffer[end:].view(torch.int32)


def pack(
    x: torch.Tensor,
    mask: torch.Tensor | None,
    source: str,
    dtype: torch.dtype,
    scale: torch.Tensor | None = None,
    buffer: torch.Tensor | None = None,
    dense: torch.Tensor | None = None,
    layout: str = BUFFERED,
) -> torch.Tensor:
    """Prune a row-major matrix [64 a, 64 b] along its rows, pack it in `dtype`, and return the
    buffer, a new one if none is given.

    dense: [64 a, 64 b] of `dtype`; also receives the pruned matrix as a dense one.
    """
    rows, columns = x.shape
    if buffer is None:
        buffer = new_buffer(rows, columns, dtype, x.device, layout)
    values, meta = split(buffer, x.numel(), dtype)
    order, kind = order_of(layout, dtype), BITS if is_bits(mask) else SOURCES[source]
    # The groups of a program, its warps and its registers are the fastest on an H200. The smallest
    # whole blocks of metadata are best, except with a mask, of which 64 bytes a row are read then.
    # 32 registers let more programs run at once; with a mask that gains nothing.
    masked, small = kind == SOURCES["mask"], dtype.itemsize == 2 and is_written(order, 8)
    block, warps = (8, 4) if small and not masked else (16, 8)
    launch(
        pack_kernel, rows // 64 * (columns // (4 * block)), x.device,
        x, x if mask is None else mask.view(torch.uint8), values, meta,
        scale if scale is not None else x, values if dense is None else dense, rows, columns,
        SOURCE=kind, SCALED=scale is not None, DENSE=dense is not None,
        ORDER=order, GROUPS=block, num_warps=warps, maxnreg=32 if mask is None else None,
    )  # fmt: skip
    return buffer


def is_bits(mask: torch.Tensor | None) -> bool:
    """True if a mask is given as bits, eight entries per byte."""
    return mask is not None and mask.dtype == torch.uint8


@triton.jit
def pick(a0, a1, a2, a3, i):
    return tl.where(i < 2, tl.where(i == 0, a0, a1), tl.where(i == 2, a2, a3))


@triton.jit
def largest_two(a0, a1, a2, a3, m0, m1, m2, m3):
    """The two entries of largest magnitude m, and their nibble; the lower index wins a tie."""
    w01, w23 = m0 >= m1, m2 >= m3
    both01 = tl.minimum(m0, m1) >= tl.maximum(m2, m3)
    both23 = tl.minimum(m2, m3) > tl.maximum(m0, m1)
    one = tl.where(both23, a2, tl.where(both01 | w01, a0, a1))
    other = tl.where(both01, a1, tl.where(both23 | ~w23, a3, a2))
    nibble = tl.where(w01, 0, 1) + tl.where(w23, 8, 12)
    return one, other, tl.where(both01, 4, tl.where(both23, 14, nibble))


@triton.jit
def split_fours(entries, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Split `[ROWS, 4 GROUPS]` into the four entries of each group, each `[ROWS, GROUPS]`."""
    even, odd = tl.split(tl.reshape(entries, [ROWS, GROUPS, 2, 2]))
    a0, a2 = tl.split(even)
    a1, a3 = tl.split(odd)
    return a0, a1, a2, a3


@triton.constexpr_function
def twos(groups):
    return [2] * (5 + groups.bit_length())


@triton.jit
def join_words(nibbles, ORDER: tl.constexpr, GROUPS: tl.constexpr):
    """Join the nibbles `[64, GROUPS]` of a block to words `[8 GROUPS]`, in the order of memory."""
    SHIFTS: tl.constexpr = words_of(ORDER, GROUPS)[1]
    words = tl.permute(tl.reshape(nibbles, twos(GROUPS)), words_of(ORDER, GROUPS)[0])
    for i in tl.static_range(3):
        low, high = tl.split(words)  # neighbours, of which the second goes above the first
        words = low | high << SHIFTS[i]
    return tl.reshape(words, [8 * GROUPS])


@triton.jit
def store_meta(
    meta, nibbles, stripe, first_group, rows, columns, ORDER: tl.constexpr, GROUPS: tl.constexpr
):
    """Store the metadata words of 64 rows (a stripe) and GROUPS groups from `first_group` on.

    nibbles: `[64, GROUPS]`. rows, columns: the matrix's size.
    """
    words = join_words(nibbles, ORDER, GROUPS)
    store_words(meta, words, stripe, first_group, rows, columns, ORDER, GROUPS)


@triton.jit
def store_words(
    meta, words, stripe, first_group, rows, columns, ORDER: tl.constexpr, GROUPS: tl.constexpr,
    WHOLE: tl.constexpr = True,
):  # fmt: skip
    """Store the words that `join_words` returns; the other arguments are those of `store_meta`.
    Without WHOLE, groups may lie beyond the matrix."""
    RUNS: tl.constexpr = words_of(ORDER, GROUPS)[2]
    BLOCK: tl.constexpr = words_of(ORDER, GROUPS)[3]
    ROWS: tl.constexpr = words_of(ORDER, GROUPS)[4]
    BITS: tl.constexpr = words_of(ORDER, GROUPS)[5]
    down, across = stripe * 64 >> ROWS, first_group >> BITS
    wide = columns // 4 + (1 << BITS) - 1 >> BITS
    if words_of(ORDER, GROUPS)[6]:
        outer, inner, distance = down, across, wide
    else:
        outer, inner, distance = across, down, rows + (1 << ROWS) - 1 >> ROWS
    distance = (distance << ROWS + BITS) // 8
    near = (inner << ROWS + BITS) // 8
    for i in tl.static_range(0, len(BLOCK), 3):
        place = first_group // GROUPS if BLOCK[i] else stripe
        near += (place >> BLOCK[i + 1] & 1) * BLOCK[i + 2]
    word = tl.arange(0, 8 * GROUPS)
    at, tile = tl.zeros([8 * GROUPS], tl.int32), tl.zeros([8 * GROUPS], tl.int32)
    for i in tl.static_range(0, len(RUNS), 4):
        digits = word // (1 << RUNS[i]) % (1 << RUNS[i + 1])
        at += digits * RUNS[i + 2]
        tile += digits * RUNS[i + 3]
    there = None
    if not WHOLE:
        there = near + at < distance if words_of(ORDER, GROUPS)[6] else outer + tile < wide
    tl.store(meta + (outer * distance + near) + (at + tile * distance), words, mask=there)


@triton.jit
def pack_kernel(
    x, mask, values, meta, scale, dense, rows, columns,
    SOURCE: tl.constexpr, SCALED: tl.constexpr, DENSE: tl.constexpr, ORDER: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    across = columns // (4 * GROUPS)
    stripe = (tl.program_id(0) // across).to(tl.int64)
    first_group = (tl.program_id(0) % across) * GROUPS
    r = tl.arange(0, 64)[:, None]
    start = stripe * 64 * columns + 4 * first_group
    at = r * columns + tl.arange(0, 4 * GROUPS)[None, :]
    a0, a1, a2, a3 = split_fours(tl.load(x + start + at), 64, GROUPS)
    if SOURCE >= 2:
        if SOURCE == 3:  # BITS: each entry loads its byte, so that its own thread has the bit
            kept = tl.load(mask + (start + at) // 8) >> (at % 8).to(tl.uint8) & 1
        else:
            kept = tl.load(mask + start + at)
        k = split_fours(kept, 64, GROUPS)
        pairs, nibbles = entries_stored(a0, a1, a2, a3, bools(k))
    else:
        a0, a1, a2, a3 = a0.to(tl.float32), a1.to(tl.float32), a2.to(tl.float32), a3.to(tl.float32)
        m0, m1, m2, m3 = magnitude(a0), magnitude(a1), magnitude(a2), magnitude(a3)
        one, other, nibbles = largest_two(a0, a1, a2, a3, m0, m1, m2, m3)
        if SOURCE == 1:
            t = threshold(m0, m1, m2, m3, 0.0, False)
            # Round as the separate operator soft_threshold24 does.
            one = cast(less(one, t), x.dtype.element_ty).to(tl.float32)
            other = cast(less(other, t), x.dtype.element_ty).to(tl.float32)
        pairs = tl.join(one, other)
    if SCALED:
        pairs *= tl.load(scale)
    out = r * (columns // 2) + tl.arange(0, 2 * GROUPS)[None, :]
    packed = cast(tl.reshape(pairs, [64, 2 * GROUPS]), values.dtype.element_ty)
    tl.store(values + start // 2 + out, packed)
    store_meta(meta, nibbles, stripe, first_group, rows, columns, ORDER, GROUPS)
    if DENSE:
        one, other = tl.split(cast(pairs, dense.dtype.element_ty))
        zero = tl.zeros_like(one)
        first, second = nibbles & 3, nibbles >> 2
        b0 = tl.where(first == 0, one, zero)
        b1 = tl.where(first == 1, one, tl.where(second == 1, other, zero))
        b2 = tl.where(first == 2, one, tl.where(second == 2, other, zero))
        b3 = tl.where(second == 3, other, zero)
        entries = tl.reshape(tl.join(tl.join(b0, b2), tl.join(b1, b3)), [64, 4 * GROUPS])
        tl.store(dense + start + at, entries)


@triton.jit
def bools(row):
    return row[0] != 0, row[1] != 0, row[2] != 0, row[3] != 0


@triton.jit
def entries_stored(a0, a1, a2, a3, k):
    """The two stored entries, joined in the last dim, in fp32, and the nibble of their positions,
    as cpu.choose gives them."""
    first = tl.where(k[0], 0, tl.where(k[1], 1, 2))
    second = tl.where(k[3] | (first == 2), 3, tl.where(k[0] & k[1], 1, 2))
    a0, a1 = tl.where(k[0], a0.to(tl.float32), 0.0), tl.where(k[1], a1.to(tl.float32), 0.0)
    a2, a3 = tl.where(k[2], a2.to(tl.float32), 0.0), tl.where(k[3], a3.to(tl.float32), 0.0)
    pairs = tl.join(pick(a0, a1, a2, a3, first), pick(a0, a1, a2, a3, second))
    return pairs, first | second << 2
