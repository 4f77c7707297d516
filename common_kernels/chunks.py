"""Walking a tensor in memory order, in pieces that fit the cache.

Every pass over a large tensor costs a trip to memory, and every temporary of its size costs page faults, which are
dearer still. The naive operators therefore run their passes over one piece at a time, in scratch space allocated once.
"""

from collections.abc import Iterator

import torch

SIZE = 1 << 18  # elements in a piece: few enough for the cache, enough to amortise the launch of an operator


def memory_order(x: torch.Tensor) -> list[int]:
    """The dims of x from the largest stride to the smallest."""
    return sorted(range(x.ndim), key=x.stride, reverse=True)


def as_groups(x: torch.Tensor, dim: int, m: int) -> torch.Tensor:
    """x in memory order as `[rows, m, lanes]`: groups of m along `dim`, whose entries lie `lanes` apart.

    A view if x is dense, else a view of its dense copy, which has the layout of `torch.empty_like(x)`.
    """
    dim %= x.ndim
    if not x.is_contiguous():
        if not x.permute(memory_order(x)).is_contiguous():
            x = x.clone()
        order = memory_order(x)
        x, dim = x.permute(order), order.index(dim)
    return x.view(-1, m, x.shape[dim + 1 :].numel())


def split(*tensors: torch.Tensor, size: int = SIZE) -> Iterator[tuple[torch.Tensor, ...]]:
    """Pieces of about `size` elements of tensors that share their first dim, cut along it; none if they are empty.

    The size is measured on the first tensor. Only the CPU gains from pieces: elsewhere the one piece is the whole.
    """
    first = tensors[0]
    if first.numel():
        step = max(1, size * len(first) // first.numel()) if first.device.type == "cpu" else len(first)
        yield from zip(*(t.split(step) for t in tensors), strict=True)
