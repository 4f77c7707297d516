"""Packed 2:4 matrices in plain PyTorch.

A 2:4 matrix [rows, columns] keeps two entries i0 < i1 of each group of four along a row. Its values
are stored row-major, `[rows, columns / 2]`; the positions of a group are the nibble i0 | i1 << 2.
Layouts differ only in the order of the nibbles: the address of a nibble consists of the binary
digits of its row and group in another order. Packing scatters by it and unpacking gathers. Address
2b is the low half of byte b, and 2b + 1 the high half; words are little-endian.

Entries are moved as integers, so that all their bits survive, even signs of zeros and NaN payloads.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from common_kernels.pack import cusparselt

BUFFERED = "cusparselt_sm90"  # cuSPARSELt's layout, always in one buffer
# The layout of cuSPARSELt's own compressor, whatever that is on a device: nothing else writes or
# reads it, and its size has room for what the library pads. On a CPU the order is that of BUFFERED.
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


def compress(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x under mask: values `[rows, columns / 2]` and nibbles `[rows, columns / 4]` (uint8)."""
    places = choose(as_groups(mask))
    bits = x.view(INTEGERS[x.element_size()]).masked_fill(~mask, 0)
    nibbles = (places[..., 0] | places[..., 1] << 2).to(torch.uint8)
    return as_groups(bits).gather(-1, places).flatten(-2).view(x.dtype), nibbles


def expand(values: torch.Tensor, nibbles: torch.Tensor) -> torch.Tensor:
    """The matrix `[rows, columns]`, with +0 where nothing is stored."""
    bits = values.contiguous().view(INTEGERS[values.element_size()]).view(*nibbles.shape, 2)
    dense = bits.new_zeros(*nibbles.shape, 4)
    return dense.scatter_(-1, positions(nibbles), bits).flatten(-2).view(values.dtype)


def positions(nibbles: torch.Tensor) -> torch.Tensor:
    """The positions (i0, i1) in nibbles `[...]`: `[..., 2]` int64."""
    return torch.stack([nibbles & 3, nibbles >> 2], -1).long()


