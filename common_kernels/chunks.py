"""Iteration over a tensor in memory order, in pieces that fit the CPU's cache.

Each pass over a large tensor reads it from memory, and each temporary of its size causes page
faults, which cost even more. The operators of cpu.py therefore run all passes over one piece before
they take the next, in scratch space that is allocated once.
"""

import math
from collections.abc import Callable, Iterator

import torch

# Elements in a piece: few enough for the cache, enough to amortise the launch of an operator.
SIZE = 1 << 18


def memory_order(x: torch.Tensor) -> list[int]:
    """The dims of x from the largest stride to the smallest."""
    return sorted(range(x.ndim), key=x.stride, reverse=True)


def in_memory_order(x: torch.Tensor) -> torch.Tensor:
    """x flattened in memory order. A view if x is dense, else a view of a copy of x in the layout
    of `torch.empty_like(x)`.
    """
    return as_groups(x.unsqueeze(-1), -1, 1).view(-1)


def as_groups(x: torch.Tensor, dim: int, m: int) -> torch.Tensor:
    """x in memory order as `[rows, m, lanes]`: groups of m along `dim`, whose entries lie `lanes`
    apart.

    A view if x is dense, else a view of a copy of x in the layout of `torch.empty_like(x)`. x must
    not be empty.
    """
    dim %= x.ndim
    if not x.is_contiguous():
        if not x.permute(memory_order(x)).is_contiguous():
            x = x.clone()
        order = memory_order(x)
        x, dim = x.permute(order), order.index(dim)
    return x.view(-1, m, x.shape[dim + 1 :].numel())


def split(*tensors: torch.Tensor, size: int | None = None) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield pieces of tensors that share their first dim, cut along it. No tensor may be empty.

    A piece of the first tensor has about `size` elements (default SIZE). On other devices than the
    CPU, which gain nothing, the only piece is the whole.
    """
    first = tensors[0]
    step = len(first)
    if first.device.type == "cpu":
        step = max(1, (size or SIZE) * len(first) // first.numel())
    return zip(*(t.split(step) for t in tensors), strict=True)


def for_each(
    plan: Callable[..., Callable[..., None]], *tensors: torch.Tensor, size: int | None = None
) -> None:
    """Call `plan(*piece)(*piece)` for every piece of `split`.

    `plan` allocates the scratch space for a piece and takes all views of it. The function that it
    returns does the work; it is reused for the following pieces of the same length.
    """
    length = -1
    for piece in split(*tensors, size=size):
        if len(piece[0]) != length:
            length = len(piece[0])
            work = plan(*piece)
        work(*piece)


class Scratch:
    """Named fp32 scratch memory, allocated at a name's first use and reused for later pieces.

    The first piece is the largest, so a later piece takes the front of the same memory.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.parts: dict[str, torch.Tensor] = {}

    def __call__(self, name: str, *shape: int) -> torch.Tensor:
        """Uninitialised memory of the given shape; it overwrites what this name held before."""
        size = math.prod(shape)
        if name not in self.parts:
            self.parts[name] = torch.empty(size, device=self.device)
        return self.parts[name][:size].view(shape)


def gather_lanes(piece: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Copy `[rows, m, lanes]` into `out [m, rows, lanes]`, one entry of m at a time, which is twice
    as fast as one strided copy.
    """
    for i, entry in enumerate(out):
        entry.copy_(piece[:, i])
    return out


def scatter_lanes(planes: torch.Tensor, piece: torch.Tensor) -> None:
    """Copy `planes [m, rows, lanes]` into `piece [rows, m, lanes]`, one entry of m at a time."""
    for i, entry in enumerate(planes):
        piece[:, i].copy_(entry)
