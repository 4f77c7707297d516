"""Choices and seeds that are equal on all ranks of a process group, and conversion on one rank."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_place: ContextVar[torch.device | None] = ContextVar("place", default=None)


@contextmanager
def alone(device: torch.device) -> Iterator[None]:
    """A context in which `convert` does not communicate, because only this rank has the weights.
    One layer at a time is moved to `device`."""
    token = _place.set(device)
    try:
        yield
    finally:
        _place.reset(token)


def is_alone() -> bool:
    """True within `alone`."""
    return _place.get() is not None


BUCKET = 256 << 20  # bytes that are sent together


def take_from_rank_0(tensors: Iterable[Tensor]) -> None:
    """Overwrite these tensors with rank 0's, if this is a rank of a process group in which all
    convert the model together."""
    if dist.is_initialized() and not is_alone():
        # gloo does not know bools.
        sent = [
            t.detach().view(torch.uint8) if t.dtype == torch.bool else t.detach() for t in tensors
        ]
        group: Any = dist.group.WORLD
        if sent:  # torch refuses an empty list
            dist._broadcast_coalesced(group, sent, BUCKET, 0)


def place() -> tuple[int, int]:
    """This process's rank and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


@contextmanager
def visiting(layer: nn.Module) -> Iterator[None]:
    """A context in which a layer, unless it is on `meta`, is on the device given to `alone`."""
    home, place = next(layer.parameters()).device, _place.get()
    if place is None or home.type in ("meta", place.type):
        yield
        return
    layer.to(place)
    try:
        yield
    finally:
        layer.to(home)


def of_rank_0(choose: Callable[[], Any]) -> Any:
    """Return on every rank what `choose` returns, or raises, on rank 0."""
    if not dist.is_initialized():
        return choose()
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            found = [choose()]
        except (ValueError, RuntimeError) as error:  # the other ranks wait for a result
            found = [error]
    dist.broadcast_object_list(found, src=0)
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def layer_seed(seed: int, name: str, step: int) -> int:
    """The 63-bit Philox seed of one layer in one optimizer step."""
    digest = hashlib.blake2b(f"{seed}/{name}/{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