def as_groups(x: torch.Tensor) -> torch.Tensor:
    """View `[..., columns]` as `[..., columns / 4, 4]`."""
    return x.unflatten(-1, (x.shape[-1] // 4, 4))


# --- the order of the metadata ------------------------------------------------------------------

# By layout and the bytes of a value, the digits of a nibble's address, the highest first: r3 is
# bit 3 of the row's index, g0 bit 0 of the group's; r and g count the tiles that the digits after
# them span, each of which is stored whole.
ORDERS = {
    # Row by row, in whole bytes. Read as words of any length: TileLang's row-major metadata.
    "neutral": dict.fromkeys(INTEGERS, "r g g0"),
    # CUTLASS on compute capability 8.x, as in torch's own 2:4 operators.
    "cutlass_sm80": {1: "g r r2 r1 r0 g3 r3 g2 g1 g0", 2: "g r r2 r1 r0 r4 g2 r3 g1 g0"},
    # CUTLASS' `Sm90GemmSparseConfig`, for kernels that take 64 columns at a time (128 or more of a
    # one-byte type), and for those that take 128 of a two-byte type.
    "cutlass_sm90": {1: "g r g4 g3 g2 g1 g0", 2: "g r r5 r4 g2 r2 r1 r0 g3 r3 g1 g0"},
    "cutlass_sm90_k128": {2: "g r r5 r4 g2 r2 r1 r0 g4 g3 r3 g1 g0"},
    # cuSPARSELt on compute capability 9.0. NVIDIA does not document this order; it was determined
    # on an H200 with cuSPARSELt 0.8.0 (docs/measuring.md).
    BUFFERED: {1: "r g r5 r4 r2 r1 r0 g2 g1 g3 r3 g0", 2: "r g r5 r4 r2 r1 r0 g1 g0 g2 r3"},
}


@dataclass(frozen=True)
class Form:
    """The order of a layout's metadata for values of one size, and what it needs."""

    rows: int  # the matrix's rows and columns must be multiples of these
    columns: int
    word: torch.dtype  # of the metadata
    order: str
    block: int = field(init=False)  # the columns of a tile

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", 4 * tile(self.order)[1])

    def row_bytes(self, columns: int) -> int:
        """The bytes of metadata per row, of whole tiles."""
        return (columns + self.block - 1) // self.block * self.block // 8


class Layout(NamedTuple):
    forms: dict[int, Form]  # by the bytes of a value; other sizes are not supported
    missing: int = 0  # the nibble for groups beyond the matrix


def tile(order: str) -> tuple[int, int]:
    """The rows and groups of a tile."""
    digits = order.split()[2:]
    return 1 << sum(d[0] == "r" for d in digits), 1 << sum(d[0] == "g" for d in digits)


def addresses(
    order: str, rows: int, columns: int, device: torch.device | None = None
) -> torch.Tensor:
    """The address of each group's nibble, `[rows, columns / 4]`."""
    outer, inner, *digits = order.split()
    index = {
        "r": torch.arange(rows, device=device)[:, None],
        "g": torch.arange(columns // 4, device=device),
    }
    size = dict(zip("rg", tile(order), strict=True))
    across = -(-(rows if inner == "r" else columns // 4) // size[inner])
    found = index[outer] // size[outer] * across + index[inner] // size[inner]
    for digit in digits:
        found = 2 * found + (index[digit[0]] >> int(digit[1:]) & 1)
    return found


def _forms(layout: str, *needs: tuple[int, int, torch.dtype]) -> dict[int, Form]:
    given = zip(ORDERS[layout].items(), needs, strict=True)
    return {size: Form(*need, order) for (size, order), need in given}


LAYOUTS = {
    "neutral": Layout(_forms("neutral", *[(1, 4, torch.uint8)] * len(INTEGERS))),
    "cutlass_sm80": Layout(_forms("cutlass_sm80", (16, 128, torch.int32), (32, 64, torch.int16))),
    "cutlass_sm90": Layout(_forms("cutlass_sm90", (64, 128, torch.uint8), (64, 64, torch.uint8))),
    "cutlass_sm90_k128": Layout(_forms("cutlass_sm90_k128", (64, 128, torch.uint8))),
    BUFFERED: Layout(
        _forms(BUFFERED, (64, 64, torch.uint8), (64, 16, torch.uint8)),
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


def new_buffer(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    device: torch.device | None,
    layout: str = BUFFERED,
) -> torch.Tensor:
    """An uninitialised buffer for values and metadata."""
    size = buffer_bytes(rows, columns, dtype, layout)
    return torch.empty(size, dtype=torch.uint8, device=device)


def scatter(nibbles: torch.Tensor, layout: str, itemsize: int) -> torch.Tensor:
    """The flat metadata bytes of nibbles `[rows, columns / 4]`."""
    rows, columns = nibbles.shape[0], 4 * nibbles.shape[1]
    forms, missing = LAYOUTS[layout]
    form = forms[itemsize]
    meta = nibbles.new_full((2 * rows * form.row_bytes(columns),), missing)
    meta[addresses(form.order, rows, columns, nibbles.device).flatten()] = nibbles.flatten()
    return meta[::2] | meta[1::2] << 4


def gather(meta: torch.Tensor, rows: int, columns: int, layout: str, itemsize: int) -> torch.Tensor:
    """The nibbles `[rows, columns / 4]` in metadata."""
    order = LAYOUTS[layout].forms[itemsize].order
    at, meta = addresses(order, rows, columns, meta.device), meta.view(-1).view(torch.uint8)
    return torch.stack([meta & 15, meta >> 4], -1).flatten()[at]


def pack(x: torch.Tensor, mask: torch.Tensor, layout: str) -> torch.Tensor:
    """One buffer of bytes: the packed values of x [rows, columns], then the metadata."""
    if layout == VENDOR:
        kept = x.view(INTEGERS[x.element_size()]).masked_fill(~mask, 0)
        return by_library(kept.view(x.dtype))
    values, nibbles = compress(x, mask)
    meta = scatter(nibbles, layout, x.element_size())
    return torch.cat([values.flatten().view(torch.uint8), meta])


def by_library(x: torch.Tensor, buffer: torch.Tensor | None = None) -> torch.Tensor:
    """The buffer in layout VENDOR, new if none is given, of an x that is 2:4 along its rows."""
    if buffer is None:
        buffer = new_buffer(x.shape[0], x.shape[1], x.dtype, x.device, VENDOR)
    if x.is_cuda:
        cusparselt.compress(x, buffer)
    else:
        packed = pack(x, x.view(INTEGERS[x.element_size()]) != 0, BUFFERED)
        buffer[: len(packed)] = packed
    return buffer
