"""The compressed form by definition, row by row: what the tests hold every backend against."""

import torch

from common_kernels.masks.reference import nm_mask


def pack_mask(mask: torch.Tensor) -> torch.Tensor:
    """`mask [rows, columns]` as bytes: bit i of byte j stands for column 8j + i."""
    rows, columns = mask.shape
    bits = torch.zeros(rows, -(-columns // 8), dtype=torch.uint8)
    for row, column in mask.nonzero().tolist():
        bits[row, column // 8] += 1 << column % 8
    return bits


def unpack_mask(bits: torch.Tensor, columns: int) -> torch.Tensor:
    rows = [[bool(row[c // 8] >> c % 8 & 1) for c in range(columns)] for row in bits.tolist()]
    return torch.tensor(rows, dtype=torch.bool).view(len(bits), columns)


def compress_nm(x: torch.Tensor, bits: torch.Tensor, n: int = 2, m: int = 4) -> torch.Tensor:
    """The kept entries of `x [rows, columns]` in column order: `[rows, columns * n / m]`."""
    kept = unpack_mask(bits, x.shape[1])
    return x[kept].view(len(x), x.shape[1] // m * n)


def expand_nm(values: torch.Tensor, bits: torch.Tensor, n: int = 2, m: int = 4) -> torch.Tensor:
    """The matrix `[rows, columns]` of these values, with zeros at pruned entries."""
    x = values.new_zeros(len(values), values.shape[1] // n * m)
    x[unpack_mask(bits, x.shape[1])] = values.flatten()
    return x


def double_prune_bits(
    values: torch.Tensor, bits: torch.Tensor, n: int = 2, m: int = 4
) -> torch.Tensor:
    """SLoPe's second mask (arXiv 2405.16325, section 2.1) for each value: True if it is among the n
    largest magnitudes of its column's group of m. Pruned entries rank below all values, even zeros.
    """
    least = torch.where(values == 0, 2.0**-149, values.float())
    return pack_mask(compress_nm(nm_mask(expand_nm(least, bits, n, m), n, m, 0), bits, n, m))
