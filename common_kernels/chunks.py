"""Walking a tensor in memory order, in pieces that fit the cache.

Every pass over a large tensor costs a trip to memory, and every temporary of its size costs page
faults, which are dearer still. The operators of cpu.py therefore run their passes over one piece at
a time, in scratch space allocated once.
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
    """x as one dim in memory order: a view if x is dense, else of its copy with the layout of
    `torch.empty_like(x)`.
    """
    return as_groups(x.unsqueeze(-1), -1, 1).view(-1)


def as_groups(x: torch.Tensor, dim: int, m: int) -> torch.Tensor:
    """x in memory order as `[rows, m, lanes]`: groups of m along `dim`, whose entries lie `lanes`
    apart.

    A view if x is dense, else of its copy with the layout of `torch.empty_like(x)`. x must not be
    empty.
    """
    dim %= x.ndim
    if not x.is_contiguous():
        if not x.permute(memory_order(x)).is_contiguous():
            x = x.clone()
        order = memory_order(x)
        x, dim = x.permute(order), order.index(dim)
    return x.view(-1, m, x.shape[dim + 1 :].numel())


def split(*tensors: torch.Tensor, size: int | None = None) -> Iterator[tuple[torch.Tensor, ...]]:
    """Pieces of about `size` (SIZE) elements of tensors that share their first dim, cut along it.
    None may be empty.

    The size is measured on the first tensor. Only the CPU gains from pieces: elsewhere the one
    piece is the whole.
    """
    first = tensors[0]
    step = len(first)
    if first.device.type == "cpu":
        step = max(1, (size or SIZE) * len(first) // first.numel())
    return zip(*(t.split(step) for t in tensors), strict=True)


def for_each(
    plan: Callable[..., Callable[..., None]], *tensors: torch.Tensor, size: int | None = None
) -> None:
    """`plan(*piece)(*piece)` for all pieces of `split`.

    `plan` allocates what a piece of this shape needs and takes all views of it; the function that
    it returns does the work, and is called again for the pieces of the same length that follow.
    """
    length = -1
    for piece in split(*tensors, size=size):
        if len(piece[0]) != length:
            length = len(piece[0])
            work = plan(*piece)
        work(*piece)


class Scratch:
    """fp32 memory that is allocated at a name's first use and reused for the pieces that follow.

    The first piece is the largest, so a later one takes the front of what is there.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.parts: dict[str, torch.Tensor] = {}

    def __call__(self, name: str, *shape: int) -> torch.Tensor:
        """Uninitialised memory of the given shape; what it held under this name is lost."""
        size = math.prod(shape)
        if name not in self.parts:
            self.parts[name] = torch.empty(size, device=self.device)
        return self.parts[name][:size].view(shape)


def gather_lanes(piece: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`[rows, m, lanes]` to `[m, rows, lanes]`, entry by entry, which is twice as fast as one
    strided copy.
    """
    for i, entry in enumerate(out):
        entry.copy_(piece[:, i])
    return out


def scatter_lanes(planes: torch.Tensor, piece: torch.Tensor) -> None:
    """Copy `[m, rows, lanes]` to `[rows, m, lanes]`, entry by entry."""
    for i, entry in enumerate(planes):
        piece[:, i].copy_(entry)
