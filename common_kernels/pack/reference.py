"""Packed 2:4 matrices by definition; the tests compare every packer with them.

Values are `[rows, columns / 2]`: two entries i0 < i1 of each group of four columns. The positions
of a group are the nibble i0 | i1 << 2. A layout orders the nibbles and puts two of them in a byte,
the first in its low half.
"""

from collections.abc import Callable
from functools import partial

import torch

# The positions stored if fewer than two are kept; the others hold zeros. torch chooses the same.
FILLED_UP = {(): (2, 3), (0,): (0, 2), (1,): (1, 2), (2,): (2, 3), (3,): (2, 3)}


def compress(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The values `[rows, columns / 2]` and nibbles `[rows, columns / 4]` of x under mask."""
    rows, columns = x.shape
    values = torch.zeros(rows, columns // 2).to(x.dtype)
    nibbles = torch.zeros(rows, columns // 4, dtype=torch.uint8)
    for row, kept in enumerate(mask.view(rows, -1, 4).tolist()):
        for group, flags in enumerate(kept):
            places = tuple(i for i in range(4) if flags[i])
            first, second = FILLED_UP.get(places, places)
            nibbles[row, group] = first | second << 2
            for i, place in enumerate((first, second)):
                if place in places:
                    values[row, 2 * group + i] = x[row, 4 * group + place]
    return values, nibbles


def metadata(nibbles: torch.Tensor, layout: str, itemsize: int) -> torch.Tensor:
    """Nibbles `[rows, columns / 4]` as flat bytes in a layout, for values of `itemsize` bytes."""
    ordered = LAYOUTS[layout](nibbles, itemsize).flatten()
    return ordered[::2] | ordered[1::2] << 4


def neutral(nibbles: torch.Tensor, itemsize: int) -> torch.Tensor:
    """The nibbles row by row, in whole bytes."""
    return torch.nn.functional.pad(nibbles, (0, nibbles.shape[1] % 2))


def cutlass_sm80(nibbles: torch.Tensor, itemsize: int) -> torch.Tensor:
    """Words of 16 bits (32 for one-byte types) in the order that CUTLASS reads on compute
    capability 8.x: rows interleaved, off-diagonal words of each 2x2 exchanged, columns in pairs."""
    size, rows = 8 // itemsize, len(nibbles)
    words = nibbles.view(rows, -1, size)
    stripe, step = (32, 4) if itemsize == 2 else (16, 2)
    ordered = torch.empty_like(words).view(-1, size)
    for r in range(rows):
        for c in range(words.shape[1]):
            row, column = r // stripe * stripe + r % 8 * step + r % stripe // 8, c
            if row % 2 != column % 2:
                row, column = row ^ 1, column ^ 1
            ordered[2 * rows * (column // 2) + 2 * row + column % 2] = words[r, c]
    return ordered


def cutlass_sm90(nibbles: torch.Tensor, itemsize: int, tiles: int = 2) -> torch.Tensor:
    """The order of CUTLASS' `Sm90GemmSparseConfig`. One-byte types: 128 columns of all rows, then
    the next 128. Two-byte types: blocks of 64 rows by `tiles` tiles of 32 columns, along the rows
    first; inside a block the binary digits of row and group are permuted.
    """
    if itemsize == 1:
        return nibbles.view(len(nibbles), -1, 32).transpose(0, 1).contiguous()
    # rows: block, r5 r4, r3, r2 r1 r0; groups: block, tile, g2, g1 g0
    digits = nibbles.view(len(nibbles) // 64, 4, 2, 8, -1, tiles, 2, 4)
    return digits.permute(4, 0, 1, 6, 3, 5, 2, 7).contiguous()


def cusparselt_sm90(nibbles: torch.Tensor, itemsize: int) -> torch.Tensor:
    """Blocks of 64 rows by 32 columns (64 for one-byte types), along the columns first, the last
    padded with empty groups; inside a block the binary digits of row and group are permuted, as
    determined on an H200 with cuSPARSELt 0.8.0.
    """
    missing = -nibbles.shape[1] % (16 // itemsize)
    nibbles = torch.nn.functional.pad(nibbles, (0, missing), value=0b1110)
    blocks, groups = len(nibbles) // 64, nibbles.shape[1]
    if itemsize == 2:  # rows: block, r5 r4, r3, r2 r1 r0; groups: tile, g2, g1, g0
        digits = nibbles.view(blocks, 4, 2, 8, groups // 8, 2, 2, 2)
        return digits.permute(0, 4, 1, 3, 6, 7, 5, 2).contiguous()
    digits = nibbles.view(blocks, 4, 2, 8, groups // 16, 2, 4, 2)  # groups: tile, g3, g2 g1, g0
    return digits.permute(0, 4, 1, 3, 6, 5, 2, 7).contiguous()


LAYOUTS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "neutral": neutral,
    "cutlass_sm80": cutlass_sm80,
    "cutlass_sm90": cutlass_sm90,
    "cutlass_sm90_k128": partial(cutlass_sm90, tiles=4),  # blocks of 128 columns
    "cusparselt_sm90": cusparselt_sm90,
}
