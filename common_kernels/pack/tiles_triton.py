# mypy: ignore-errors
"""Packing of a matrix and of its transpose in one read, by tiles of 4 x 4 entries, in Triton."""

import functools

import torch
import triton
import triton.language as tl

from common_kernels.launch import cast, launch, split_groups
from common_kernels.masks.cpu import four_rows
from common_kernels.masks.triton import best_place
from common_kernels.pack.cpu import choose
from common_kernels.pack.triton import bools, entries_stored, is_bits, order_of, split, store_meta


def pack_both(
    w: torch.Tensor,
    mask: torch.Tensor | None,
    dtype: torch.dtype,
    buffers: tuple[torch.Tensor | None, torch.Tensor],
    layouts: tuple[str, str],
) -> None:
    """Pack w [64 a, 64 b] and its transpose into two buffers under a transposable mask, the given
    one, else the best, in one read. Without a first buffer only the transpose. dtype: 16-bit."""
    rows, columns = w.shape
    orders = [order_of(layout, dtype) for layout in layouts]
    first, second = buffers
    parts = [split(b, w.numel(), dtype) for b in (second if first is None else first, second)]
    launch(
        pack_both_kernel, rows // 64 * (columns // 64), w.device,
        w, w if mask is None else mask.view(torch.uint8),
        pattern_nibbles(w.device),
        *parts[0], *parts[1], rows, columns,
        SEARCH=mask is None, BITS=is_bits(mask), FIRST=first is not None,
        ORDER=orders[0], ORDER_T=orders[1],
        num_warps=8 if mask is not None else 2 if w.element_size() == 4 else 4,
    )  # fmt: skip


@functools.cache
def pattern_nibbles(device: torch.device) -> torch.Tensor:
    """`[1296]` int32, in the order of `four_rows`: the nibbles of each pattern's rows, the first
    row's lowest, then those of its columns."""
    bools = four_rows()
    positions = choose(torch.cat([bools, bools.transpose(1, 2)], 1))
    nibbles = positions[..., 0] | positions[..., 1] << 2
    return (nibbles << 4 * torch.arange(8)).sum(1).to(torch.int32).to(device)


