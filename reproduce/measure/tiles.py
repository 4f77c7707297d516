"""Matrices cut into square tiles, packed or dense, and comparisons with the whole."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common_kernels import pack24
from common_kernels.matmul import unavailable
from common_kernels.pack import BUFFERED
from experiments.bench import variants
from experiments.support.errors import UserError
from methods.nn import operands
from methods.nn.operands import Dense, Packed
from reproduce.measure.base import Layer


def sparse_products(config: Layer) -> str:
    """The backend that multiplies all 2:4 weights sparse, or `dense` if there is none here."""
    available = unavailable("cusparselt", config.on, config.dtype) is None
    return "cusparselt" if config.on.type == "cuda" and available else "dense"


class DenseTiles(Dense):
    """A dense matrix that multiplies tile by tile, each tile being a square."""

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., in] -> [..., out], out being a multiple of in."""
        y = torch.cat([F.linear(x, tile) for tile in self.matrix.split(x.shape[-1])], -1)
        return y if bias is None else y + bias.to(y.dtype)

    def grad(self, dy: Tensor) -> Tensor:
        """dy [T, out] -> [T, in], in being a multiple of out."""
        return torch.cat([dy @ tile for tile in self.matrix.split(dy.shape[-1], 1)], -1)


class PackedTiles(Packed):
    """A packed matrix cut into square tiles: `buffer` is [tiles, bytes], `shape` that of a tile."""

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., in] -> [..., tiles * in]."""
        tiles = [Packed(buffer, self.shape, self.dtype) for buffer in self.buffer]
        y = torch.cat([tile.linear(x, None) for tile in tiles], -1)
        return y if bias is None else y + bias.to(y.dtype)

    def grad(self, dy: Tensor) -> Tensor:
        """dy [T, out] -> [T, tiles * out]."""
        return self.linear(dy, None)


operands.TENSORS |= {DenseTiles: 1, PackedTiles: 1}


def packed_tiles(matrix: Tensor) -> PackedTiles:
    """A 2:4 matrix [k * size, size] cut into k packed tiles."""
    size = matrix.shape[1]
    buffers = [pack24(tile, tile != 0, BUFFERED).buffer for tile in matrix.split(size)]
    return PackedTiles(torch.stack(buffers), (size, size), matrix.dtype)


def check(got: Tensor, want: Tensor, what: str, config: Layer) -> None:
    """Raise a `UserError` unless two results agree within the rounding of a layer's products."""
    error = variants.relative_error(got, want.float())
    # Four products one after the other, and the operations between them.
    allowed = 8 * variants.tolerance(variants.variant("slope"), config.dtype, config.ffn)
    if not error <= allowed:
        raise UserError(f"{what}: off by {error:.2g} (allowed {allowed:.2g}): no time is reported")
