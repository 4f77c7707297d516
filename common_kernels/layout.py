"""The order of a tensor in memory."""

import torch


def memory_order(x: torch.Tensor) -> list[int]:
    """The dims of x from the largest stride to the smallest."""
    return sorted(range(x.ndim), key=x.stride, reverse=True)


def in_memory_order(x: torch.Tensor) -> torch.Tensor:
    """x flattened in memory order. A view if x is dense, else a view of a copy of x in the layout
    of `torch.empty_like(x)`.
    """
    return as_groups(x.unsqueeze(-1), -1, 1).view(-1)


def as_groups(x: torch.Tensor, dim: int, m: int) -> torch.Tensor:
    """x in memory order as `[rows, m, lanes]`: groups of m along `dim`, with entries `lanes` apart.

    A view if x is dense, else a view of a copy of x in the layout of `torch.empty_like(x)`.
    """
    dim %= x.ndim
    if not x.is_contiguous():
        if not x.permute(memory_order(x)).is_contiguous():
            x = x.clone()
        order = memory_order(x)
        x, dim = x.permute(order), order.index(dim)
    return x.view(x.shape[: dim + 1].numel() // m, m, x.shape[dim + 1 :].numel())
