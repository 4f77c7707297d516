"""Packed 2:4 matrices in plain PyTorch.

A 2:4 matrix [rows, columns] keeps two entries i0 < i1 of each group of four along a row. Its values
are stored row-major, `[rows, columns / 2]`; the positions of a group are the nibble i0 | i1 << 2.
Layouts differ only in the order of the nibbles. Each is a function from a group to the address of
its nibble: packing scatters by it and unpacking gathers. Address 2b is the low half of byte b, and
2b + 1 the high half; words are little-endian.

Entries are moved as integers, so that all their bits survive, even signs of zeros and NaN payloads.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from common_kernels.pack import cusparselt

BUFFERED = "cusparselt_sm90"  # cuSPARSELt's layout, always in one buffer
# The layout of cuSPARSELt's own compressor, whatever that is on a device: nothing else writes or
# reads it, and its size has room for what the library pads. On a CPU, where it is emulated, the
# order is that of BUFFERED.
VENDOR = "cusparselt"
ROOM = 256  # rows and columns whose metadata are counted whole in VENDOR
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def choose(mask: torch.Tensor) -> torch.Tensor:
    """Positions (i0, i1) of the two entries stored for each group, `[..., 2]` int64.

    mask: bool `[..., 4]` with at most two True. A group with fewer than two kept entries also
    stores entries that are not kept, as zeros: entry 2 beside 0, 1 or 3, entry 3 beside 2, and 2
    and 3 in an empty group. torch's packer chooses the same.
    """
    k0, k1, _, k3 = mask.unbind(-1)
    third = k3 | ~(k0 | k1)  # i1 is 3
    first = (~k0).long() * (1 + (~k1).long())
    second = 1 + (~(k0 & k1)).long() + third.long()
    return torch.stack([first, second], -1)


def encode(mask: torch.Tensor) -> torch.Tensor:
    """The nibbles `[rows, columns / 4]` (uint8) of a mask `[rows, columns]`."""
    first, second = choose(as_groups(mask)).unbind(-1)
    return (first | second << 2).to(torch.uint8)


def compress(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The values `[rows, columns / 2]` and nibbles `[rows, columns / 4]` (uint8) of x under
    mask."""
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
    """The positions (i0, i1) in nibbles `[...]`: `[..., 2]` int64."""
    return torch.stack([nibbles & 3, nibbles >> 2], -1).long()


