"""Hard masks in Triton, bit for bit those of cpu.py.

To rank more than four magnitudes, a thread sorts keys, each of which holds a magnitude and its
place, with a sorting network: minima and maxima only, and no branch that depends on the data.
"""

import functools
import math

import torch
import triton
import triton.language as tl

from common_kernels import checks, layout
from common_kernels.launch import (
    BLOCK,
    first_entries,
    join_groups,
    keep24,
    launch,
    load_groups,
    magnitude,
    split_groups,
    store_groups,
)
from common_kernels.masks import cpu

LARGEST_M = 32  # the largest group that a thread can hold
CHECKED = 8192  # entries per program of the kernels that only read
LARGE = tl.constexpr(0x7E000000)  # the bits of 2^125: a sum of eight numbers below it is finite
TILES = 128  # 4x4 tiles in a program of two warps, two to a thread


def nm_mask(x: torch.Tensor, n: int, m: int, dim: int) -> torch.Tensor:
    if m > LARGEST_M:
        return cpu.nm_mask(x, n, m, dim)
    mask = torch.empty_like(x, dtype=torch.bool)
    if n in (0, m):
        return mask.fill_(n == m)
    groups, kept = layout.as_groups(x, dim, m), layout.as_groups(mask, dim, m)
    lanes, count = groups.shape[-1], groups.numel() // m
    arguments = (groups, kept.view(torch.uint8), count, lanes)
    if (n, m) == (2, 4):
        launch(
            mask24_kernel, triton.cdiv(count, BLOCK), x.device, *arguments,
            BLOCK=BLOCK, NEIGHBOURS=lanes == 1,
        )  # fmt: skip
    else:
        levels = (m - 1).bit_length()
        width = 1 << levels
        near = lanes == 1 and m == width
        size = max(128, (2 if near else 8) * BLOCK // width)
        launch(
            mask_kernel, triton.cdiv(count, size), x.device, *arguments,
            N=n, M=m, LEVELS=levels, NETWORK=network(width),
            BLOCK=size, NEIGHBOURS=near,
        )  # fmt: skip
    return mask


@functools.cache
def row_words(device: torch.device) -> torch.Tensor:
    """`[1296, 4]` int32: the bools of each row of the pattern at 36 * upper half + lower half."""
    return cpu.four_rows().view(torch.int32).squeeze(-1).to(device)


@triton.jit
def mask24_kernel(x, mask, count, lanes, BLOCK: tl.constexpr, NEIGHBOURS: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    a0, a1, a2, a3 = load_groups(x, start, count, lanes, BLOCK, NEIGHBOURS)
    k0, k1, k2, k3 = keep24(magnitude(a0), magnitude(a1), magnitude(a2), magnitude(a3))
    store_groups(mask, k0, k1, k2, k3, start, count, lanes, BLOCK, NEIGHBOURS)


@functools.cache
def network(size: int) -> tuple[tuple[int, int], ...]:
    """The comparators of Batcher's odd-even merge sort of `size` (a power of two) keys."""
    pairs = []
    run = 1  # keys are sorted in runs of this length
    while run < size:
        distance = run
        while distance:
            pairs += [
                (i, i + distance)
                for start in range(distance % run, size - distance, 2 * distance)
                for i in range(start, min(start + distance, size - distance))
                if i // (2 * run) == (i + distance) // (2 * run)
            ]
            distance //= 2
        run *= 2
    return tuple(pairs)


@triton.jit
def exchange(keys, FIRST: tl.constexpr, LAST: tl.constexpr):
    """Move the larger of two keys to place FIRST and the other to place LAST."""
    a, b = keys[FIRST], keys[LAST]
    if a.dtype == tl.float64:
        wins = a > b
        larger, smaller = tl.where(wins, a, b), tl.where(wins, b, a)
    else:
        larger, smaller = tl.maximum(a, b), tl.minimum(a, b)
    keys = keys[:FIRST] + (larger,) + keys[FIRST + 1 :]  # noqa: RUF005 (Triton cannot unpack)
    return keys[:LAST] + (smaller,) + keys[LAST + 1 :]  # noqa: RUF005


@triton.jit
def descending(keys, NETWORK: tl.constexpr):
    for n in tl.static_range(len(NETWORK)):
        keys = exchange(keys, NETWORK[n][0], NETWORK[n][1])
    return keys


@triton.jit
def key(a, place):
    """A sort key that ranks as |a| does, and among equals as `place` (an integer below 2^17) does.
    The key of a 32-bit entry is fp64: a GPU compares fp64 in one instruction, int64 in several."""
    if a.dtype == tl.float32:
        return ((magnitude(a).to(tl.int64) << 31) | place).to(tl.float64, bitcast=True)
    else:
        return (magnitude(a).to(tl.uint32) << 17) | place


@triton.jit
def place_of(key):
    if key.dtype == tl.float64:
        return (key.to(tl.int64, bitcast=True) & 0x1FFFF).to(tl.int32)
    else:
        return (key & 0x1FFFF).to(tl.int32)


@triton.jit
def mask_kernel(
    x, mask, count, lanes, N: tl.constexpr, M: tl.constexpr, LEVELS: tl.constexpr,
    NETWORK: tl.constexpr, BLOCK: tl.constexpr, NEIGHBOURS: tl.constexpr,
):  # fmt: skip
    """Keep an entry if its key is at least the N-th largest of its group.

    The network sorts 2^LEVELS >= M keys; the missing ones rank last.
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    keys = ()
    if NEIGHBOURS:
        at = M * start + tl.arange(0, M * BLOCK)
        parts = split_groups(
            tl.load(x + at, mask=at < M * tl.cast(count, tl.int64), other=0), LEVELS
        )
        for i in tl.static_range(M):
            keys += (key(parts[i], M - i),)
        kept = reaching(keys, descending(keys, NETWORK)[N - 1], M)
        tl.store(mask + at, join_groups(kept, LEVELS), mask=at < M * tl.cast(count, tl.int64))
    else:
        at = first_entries(start, lanes, M, BLOCK)
        inside = start + tl.arange(0, BLOCK) < count
        for i in tl.static_range(M):
            keys += (key(tl.load(x + at + i * lanes, mask=inside, other=0), M - i),)
        padded = keys
        for _ in tl.static_range((1 << LEVELS) - M):
            padded += (tl.zeros_like(keys[0]),)
        kept = reaching(keys, descending(padded, NETWORK)[N - 1], M)
        for i in tl.static_range(M):
            tl.store(mask + at + i * lanes, kept[i], mask=inside)


@triton.jit
def reaching(keys, least, M: tl.constexpr):
    kept = ()
    for i in tl.static_range(M):
        kept += ((keys[i] >= least).to(tl.uint8),)
    return kept


def transposable_mask24(w: torch.Tensor, algorithm: str) -> torch.Tensor:
    if algorithm == "two_approx":  # a baseline without a kernel of its own
        return cpu.transposable_mask24(w, algorithm)
    mask = torch.empty_like(w, dtype=torch.bool)
    if w.numel() == 0:
        return mask
    kept = mask if mask.is_contiguous() else torch.empty(w.shape, dtype=torch.bool, device=w.device)
    columns = w.shape[-1] // 4
    block = min(TILES, triton.next_power_of_2(columns))
    across = triton.cdiv(columns, block)
    exact = algorithm == "exact"
    launch(
        tiles_kernel, across * (w.numel() // (16 * columns)), w.device,
        w.contiguous(), kept.view(torch.int32), columns, across, row_words(w.device),
        EXACT=exact, NETWORK=() if exact else network(16), BLOCK=block, num_warps=2,
    )  # fmt: skip
    return mask if kept is mask else mask.copy_(kept)


@triton.jit
def pair_sums(row, unit):
    """The sums of a row's magnitudes times `unit` for the six cpu.PAIRS; NaN counts as Inf."""
    a0, a1, a2, a3 = finite(row[0]), finite(row[1]), finite(row[2]), finite(row[3])
    a0, a1, a2, a3 = a0 * unit, a1 * unit, a2 * unit, a3 * unit
    return a0 + a1, a0 + a2, a0 + a3, a1 + a2, a1 + a3, a2 + a3


@triton.jit
def largest(row):
    """The largest magnitude of a row, as fp32 bits."""
    a0, a1 = magnitude(row[0].to(tl.float32)), magnitude(row[1].to(tl.float32))
    a2, a3 = magnitude(row[2].to(tl.float32)), magnitude(row[3].to(tl.float32))
    return tl.maximum(tl.maximum(a0, a1), tl.maximum(a2, a3))


@triton.jit
def finite(a):
    bits = magnitude(a.to(tl.float32))
    return tl.minimum(bits, 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def best_place(r0, r1, r2, r3):
    """The pattern that cpu.exact chooses, as 36 * upper half + lower half.

    Takes four rows of four magnitudes. It finds the best upper and lower half of each of the 19
    classes, and then the best class; a tie goes to the smaller result.
    """
    top = tl.maximum(tl.maximum(largest(r0), largest(r1)), tl.maximum(largest(r2), largest(r3)))
    unit = tl.where(top >= LARGE, 0.125, 1.0)
    s0, s1 = pair_sums(r0, unit), pair_sums(r1, unit)
    s2, s3 = pair_sums(r2, unit), pair_sums(r3, unit)

    # All (i, 5-i).
    upper, lower = s0[0] + s1[5], s2[5] + s3[0]
    place_upper = tl.full(upper.shape, 36 * 5, tl.int32)
    place_lower = tl.full(upper.shape, 30, tl.int32)
    for i in tl.static_range(1, 6):
        u, v = s0[i] + s1[5 - i], s2[5 - i] + s3[i]
        place_upper = tl.where(u > upper, 36 * (5 * i + 5), place_upper)
        place_lower = tl.where(v >= lower, 30 - 5 * i, place_lower)
        upper, lower = tl.maximum(upper, u), tl.maximum(lower, v)
    scores, places = (upper + lower,), (place_upper + place_lower,)

    for i in tl.static_range(6):
        # (i, i), and (i, j) with (j, i) where i and j share one column.
        scores += ((s0[i] + s1[i]) + (s2[5 - i] + s3[5 - i]),)
        places += (tl.full(upper.shape, 245 * i + 35, tl.int32),)
        for j in tl.static_range(6):
            if i < j and i + j != 5:
                upper, other = s0[i] + s1[j], s0[j] + s1[i]
                p = tl.where(other > upper, 36 * (6 * j + i), 36 * (6 * i + j))
                upper = tl.maximum(upper, other)
                lower, other = s2[5 - i] + s3[5 - j], s2[5 - j] + s3[5 - i]
                p += tl.where(other >= lower, 35 - 6 * j - i, 35 - 6 * i - j)
                scores += (upper + tl.maximum(lower, other),)
                places += (p,)
    best = scores[0]
    for i in tl.static_range(1, 19):
        best = tl.maximum(best, scores[i])
    place = tl.where(scores[0] == best, places[0], 1296)
    for i in tl.static_range(1, 19):
        place = tl.where(scores[i] == best, tl.minimum(place, places[i]), place)
    return place


@triton.jit
def tiles_kernel(
    w, mask, columns, across, words,
    EXACT: tl.constexpr, NETWORK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile_row = (tl.program_id(0) // across).to(tl.int64)
    first = (tl.program_id(0) % across) * BLOCK
    rows = ()  # of BLOCK tiles: four of four tensors `[BLOCK]`
    for i in tl.static_range(4):
        at = w + tile_row * 16 * columns + 4 * i * columns + 4 * first
        rows += (load_groups(at, 0, columns - first, 1, BLOCK, True),)
    found = best_place(rows[0], rows[1], rows[2], rows[3]) if EXACT else greedy_bits(rows, NETWORK)
    at = first + tl.arange(0, BLOCK)
    out = mask + tile_row * 4 * columns + at
    for r in tl.static_range(4):
        word = tl.load(words + 4 * found + r) if EXACT else row_word(found, r)
        tl.store(out + r * columns, word, mask=at < columns)


@triton.jit
def greedy_bits(rows, NETWORK: tl.constexpr):
    """The entries that cpu.scan keeps, one bit each: visited from the largest magnitude down, the
    lower index first in a tie.

    A row is one bit, every fourth from bit 16 down, and a column one bit from bit 3 down; their
    product is the entry's bit out of sixteen.
    """
    keys = ()
    for r in tl.static_range(4):
        for c in tl.static_range(4):
            keys += (key(rows[r][c], (1 << 16 - 4 * r) | (8 >> c)),)
    keys = descending(keys, NETWORK)
    one = tl.zeros(rows[0][0].shape, tl.int32)  # rows and columns that hold at least one entry
    two = tl.zeros(rows[0][0].shape, tl.int32)  # those that are full
    taken = tl.zeros(rows[0][0].shape, tl.int32)
    for i in tl.static_range(16):
        place = place_of(keys[i])
        place = tl.where(place & two == 0, place, 0)
        two |= one & place
        one |= place
        taken += (place >> 4) * (place & 15)
    return taken


@triton.jit
def row_word(taken, ROW: tl.constexpr):
    """A row's four bools as one word: bit 3, the first column, goes to the lowest byte."""
    return ((taken >> 12 - 4 * ROW & 15) * 0x08040201 >> 3) & 0x01010101


def check_nm(x: torch.Tensor, n: int, m: int, dim: int) -> torch.Tensor:
    if x.dtype not in checks.FLOATS:
        return cpu.check_nm(x, n, m, dim)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    groups = layout.as_groups(x, dim, m)
    rows, _, lanes = groups.shape
    near = lanes == 1 and m & (m - 1) == 0 and m <= CHECKED
    height, width = tile(lanes, CHECKED // m if near else CHECKED // 8)
    launch(
        check_kernel, triton.cdiv(rows, height) * triton.cdiv(lanes, width), x.device,
        groups, total, rows, lanes, n,
        M=m, ROWS=height, LANES=width, NEIGHBOURS=near,
    )  # fmt: skip
    return total


def tile(lanes: int, size: int) -> tuple[int, int]:
    """Rows and lanes of a tile with `size` elements (a power of two) of `[rows, lanes]`. The lanes
    divide a row evenly unless the pieces would become too short."""
    width = math.gcd(lanes, size)
    if width < min(64, size):
        width = min(triton.next_power_of_2(lanes), size)
    return size // width, width


@triton.jit
def check_kernel(
    x, total, rows, lanes, n,
    M: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, NEIGHBOURS: tl.constexpr,
):  # fmt: skip
    """Add to `total` the groups with more than n non-zeros in a tile of `[rows, M, lanes]`."""
    if NEIGHBOURS:
        first = tl.program_id(0).to(tl.int64) * ROWS
        at = first * M + tl.arange(0, ROWS * M)
        inside = at < tl.cast(rows, tl.int64) * M
        nonzero = magnitude(tl.load(x + at, mask=inside, other=0)) != 0
        found = tl.sum(tl.reshape(nonzero.to(tl.int32), [ROWS, M]), 1)
    else:
        across = tl.cdiv(lanes, LANES)
        row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        lane = tl.program_id(0) % across * LANES + tl.arange(0, LANES)[None, :]
        at, inside = row * M * lanes + lane, (row < rows) & (lane < lanes)
        found = tl.zeros([ROWS, LANES], tl.int32)
        for _ in range(M):
            nonzero = magnitude(tl.load(x + at, mask=inside, other=0)) != 0
            found += nonzero.to(tl.int32)
            at += lanes
        found = tl.reshape(found, [ROWS * LANES])
    tl.atomic_add(total, tl.sum((found > n).to(tl.int32), 0).to(tl.int64))


def flips(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    if not old.dtype == new.dtype == torch.bool:
        return cpu.flips(old, new)
    order = layout.memory_order(old)  # `new` in the same order, a view if its layout is the same
    old, new = (t.permute(order).contiguous().view(-1) for t in (old, new))
    words = len(old) // 4
    total = cpu.flips(old[4 * words :], new[4 * words :])
    if words:
        cut = (t[: 4 * words] for t in (old, new))
        old, new = ((t.clone() if t.storage_offset() % 4 else t).view(torch.int32) for t in cut)
        launch(
            flips_kernel, triton.cdiv(words, CHECKED // 2), old.device, old, new, total, words,
            BLOCK=CHECKED // 16,
        )  # fmt: skip
    return total


@triton.jit
def flips_kernel(old, new, total, words, BLOCK: tl.constexpr):
    """Add the number of bools that differ to `total`; each word holds four of them, whose bytes are
    summed, then the halves."""
    start = tl.program_id(0).to(tl.int64) * (8 * BLOCK)
    at = start + (BLOCK * tl.arange(0, 8)[:, None] + tl.arange(0, BLOCK)[None, :])
    a = tl.load(old + at, mask=at < words, other=0)
    b = tl.load(new + at, mask=at < words, other=0)
    four = tl.sum(a ^ b, 0)
    two = tl.sum((four & 0x00FF00FF) + (four >> 8 & 0x00FF00FF), 0)
    tl.atomic_add(total, ((two & 0xFFFF) + (two >> 16)).to(tl.int64))
