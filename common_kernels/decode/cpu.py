"""Fragments of a 2:4 matrix, and products with them, in plain PyTorch."""

import torch
import torch.nn.functional as F

from common_kernels.pack.cpu import expand
from common_kernels.pack.quantized import GROUP, integers, nibbles

ROWS, COLUMNS = 16, 64  # of the part of the matrix that a warp takes at a time, with two products

# A lane is 4 g + q, g < 8, q < 4. In each of the two products of a part it holds pairs of values
# 2 q + 8 p, 2 q + 8 p + 1, p < 2, of the rows g and g + 8 (its halves). The values' dims are tile,
# half, g, part, product, p, q and entry of the pair; here is their order in memory by the bits of a
# value. Words of 64 bits are those of a lane; with fewer bits the first entries of a word's pairs
# are in the lower half of each 32 bits, the second ones above them.
ORDERS = {16: (0, 3, 4, 5, 2, 6, 1, 7), 8: (0, 3, 4, 2, 6, 5, 7, 1), 4: (0, 3, 2, 6, 4, 7, 5, 1)}


def sizes(rows: int, parts: int) -> tuple[int, ...]:
    """The values' dims of a matrix of so many rows and parts of 64 columns."""
    return rows // ROWS, 2, 8, parts, 2, 2, 4, 2


def bits_of(values: torch.Tensor, rows: int, columns: int) -> int:
    """The bits of a value in the fragments of a matrix."""
    return 128 * values.numel() // (rows * columns)


def fragments(
    values: torch.Tensor, meta: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values, int16 or int8 [rows, columns / 2], and positions (uint8 [rows, columns / 8]) of a
    packed matrix as fragments: int64 [rows * columns * bits / 128] and int32 [rows * columns / 32].

    Two lanes of four hold the positions of a product, for 16 columns each, in the lower half of a
    word those of row g.
    """
    rows, parts = values.shape[0], values.shape[1] // 32
    ordered = values.reshape(sizes(rows, parts)).permute(ORDERS[bits]).contiguous()
    if bits == 4:
        ordered = nibbles(ordered)
    words = meta.contiguous().view(torch.int16).view(rows // ROWS, 2, 8, parts, 4)
    words = words.permute(0, 3, 2, 4, 1).contiguous()  # tile, part, g, quarter, half
    return ordered.view(-1).view(torch.int64), words.view(-1).view(torch.int32)


def matrix(
    values: torch.Tensor, meta: torch.Tensor, scales: torch.Tensor | None,
    rows: int, columns: int, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """The matrix [rows, columns] that fragments hold: of dtype, or of fp32 with scales, whose
    products with the integers are exact."""
    parts, bits = columns // COLUMNS, bits_of(values, rows, columns)
    order, own = ORDERS[bits], {16: dtype, 8: torch.int8, 4: torch.uint8}[bits]
    held = integers(values.view(own)) if bits == 4 else values.view(own)
    shape, back = sizes(rows, parts), [order.index(dim) for dim in range(8)]
    halves = held.view([shape[dim] for dim in order]).permute(back).reshape(rows, 32 * parts)
    if scales is not None:
        words = scales.view(torch.bfloat16).view(rows // ROWS, -1, 8, 2).permute(0, 3, 2, 1)
        factors = words.reshape(rows, -1).float().repeat_interleave(GROUP // 2, dim=1)
        halves = halves * factors[:, : 32 * parts]
    words = meta.view(torch.int16).view(rows // ROWS, parts, 8, 4, 2).permute(0, 4, 2, 1, 3)
    bytes_ = words.contiguous().view(torch.uint8).view(rows, -1)
    return expand(halves, torch.stack([bytes_ & 15, bytes_ >> 4], -1).flatten(-2))


def few_tokens24(
    values: torch.Tensor, meta: torch.Tensor, scales: torch.Tensor | None, x: torch.Tensor,
    bias: torch.Tensor | None, rows: int,
) -> torch.Tensor:  # fmt: skip
    w = matrix(values, meta, scales, rows, x.shape[1], x.dtype).float()
    return F.linear(x.float(), w, None if bias is None else bias.float()).to(x.dtype)