def as_groups(x: torch.Tensor) -> torch.Tensor:
    """View `[..., columns]` as `[..., columns / 4, 4]`."""
    return x.unflatten(-1, (x.shape[-1] // 4, 4))


# --- the order of the metadata ------------------------------------------------------------------


def grid(rows: int, columns: int, device: torch.device | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The index r of each row, `[rows, 1]`, and g of each group, `[columns / 4]`."""
    return (
        torch.arange(rows, device=device)[:, None],
        torch.arange(columns // 4, device=device),
    )


def neutral_order(
    rows: int, columns: int, itemsize: int, device: torch.device | None = None
) -> torch.Tensor:
    """The address of each group's nibble, `[rows, columns / 4]`: row by row, in whole bytes.

    Read as words of any length, this is TileLang's row-major metadata.
    """
    r, g = grid(rows, columns, device)
    return -(-columns // 8) * 2 * r + g


def cutlass_sm80_order(
    rows: int, columns: int, itemsize: int, device: torch.device | None = None
) -> torch.Tensor:
    """The addresses for CUTLASS on compute capability 8.x, as in torch's own 2:4 operators.

    Words of 16 bits (32 for one-byte types) hold consecutive groups of a row. Pairs of columns of
    words are stored one after the other; within a pair, 32 (16) rows at a time.
    """
    r, g = grid(rows, columns, device)
    groups = 8 // itemsize  # groups in a word
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
    """The addresses for CUTLASS on compute capability 9.0, for kernels that take 64 columns at a
    time, or 128 or more of a one-byte type.

    One-byte types: 128 columns (16 bytes) of all rows, then the next 128 columns.
    """
    if itemsize == 2:
        return _cutlass_sm90_blocks(rows, columns, 2, device)
    r, g = grid(rows, columns, device)
    return 32 * (r + rows * (g // 32)) + g % 32


def cutlass_sm90_k128_order(
    rows: int, columns: int, itemsize: int, device: torch.device | None = None
) -> torch.Tensor:
    """The addresses for CUTLASS' 9.0 kernels that take 128 columns of a two-byte type at a time."""
    return _cutlass_sm90_blocks(rows, columns, 4, device)


def _cutlass_sm90_blocks(
    rows: int, columns: int, tiles: int, device: torch.device | None
) -> torch.Tensor:
    """The addresses in blocks of 64 rows by `tiles` * 32 columns, ordered along the rows first, as
    in CUTLASS' `Sm90GemmSparseConfig` for two-byte types."""
    r, g = grid(rows, columns, device)
    inside = g % 4 + 4 * (r // 8 % 2) + 8 * (g // 8 % tiles)
    inside = inside + 8 * tiles * (r % 8 + 8 * (g // 4 % 2) + 16 * (r // 16 % 4))
    return inside + 512 * tiles * (r // 64 + rows // 64 * (g // (8 * tiles)))


def cusparselt_sm90_order(
    rows: int, columns: int, itemsize: int, device: torch.device | None = None
) -> torch.Tensor:
    """The addresses for cuSPARSELt on compute capability 9.0: blocks of 64 rows by 32 columns (64
    for one-byte types), ordered along the columns first; the last block may be partial.

    NVIDIA does not document this order. It was determined on an H200 with cuSPARSELt 0.8.0
    (docs/cusparselt.md).
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
    """The requirements of a layout on a matrix, and the words of its metadata."""

    rows: int  # the matrix's rows and columns must be multiples of these
    columns: int
    word: torch.dtype
    block: int  # columns per block of metadata; the last block is stored whole

    def row_bytes(self, columns: int) -> int:
        """The bytes of metadata per row."""
        return (columns + self.block - 1) // self.block * self.block // 8


class Layout(NamedTuple):
    order: Callable[..., torch.Tensor]
    forms: dict[int, Form]  # by the bytes of a value; other sizes are not supported
    missing: int = 0  # the nibble for groups beyond the matrix


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
        missing=0b1110,  # that of an empty group
    ),
}
LAYOUTS[VENDOR] = LAYOUTS[BUFFERED]


def buffer_bytes(rows: int, columns: int, dtype: torch.dtype, layout: str = BUFFERED) -> int:
    """The number of bytes of a matrix's values and metadata."""
    form = LAYOUTS[layout].forms[dtype.itemsize]
    if layout == VENDOR:
        blocks = ((rows + ROOM - 1) // ROOM) * ((columns + ROOM - 1) // ROOM)
        return rows * (columns // 2) * dtype.itemsize + blocks * (ROOM * ROOM // 8)
    return rows * (columns // 2 * dtype.itemsize + form.row_bytes(columns))


def scatter(nibbles: torch.Tensor, layout: str, itemsize: int) -> torch.Tensor:
    """The flat metadata bytes of nibbles `[rows, columns / 4]`."""
    rows, columns = nibbles.shape[0], 4 * nibbles.shape[1]
    order, forms, missing = LAYOUTS[layout]
    meta = nibbles.new_full((2 * rows * forms[itemsize].row_bytes(columns),), missing)
    meta[order(rows, columns, itemsize, nibbles.device).flatten()] = nibbles.flatten()
    return meta[::2] | meta[1::2] << 4


def gather(meta: torch.Tensor, rows: int, columns: int, layout: str, itemsize: int) -> torch.Tensor:
    """The nibbles `[rows, columns / 4]` in flat metadata bytes."""
    order = LAYOUTS[layout].order(rows, columns, itemsize, meta.device)
    return torch.stack([meta & 15, meta >> 4], -1).flatten()[order]


def pack(x: torch.Tensor, mask: torch.Tensor, layout: str) -> torch.Tensor:
    """One buffer of bytes: the packed values of x [rows, columns], then the metadata."""
    if layout == VENDOR:
        kept = x.view(INTEGERS[x.element_size()]).masked_fill(~mask, 0)
        return by_library(kept.view(x.dtype))
    values, nibbles = compress(x, mask)
    meta = scatter(nibbles, layout, x.element_size())
    return torch.cat([values.flatten().view(torch.uint8), meta])


def by_library(x: torch.Tensor, buffer: torch.Tensor | None = None) -> torch.Tensor:
    """The buffer in layout VENDOR, a new one if none is given, of a matrix x [rows, columns] that
    is 2:4 along its rows."""
    if buffer is None:
        size = buffer_bytes(x.shape[0], x.shape[1], x.dtype, VENDOR)
        buffer = torch.empty(size, dtype=torch.uint8, device=x.device)
    if x.is_cuda:
        cusparselt.compress(x, buffer)
    else:
        packed = pack(x, x.view(INTEGERS[x.element_size()]) != 0, BUFFERED)
        buffer[: len(packed)] = packed
    return buffer
