"""Fragments of a 2:4 matrix, and products with them, in plain PyTorch."""

import torch
import torch.nn.functional as F

from common_kernels.pack.cpu import expand

ROWS, COLUMNS = 16, 64  # of the part of the matrix that a warp takes at a time, with two products


def fragments(values: torch.Tensor, meta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [rows, columns / 2] and positions (uint8 [rows, columns / 8]) of a packed matrix as
    fragments: int64 [rows * columns / 8] and int32 [rows * columns / 32].

    A lane is 4 g + q, g < 8, q < 4. In each of the two products of a part it holds pairs of values
    2 q + 8 p, 2 q + 8 p + 1, p < 2, of the rows g and g + 8. Two lanes of four hold the positions
    of a product, for 16 columns each, in the lower half of a word those of row g.
    """
    rows, parts = values.shape[0] // ROWS, values.shape[1] // 32
    pairs = values.contiguous().view(torch.int32)
    # tile, half (g, g + 8), g, part, product, p, q -> tile, part, product, p, g, q, half
    pairs = pairs.view(rows, 2, 8, parts, 2, 2, 4).permute(0, 3, 4, 5, 2, 6, 1).contiguous()
    words = meta.contiguous().view(torch.int16).view(rows, 2, 8, parts, 4)
    words = words.permute(0, 3, 2, 4, 1).contiguous()  # tile, part, g, quarter, half
    return pairs.view(-1).view(torch.int64), words.view(-1).view(torch.int32)


def matrix(values: torch.Tensor, meta: torch.Tensor, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """The matrix [rows, columns] that fragments hold."""
    parts = values.numel() // (8 * rows)
    pairs = values.view(torch.int32).view(rows // ROWS, parts, 2, 2, 8, 4, 2)
    halves = pairs.permute(0, 6, 4, 1, 2, 3, 5).contiguous().view(dtype).view(rows, 32 * parts)
    words = meta.view(torch.int16).view(rows // ROWS, parts, 8, 4, 2).permute(0, 4, 2, 1, 3)
    bytes_ = words.contiguous().view(torch.uint8).view(rows, -1)
    return expand(halves, torch.stack([bytes_ & 15, bytes_ >> 4], -1).flatten(-2))


def few_tokens24(
    values: torch.Tensor, meta: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, rows: int
) -> torch.Tensor:
    w = matrix(values, meta, rows, x.dtype).float()
    return F.linear(x.float(), w, None if bias is None else bias.float()).to(x.dtype)