@triton.jit
def load_row(base, row, columns, first):
    """Load row `row` of each of 16 x 16 tiles: four tensors `[256]`."""
    at = tl.arange(0, 1024)
    # A thread loads four entries, although 16 bytes may hold eight: a tile then stays in the thread
    # that looks up its pattern.
    at = (row + 4 * (at // 64)) * columns + first + tl.max_contiguous(at % 64, 4)
    return split_groups(tl.load(base + at), 2)


@triton.jit
def pack_both_kernel(
    w, mask, patterns, values, meta, values_t, meta_t, rows, columns,
    SEARCH: tl.constexpr, BITS: tl.constexpr, FIRST: tl.constexpr, ORDER: tl.constexpr,
    ORDER_T: tl.constexpr,
):  # fmt: skip
    """Pack a 64 x 64 block, with FIRST, and its transpose: 16 x 16 tiles, two for each thread."""
    across = columns // 64
    top = (tl.program_id(0) // across).to(tl.int64) * 64
    left = (tl.program_id(0) % across).to(tl.int64) * 64
    a, k = (), ()
    for i in tl.static_range(4):
        a += (load_row(w, top + i, columns, left),)
    pairs, nibbles, pairs_t, nibbles_t = (), (), (), ()
    if SEARCH:
        pattern = tl.load(patterns + best_place(a[0], a[1], a[2], a[3]))
        for i in tl.static_range(4):
            nibble = pattern >> 4 * i & 15
            pairs += (entries_at(a[i][0], a[i][1], a[i][2], a[i][3], nibble),)
            nibbles += (nibble,)
            nibble = pattern >> 16 + 4 * i & 15
            pairs_t += (entries_at(a[0][i], a[1][i], a[2][i], a[3][i], nibble),)
            nibbles_t += (nibble,)
    else:
        for i in tl.static_range(4):
            k += (load_kept(mask, top + i, columns, left, BITS),)
        a_t, k_t = columns_of(a), columns_of(k)
        for i in tl.static_range(4):  # a row and a column in turns, as they share their entries
            pair, nibble = entries_stored(a[i][0], a[i][1], a[i][2], a[i][3], k[i])
            pairs += (pair,)
            nibbles += (nibble,)
            pair, nibble = entries_stored(a_t[i][0], a_t[i][1], a_t[i][2], a_t[i][3], k_t[i])
            pairs_t += (pair,)
            nibbles_t += (nibble,)
    if FIRST:
        store_tiles(values, meta, pairs, nibbles, top, left, rows, columns, ORDER)
    store_tiles(values_t, meta_t, pairs_t, nibbles_t, top, left, rows, columns, ORDER_T, True)


@triton.jit
def stack(tiles):
    """Join four tensors `[256, ...]`, one for each row (or column) of a tile, into `[16 tile rows,
    16 tile columns, 1 or 2, 4]`."""
    joined = tl.join(tl.join(tiles[0], tiles[2]), tl.join(tiles[1], tiles[3]))
    return tl.reshape(joined, [16, 16, joined.numel // 1024, 4])


@triton.jit
def columns_of(a):
    """The four columns of tiles from their four rows, each four tensors."""
    return (
        (a[0][0], a[1][0], a[2][0], a[3][0]), (a[0][1], a[1][1], a[2][1], a[3][1]),
        (a[0][2], a[1][2], a[2][2], a[3][2]), (a[0][3], a[1][3], a[2][3], a[3][3]),
    )  # fmt: skip


@triton.jit
def tiles_stored(a, k):
    """The stored pairs of the four rows (or columns) of tiles, and their nibbles. a, k: their
    entries and whether each is kept."""
    pairs, nibbles = (), ()
    for i in tl.static_range(4):
        pair, nibble = entries_stored(a[i][0], a[i][1], a[i][2], a[i][3], k[i])
        pairs += (pair,)
        nibbles += (nibble,)
    return pairs, nibbles


@triton.jit
def store_tiles(
    values, meta, pairs, nibbles, top, left, rows, columns, ORDER: tl.constexpr,
    TURNED: tl.constexpr = False,
):  # fmt: skip
    """Store the packed 64 x 64 block at (top, left) of a matrix [rows, columns], from the pairs and
    nibbles of the tiles' four rows, each `[256, ...]`; with TURNED the block in the transpose, from
    those of the four columns. What is stored together moves between threads together, as each move
    waits for all warps."""
    pairs, nibbles = stack(pairs), stack(nibbles)
    if TURNED:
        pairs, nibbles = tl.permute(pairs, 1, 3, 0, 2), tl.permute(nibbles, 1, 3, 0, 2)
        top, left, rows, columns = left, top, columns, rows
    else:
        pairs, nibbles = tl.permute(pairs, 0, 3, 1, 2), tl.permute(nibbles, 0, 3, 1, 2)
    r = top + tl.arange(0, 64)[:, None]
    at = r * (columns // 2) + left // 2 + tl.arange(0, 32)[None, :]
    tl.store(values + at, cast(tl.reshape(pairs, [64, 32]), values.dtype.element_ty))
    nibbles = tl.reshape(nibbles, [64, 16])
    store_meta(meta, nibbles, top // 64, left // 4, rows, columns, ORDER, 16)


@triton.jit
def load_kept(mask, row, columns, first, BITS: tl.constexpr):
    """Load the mask's flags of the entries that `load_row` loads."""
    if BITS:
        tile = tl.arange(0, 256)
        at = (row + 4 * (tile // 16)) * columns + first + 4 * (tile % 16)
        four = tl.load(mask + at // 8).to(tl.int32) >> 4 * (tile % 2)
        kept = (four & 1) != 0, (four & 2) != 0, (four & 4) != 0, (four & 8) != 0
    else:
        kept = bools(load_row(mask, row, columns, first))
    return kept


@triton.jit
def entries_at(a0, a1, a2, a3, nibble):
    """The two entries at a nibble's positions, joined in the last dim."""
    one = tl.where(nibble & 1 != 0, a1, tl.where(nibble & 2 != 0, a2, a0))
    other = tl.where(nibble & 8 != 0, tl.where(nibble & 4 != 0, a3, a2), a1)
    return tl.join(one, other)
