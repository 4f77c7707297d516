"""Products of 2:4 matrices by definition, in fp64: what the tests hold every backend against."""

import torch


def matmul24(a: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., columns] A^T + bias [rows], for the matrix A [rows, columns] that was packed."""
    y = x.double() @ a.double().t()
    return y if bias is None else y + bias.double()
