"""Hard masks in Triton, bit for bit those of naive.py."""

import torch
import triton
import triton.language as tl

from common_kernels import chunks
from common_kernels.launch import BLOCK, keep24, launch, load_groups, magnitude, store_groups
from common_kernels.masks import naive

LARGEST_M = 32  # a thread holds a whole group
TILES = 256  # 4x4 tiles in a program of two warps: the fastest on an H200, four to a thread


def nm_mask(x: torch.Tensor, n: int, m: int, dim: int) -> torch.Tensor:
    if m > LARGEST_M:
        return naive.nm_mask(x, n, m, dim)
    mask = torch.empty_like(x, dtype=torch.bool)
    if x.numel() == 0:
        return mask
    groups, kept = chunks.as_groups(x, dim, m), chunks.as_groups(mask, dim, m)
    lanes, count = groups.shape[-1], groups.numel() // m
    arguments = (groups, kept.view(torch.uint8), count, lanes)
    if (n, m) == (2, 4):
        launch(
            mask24_kernel, triton.cdiv(count, BLOCK), x.device, *arguments,
            BLOCK=BLOCK, NEIGHBOURS=lanes == 1,
        )  # fmt: skip
    else:
        size = max(128, 2 * BLOCK // triton.next_power_of_2(m))
        launch(mask_kernel, triton.cdiv(count, size), x.device, *arguments, N=n, M=m, BLOCK=size)
    return mask


@triton.jit
def mask24_kernel(x, mask, count, lanes, BLOCK: tl.constexpr, NEIGHBOURS: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    a0, a1, a2, a3 = load_groups(x, start, count, lanes, BLOCK, NEIGHBOURS)
    k0, k1, k2, k3 = keep24(magnitude(a0), magnitude(a1), magnitude(a2), magnitude(a3))
    store_groups(mask, k0, k1, k2, k3, start, count, lanes, BLOCK, NEIGHBOURS)


@triton.jit
def mask_kernel(x, mask, count, lanes, N: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr):
    """An entry is kept if it wins at least M-N of its M-1 duels; the lower index wins a draw."""
    q = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = (q // lanes) * (M * lanes) + q % lanes
    inside = q < count
    entries = ()
    for i in tl.static_range(M):
        entries += (magnitude(tl.load(x + at + i * lanes, mask=inside, other=0)),)
    for i in tl.static_range(M):
        wins = tl.zeros([BLOCK], tl.int32)
        for j in tl.static_range(M):
            if i < j:
                wins += (entries[i] >= entries[j]).to(tl.int32)
            elif i > j:
                wins += (entries[i] > entries[j]).to(tl.int32)
        tl.store(mask + at + i * lanes, (wins >= M - N).to(tl.uint8), mask=inside)


def transposable_mask24(w: torch.Tensor, algorithm: str) -> torch.Tensor:
    if algorithm == "two_approx":  # a baseline without a kernel of its own
        return naive.transposable_mask24(w, algorithm)
    mask = torch.empty_like(w, dtype=torch.bool)
    if w.numel() == 0:
        return mask
    kept = mask if mask.is_contiguous() else torch.empty(w.shape, dtype=torch.bool, device=w.device)
    columns = w.shape[-1] // 4
    block = min(TILES, triton.next_power_of_2(columns))
    across = triton.cdiv(columns, block)
    launch(
        {"exact": exact_kernel, "greedy": greedy_kernel}[algorithm],
        across * (w.numel() // (16 * columns)), w.device,
        w.contiguous(), kept.view(torch.int32), columns, across,
        naive.half_words(w.device), BLOCK=block, num_warps=2,
    )  # fmt: skip
    return mask if kept is mask else mask.copy_(kept)


@triton.jit
def load_tiles(w, tile_row, first, columns, BLOCK: tl.constexpr):
    """The magnitudes of BLOCK tiles of a tile row, as bits: four rows of four `[BLOCK]`."""
    row = w + tile_row * 16 * columns
    count = columns - first
    return (
        load_groups(row + 4 * first, 0, count, 1, BLOCK, True),
        load_groups(row + 4 * columns + 4 * first, 0, count, 1, BLOCK, True),
        load_groups(row + 8 * columns + 4 * first, 0, count, 1, BLOCK, True),
        load_groups(row + 12 * columns + 4 * first, 0, count, 1, BLOCK, True),
    )


@triton.jit
def pair_sums(row):
    """Sums of the six pairs of a row's magnitudes, in the order of naive.PAIRS; NaN as Inf."""
    a0, a1, a2, a3 = finite(row[0]), finite(row[1]), finite(row[2]), finite(row[3])
    return a0 + a1, a0 + a2, a0 + a3, a1 + a2, a1 + a3, a2 + a3


@triton.jit
def finite(a):
    bits = magnitude(a.to(tl.float32))
    return tl.minimum(bits, 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def best_place(r0, r1, r2, r3):
    """naive.exact: the best upper and lower half of each of the 19 classes, then the best class.

    Takes four rows of four entries; returns 36 * upper half + lower half, the position of a pattern
    in the order of ties.
    """
    s0, s1, s2, s3 = pair_sums(r0), pair_sums(r1), pair_sums(r2), pair_sums(r3)

    # All (i, 5-i).
    upper, lower = s0[0] + s1[5], s2[5] + s3[0]
    place_upper = tl.full(upper.shape, 36 * 5, tl.int32)
    place_lower = tl.full(upper.shape, 30, tl.int32)
    for i in tl.static_range(1, 6):
        u, v = s0[i] + s1[5 - i], s2[5 - i] + s3[i]
        place_upper = tl.where(u > upper, 36 * (5 * i + 5), place_upper)
        place_lower = tl.where(v >= lower, 30 - 5 * i, place_lower)
        upper, lower = tl.maximum(upper, u), tl.maximum(lower, v)
    best, place = upper + lower, place_upper + place_lower

    for i in tl.static_range(6):
        # (i, i), and (i, j) with (j, i) where i and j share one column.
        best, place = better(best, place, (s0[i] + s1[i]) + (s2[5 - i] + s3[5 - i]), 245 * i + 35)
        for j in tl.static_range(6):
            if i < j and i + j != 5:
                upper, other = s0[i] + s1[j], s0[j] + s1[i]
                p = tl.where(other > upper, 36 * (6 * j + i), 36 * (6 * i + j))
                upper = tl.maximum(upper, other)
                lower, other = s2[5 - i] + s3[5 - j], s2[5 - j] + s3[5 - i]
                p += tl.where(other >= lower, 35 - 6 * j - i, 35 - 6 * i - j)
                best, place = better(best, place, upper + tl.maximum(lower, other), p)
    return place


@triton.jit
def exact_kernel(w, mask, columns, across, words, BLOCK: tl.constexpr):
    tile_row = (tl.program_id(0) // across).to(tl.int64)
    first = (tl.program_id(0) % across) * BLOCK
    r0, r1, r2, r3 = load_tiles(w, tile_row, first, columns, BLOCK)
    place = best_place(r0, r1, r2, r3)
    at = first + tl.arange(0, BLOCK)
    out = mask + tile_row * 4 * columns + at
    for r in tl.static_range(4):
        tl.store(out + r * columns, tl.load(words + 4 * place + r), mask=at < columns)


@triton.jit
def better(best, place, score, candidate):
    wins = (score > best) | ((score == best) & (candidate < place))
    return tl.maximum(best, score), tl.where(wins, candidate, place)


@triton.jit
def greedy_kernel(w, mask, columns, across, words, BLOCK: tl.constexpr):
    """naive.greedy: sixteen times the largest magnitude not yet seen, the lower index in a draw."""
    tile_row = (tl.program_id(0) // across).to(tl.int64)
    first = (tl.program_id(0) % across) * BLOCK
    rows = load_tiles(w, tile_row, first, columns, BLOCK)
    keys = ()
    for r in tl.static_range(4):
        for c in tl.static_range(4):
            keys += ((magnitude(rows[r][c]).to(tl.int64) << 4) + (15 - 4 * r - c),)
    in_rows = tl.zeros([BLOCK], tl.int32)  # a count of four bits for each row
    in_columns = tl.zeros([BLOCK], tl.int32)
    taken = tl.zeros([BLOCK], tl.int32)
    for _ in tl.static_range(16):
        largest = keys[0]
        for i in tl.static_range(1, 16):
            largest = tl.maximum(largest, keys[i])
        index = 15 - (largest & 15).to(tl.int32)
        row, column = 4 * (index >> 2), 4 * (index & 3)
        free = ((in_rows >> row) & 15 < 2) & ((in_columns >> column) & 15 < 2)
        take = free.to(tl.int32)
        in_rows += take << row
        in_columns += take << column
        taken |= take << index
        left = ()
        for i in tl.static_range(16):
            left += (tl.where(keys[i] == largest, -1, keys[i]),)
        keys = left
    at = first + tl.arange(0, BLOCK)
    out = mask + tile_row * 4 * columns + at
    for r in tl.static_range(4):
        b = taken >> 4 * r
        word = (b & 1) | ((b & 2) << 7) | ((b & 4) << 14) | ((b & 8) << 21)
        tl.store(out + r * columns, word, mask=at < columns)
