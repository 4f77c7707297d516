"""The group of processes that torchrun started, or a single process."""

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

# Makes torchrun create a store for every attempt instead of sharing its own.
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process's rank among `size` processes, and the `device` on which it computes."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def broadcast_from_rank0(self, work: Callable[[], T]) -> T:
        """Run `work()` on rank 0 and return its result on every rank. Its UserError, or an error of
        the operating system, is raised on every rank."""
        if self.size == 1:
            return work()
        answer: list[Any] = [None, None]
        if self.is_main:
            try:
                answer[0] = work()
            except UserError as reason:
                answer[1] = UserError(str(reason))  # subclasses cannot be sent
            except OSError as reason:  # for example a folder without write permission
                answer[1] = reason
        dist.broadcast_object_list(answer)
        if answer[1] is not None:
            if isinstance(answer[1], UserError):
                answer[1].elsewhere = not self.is_main
            raise answer[1]
        return answer[0]

    def rank0_first(self, work: Callable[[], T]) -> T:
        """Run `work()` on rank 0 and then on the other ranks, which find what rank 0 has prepared;
        return each rank's own result. Errors of rank 0 are raised on every rank."""
        found: list[T] = []
        # The result is not sent to the other ranks, as it may be large.
        self.broadcast_from_rank0(lambda: found.append(work()))
        return found[0] if self.is_main else work()

    def all_gather(self, value: T) -> list[T]:
        """The value of each rank, by rank; every rank must call it."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def all_reduce_mean(self, value: Tensor) -> Tensor:
        """The average of a tensor over the ranks; every rank must call it."""
        if self.size > 1:
            value = value.clone()
            dist.all_reduce(value)
            value /= self.size
        return value


@contextmanager
def world(device: str, offload: bool = False) -> Iterator[World]:
    """A context in which this process is in the group that torchrun describes in the environment,
    or in that of an outer `world`: it cannot join twice. device: `auto` (a GPU if there is one),
    `cpu` (gloo) or `cuda` (nccl). offload: tensors in the host's memory are exchanged as well."""
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
    if joins := not dist.is_initialized():
        _join("gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl" if offload else "nccl")
    try:
        yield World(dist.get_rank(), dist.get_world_size(), place)
        # Every rank then sees what rank 0 wrote. Besides, gloo's threads outlive the group and,
        # while busy, abort an interpreter that ends (github.com/pytorch/pytorch/pull/179291).
        dist.barrier()
    finally:
        if joins:
            dist.destroy_process_group()


def _join(backend: str) -> None:
    """Join the group that the environment describes, without interference from earlier attempts.

    When torchrun restarts ranks (--max-restarts), its store still has the addresses of those that
    died, and new ranks would wait for them (github.com/pytorch/pytorch/issues/135712). On one node
    the agent's count of attempts separates them. Agents of several nodes may count differently, so
    there every attempt needs its own store, which torchrun creates if `OWN_STORE` is set.
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
