"""Compressed 2:4 matrices in plain PyTorch.

A 2:4 matrix [rows, columns] keeps two entries i0 < i1 of each group of four along its columns. Its
values are stored row-major, `[rows, columns / 2]`; the positions of a group are the nibble i0 |
i1 << 2. Layouts differ in the order of the nibbles alone: each is one function from a group to the
address of its nibble, packing scatters by it and unpacking gathers. Address 2b is the low half of
byte b, and 2b + 1 the high half; words are little-endian.

Entries are moved as integers, so that all of their bits survive: signs of zeros, payloads of NaNs.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

BUFFERED = "cusparselt_sm90"  # the layout of one buffer, which cuSPARSELt takes
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def choose(mask: torch.Tensor) -> torch.Tensor:
    """Positions (i0, i1) of the two entries stored for each group, `[..., 2]` int64.

    Of a group with fewer than two kept entries, one that is not kept is stored, as a zero: beside
    entry 0 and 1 that is 2, beside 2 it is 3, beside 3 it is 2, and of an empty group 2 and 3, as
    torch's packer has it. mask: bool `[..., 4]` with at most two True.
    """
    k0, k1, _, k3 = mask.unbind(-1)
    third = k3 | ~(k0 | k1)  # the last place is taken by the second of the two
    first = (~k0).long() * (1 + (~k1).long())
    second = 1 + (~(k0 & k1)).long() + third.long()
    return torch.stack([first, second], -1)


def encode(mask: torch.Tensor) -> torch.Tensor:
    """Nibbles `[rows, columns / 4]` (uint8) of a mask `[rows, columns]`."""
    first, second = choose(as_groups(mask)).unbind(-1)
    return (first | second << 2).to(torch.uint8)


def compress(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values `[rows, columns / 2]` and nibbles `[rows, columns / 4]` (uint8) of x where mask."""
    nibbles = encode(mask)
    bits = x.view(INTEGERS[x.element_size()]).masked_fill(~mask, 0)
    return as_groups(bits).gather(-1, positions(nibbles)).flatten(-2).view(x.dtype), nibbles


def expand(values: torch.Tensor, nibbles: torch.Tensor) -> torch.Tensor:
    """The matrix `[rows, columns]`, with +0 where nothing is stored."""
    bits = values.contiguous().view(INTEGERS[values.element_size()]).view(*nibbles.shape, 2)
    dense = bits.new_zeros(*nibbles.shape, 4)
    return dense.scatter_(-1, positions(nibbles), bits).flatten(-2).view(values.dtype)


def mask_of(nibbles: torch.Tensor) -> torch.Tensor:
    """The bool mask `[rows, columns]` of the stored entries, two in each group."""
    mask = torch.zeros(*nibbles.shape, 4, dtype=torch.bool, device=nibbles.device)
    return mask.scatter_(-1, positions(nibbles), True).flatten(-2)


def positions(nibbles: torch.Tensor) -> torch.Tensor:
    """(i0, i1) `[..., 2]` int64 of nibbles `[...]`."""
    return torch.stack([nibbles & 3, nibbles >> 2], -1).long()


