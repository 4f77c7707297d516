"""Packed 2:4 matrices whose values are integers times a scale for each run of columns, in plain
PyTorch on any device: a matrix is quantised once and read by the products with few tokens."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from common_kernels.pack import Packed24, convert24, unpack24

GROUP = 128  # columns of a row that share a scale
BITS = 8, 4  # of a value


@dataclass(frozen=True, eq=False)
class Quantized24:
    """A 2:4 matrix [rows, columns]: its values are integers, in -127..127 or -7..7, times a scale.

    values: int8 `[rows, columns / 2]`, or for four bits uint8 `[rows, columns / 4]`, two in a byte,
        the first in its low half, in two's complement.
    positions: uint8 `[rows, columns / 8]`, as in `Packed24` of layout `neutral`.
    scales: bf16 `[rows, columns / GROUP]`; the last of a row may serve fewer columns.
    """

    values: torch.Tensor
    positions: torch.Tensor
    scales: torch.Tensor

    @property
    def bits(self) -> int:
        return 8 if self.values.dtype == torch.int8 else 4

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.values), self.values.shape[1] * 16 // self.bits

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.positions.nbytes + self.scales.nbytes


def quantize24(packed: Packed24, bits: int) -> Quantized24:
    """The matrix with each value rounded to the nearest multiple of its scale, ties to even.

    bits: 8 or 4. A scale is the largest magnitude that it serves over the largest integer, rounded
    to bf16. A matrix that was dequantised in the dtype in which it was quantised gives the same
    integers and scales again; rounded to another dtype, some matrices do not.

    Raises ValueError for another number of bits.
    """
    if bits not in BITS:
        raise ValueError(f"bits must be 8 or 4, not {bits}")
    neutral = convert24(packed, "neutral")
    values, top = neutral.values.float(), 2 ** (bits - 1) - 1
    runs = F.pad(values, (0, -values.shape[1] % (GROUP // 2))).unflatten(1, (-1, GROUP // 2))
    scales = (runs.abs().amax(-1) / top).bfloat16()
    steps = scales.float().unsqueeze(-1)
    numbers = torch.where(steps > 0, runs / steps, 0.0).round().clamp(-top, top).to(torch.int8)
    numbers = numbers.flatten(1)[:, : values.shape[1]].contiguous()
    return Quantized24(numbers if bits == 8 else nibbles(numbers), neutral.meta.clone(), scales)


def dequantize24(matrix: Quantized24, dtype: torch.dtype) -> torch.Tensor:
    """The dense matrix [rows, columns], each product of integer and scale rounded once."""
    values = matrix.values if matrix.bits == 8 else integers(matrix.values)
    scales = matrix.scales.float().repeat_interleave(GROUP // 2, dim=1)[:, : values.shape[1]]
    return unpack24(Packed24.of((values * scales).to(dtype), matrix.positions, "neutral"))


def nibbles(values: torch.Tensor) -> torch.Tensor:
    """Four-bit integers, int8 `[..., n]`, as uint8 `[..., n / 2]`, the first in the low half."""
    pairs = values.view(torch.uint8).unflatten(-1, (-1, 2)) & 15
    return pairs[..., 0] | pairs[..., 1] << 4


def integers(pairs: torch.Tensor) -> torch.Tensor:
    """The integers int8 `[..., 2 n]` in bytes uint8 `[..., n]` of `nibbles`."""
    both = torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)
    return (both ^ 8).view(torch.int8) - 8
