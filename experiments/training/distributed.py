"""The processes that torchrun started together, or this one alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from experiments.support.errors import UserError

# Tells torchrun to make a store for the ranks of every attempt, and not to share its own.
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among its peers. `device` is where it computes."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def of_main(self, work: Callable[[], T]) -> T:
        """Return on every rank what `work()` is on rank 0, whose UserError, or error of the system,
        is everybody's."""
        if self.size == 1:
            return work()
        answer: list[Any] = [None, None]
        if self.is_main:
            try:
                answer[0] = work()
            except UserError as reason:
                answer[1] = UserError(str(reason), reason.choices)
            except OSError as reason:  # a folder that may not be written, say
                if reason.errno is None:
                    raise
                answer[1] = OSError(reason.errno, reason.strerror, reason.filename)
        dist.broadcast_object_list(answer)
        if answer[1] is not None:
            if isinstance(answer[1], UserError):
                answer[1].elsewhere = not self.is_main
            raise answer[1]
        return answer[0]

    def main_first(self, work: Callable[[], T]) -> T:
        """Return `work()`, done on rank 0 before the other ranks, which find what it has prepared.

        Its errors are everybody's, as in `of_main`.
        """
        found: list[T] = []
        # Not sent to the others: it may be large.
        self.of_main(lambda: found.append(work()))
        return found[0] if self.is_main else work()

    def all(self, value: T) -> list[T]:
        """The value of each rank, by rank; every rank must call it."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def mean(self, value: Tensor) -> Tensor:
        """Average of a tensor over the ranks; every rank must call it."""
        if self.size > 1:
            value = value.clone()
            dist.all_reduce(value)
            value /= self.size
        return value


@contextmanager
def world(device: str, offload: bool = False) -> Iterator[World]:
    """Join the group that torchrun describes in the environment; leave it at the end.

    Within another `world` it is that one's group: a process cannot join torchrun's twice, so
    several runs in one process need a `world` around them.

    Args:
        device: `auto` (a GPU where there is one), `cpu` (gloo) or `cuda` (nccl). offload: tensors
            in the memory of the host are exchanged, too.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("impl.device=cuda, but torch sees no GPU here; use impl.device=cpu")
    kind = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1:
        yield World(0, 1, torch.device(kind))
        return
    local_rank = int(os.environ["LOCAL_RANK"])
    if kind == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"rank {local_rank} has no GPU of its own: {torch.cuda.device_count()} GPUs; "
                "lower --nproc_per_node"
            )
        torch.cuda.set_device(local_rank)
    place = torch.device(kind, local_rank) if kind == "cuda" else torch.device("cpu")
    if dist.is_initialized():
        yield World(dist.get_rank(), dist.get_world_size(), place)
        dist.barrier()  # what rank 0 wrote is there for all
        return
    _join("gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl" if offload else "nccl")
    try:
        yield World(dist.get_rank(), dist.get_world_size(), place)
        # gloo's threads outlive the group; with work in hand they abort an interpreter that ends
        # (github.com/pytorch/pytorch/pull/179291).
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _join(backend: str) -> None:
    """Join the group that the environment describes, apart from what is left of earlier attempts.

    When torchrun starts ranks anew (--max-restarts), its store still has the addresses of those
    that died, and the new ones would wait for them (github.com/pytorch/pytorch/issues/135712). The
    agent of one node counts the attempts. Those of several do not count alike, so there every
    attempt needs a store of its own, which torchrun makes when it is told to.
    """
    environment = os.environ
    nodes = int(environment.get("GROUP_WORLD_SIZE", "1"))
    anew = int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if nodes > 1 and anew and environment.get(OWN_STORE) != "1":
        raise UserError(
            f"--max-restarts={anew} on {nodes} nodes: ranks that are started anew would wait for "
            f"those that died; set {OWN_STORE}=1 on every node before torchrun"
        )
    store, rank, size = next(rendezvous("env://"))
    if nodes == 1:
        attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt {attempt}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