def as_groups(x: torch.Tensor) -> torch.Tensor:
    """`[..., columns]` to `[..., columns / 4, 4]`."""
    return x.unflatten(-1, (x.shape[-1] // 4, 4))


# --- the order of the metadata ------------------------------------------------------------------


def grid(rows: int, columns: int, device: torch.device | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The number r of each row, `[rows, 1]`, and g of each group, `[columns / 4]`."""
    return (
        torch.arange(rows, device=device)[:, None],
        torch.arange(columns // 4, device=device),
    )


def neutral_order(
    rows: int, columns: int, itemsize: int, device: torch.device | None = None
) -> torch.Tensor:
    """Address of the nibble of each group, `[rows, columns / 4]`: row by row, in whole bytes.

    Read as words of any length this is TileLang's row-major metadata.
    """
    r, g = grid(rows, columns, device)
    return -(-columns // 8) * 2 * r + g


def cutlass_sm80_order(
    rows: int, columns: int, itemsize: int, device: torch.device | None = None
) -> torch.Tensor:
    """The same for CUTLASS on compute capability 8.x, as in torch's own 2:4 operators.

    Words of 16 bits (32 for one-byte types) hold consecutive groups of a row. Pairs of columns of
    words are stored one after the other; within a pair, 32 (16) rows at a time.
    """
    r, g = grid(rows, columns, device)
    groups = 8 // itemsize  # in a word
    c = g // groups
    word = 2 * rows * (c // 2) + 2 * (c % 2) + r // 8 % 2
    if itemsize == 2:
        word = word + 8 * (r % 8) + 4 * (r // 16 % 2) + 64 * (r // 32)
    else:
        word = word + 4 * (r % 8) + 32 * (r // 16)
    return groups * word + g % groups


def cutlass_sm90_order(
    rows: int, columns: int, itemsize: int, device: torch.device | None = None
) -> torch.Tensor:
    """The same for CUTLASS on compute capability 9.0, for kernels that take 64 columns at a time,
    or with one-byte types 128 or more.

    One-byte types: 16 bytes of each row, for all rows, then the next 128 columns.
    """
    if itemsize == 2:
        return _cutlass_sm90_blocks(rows, columns, 2, device)
    r, g = grid(rows, columns, device)
    return 32 * (r + rows * (g // 32)) + g % 32


def cutlass_sm90_k128_order(
    rows: int, columns: int, itemsize: int, device: torch.device | None = None
) -> torch.Tensor:
    """The same for kernels that take 128 columns of a two-byte type at a time."""
    return _cutlass_sm90_blocks(rows, columns, 4, device)


def _cutlass_sm90_blocks(
    rows: int, columns: int, tiles: int, device: torch.device | None
) -> torch.Tensor:
    """Blocks of 64 rows by so many tiles of 32 columns, along the rows first, as CUTLASS'
    `Sm90GemmSparseConfig` lays them out for two-byte types."""
    r, g = grid(rows, columns, device)
    inside = g % 4 + 4 * (r // 8 % 2) + 8 * (g // 8 % tiles)
    inside = inside + 8 * tiles * (r % 8 + 8 * (g // 4 % 2) + 16 * (r // 16 % 4))
    return inside + 512 * tiles * (r // 64 + rows // 64 * (g // (8 * tiles)))


def cusparselt_sm90_order(
    rows: int, columns: int, itemsize: int, device: torch.device | None = None
) -> torch.Tensor:
    """The same for cuSPARSELt on compute capability 9.0: blocks of 64 rows by 32 columns (64 for
    one-byte types), along the columns first, of which the last may be a part.

    As read off an H200 with cuSPARSELt 0.8.0 (`python -m experiments.bench probe`); NVIDIA does not
    document it.
    """
    r, g = grid(rows, columns, device)
    if itemsize == 2:
        inside = 4 * (g % 2) + 8 * (g // 2 % 2) + 2 * (g // 4 % 2) + 512 * (g // 8)
        inside = inside + 16 * (r % 8) + r // 8 % 2 + 128 * (r // 16 % 4)
        stripe = 512 * -(-columns // 32)
    else:
        inside = g % 2 + 8 * (g // 2 % 4) + 4 * (g // 8 % 2) + 1024 * (g // 16)
        inside = inside + 32 * (r % 8) + 2 * (r // 8 % 2) + 256 * (r // 16 % 4)
        stripe = 1024 * -(-columns // 64)
    return inside + stripe * (r // 64)


class Form(NamedTuple):
    """Demands of a layout on a matrix, and the words of its metadata."""

    rows: int  # a multiple of this
    columns: int
    word: torch.dtype
    block: int  # columns of which the metadata come together, those that are not there included

    def row_bytes(self, columns: int) -> int:
        """Bytes of metadata for a row."""
        return (columns + self.block - 1) // self.block * self.block // 8


class Layout(NamedTuple):
    order: Callable[..., torch.Tensor]
    forms: dict[int, Form]  # by the bytes of a value; others have no place
    missing: int = 0  # the nibble of groups that are not there


LAYOUTS = {
    "neutral": Layout(neutral_order, dict.fromkeys(INTEGERS, Form(1, 4, torch.uint8, 8))),
    "cutlass_sm80": Layout(
        cutlass_sm80_order, {1: Form(16, 128, torch.int32, 128), 2: Form(32, 64, torch.int16, 64)}
    ),
    "cutlass_sm90": Layout(
        cutlass_sm90_order,
        {1: Form(64, 128, torch.uint8, 128), 2: Form(64, 64, torch.uint8, 64)},
    ),
    "cutlass_sm90_k128": Layout(cutlass_sm90_k128_order, {2: Form(64, 128, torch.uint8, 128)}),
    "cusparselt_sm90": Layout(
        cusparselt_sm90_order,
        {1: Form(64, 64, torch.uint8, 64), 2: Form(64, 16, torch.uint8, 32)},
        missing=0b1110,  # as of an empty group
    ),
}


def buffer_bytes(rows: int, columns: int, dtype: torch.dtype, layout: str = BUFFERED) -> int:
    """Bytes of the values and the metadata of a matrix."""
    form = LAYOUTS[layout].forms[dtype.itemsize]
    return rows * (columns // 2 * dtype.itemsize + form.row_bytes(columns))


def scatter(nibbles: torch.Tensor, layout: str, itemsize: int) -> torch.Tensor:
    """Metadata bytes, flat, of nibbles `[rows, columns / 4]`."""
    rows, columns = nibbles.shape[0], 4 * nibbles.shape[1]
    order, forms, missing = LAYOUTS[layout]
    meta = nibbles.new_full((2 * rows * forms[itemsize].row_bytes(columns),), missing)
    meta[order(rows, columns, itemsize, nibbles.device).flatten()] = nibbles.flatten()
    return meta[::2] | meta[1::2] << 4


def gather(meta: torch.Tensor, rows: int, columns: int, layout: str, itemsize: int) -> torch.Tensor:
    """Nibbles `[rows, columns / 4]` that stand in metadata bytes, flat."""
    order = LAYOUTS[layout].order(rows, columns, itemsize, meta.device)
    return torch.stack([meta & 15, meta >> 4], -1).flatten()[order]


def pack(x: torch.Tensor, mask: torch.Tensor, layout: str) -> torch.Tensor:
    """One buffer of bytes: the values of x [rows, columns], then its metadata."""
    values, nibbles = compress(x, mask)
    meta = scatter(nibbles, layout, x.element_size())
    return torch.cat([values.flatten().view(torch.uint8), meta])
