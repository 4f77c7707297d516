"""Sharded tensors, torch's DTensors: a rank's rows, the whole, and sums over ranks."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def is_sharded(tensor: Any) -> bool:
    """True if `tensor` is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # if not imported, there are no DTensors
    return module is not None and isinstance(tensor, module.DTensor)


def rows_of(tensor: Any) -> Tensor:
    """The part of `tensor` that this rank holds."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def full(tensor: Any) -> Tensor:
    """The whole of `tensor`, gathered or summed if it is a DTensor; every rank must call it."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def sharded_like(tensor: Tensor, like: Any) -> Tensor:
    """A whole `tensor`, equal on all ranks, sharded like `like` if that is sharded."""
    if not is_sharded(like) or is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    mesh = like.device_mesh
    there = tensor.to(mesh.device_type)
    return distribute_tensor(there, mesh, like.placements, src_data_rank=None).to(like.device)


def shard_dim(tensor: Any) -> int:
    """The dim of the mesh whose ranks hold the shards of a DTensor."""
    return [p.is_shard() for p in tensor.placements].index(True)


def chunk_of(tensor: Any) -> int:
    """Rows of a rank; the last ranks may have fewer, or none."""
    return -(-len(tensor) // tensor.device_mesh.size(shard_dim(tensor)))


def gathered(local: Tensor, like: Any) -> Tensor:
    """All rows [rows, ...] from this rank's `local` ones, which are sharded as `like` is."""
    local = F.pad(local, (0, 0, 0, chunk_of(like) - len(local)))
    return all_gather(local, like.device_mesh, shard_dim(like))[: len(like)]


def all_gather(local: Tensor, mesh: Any, dim: int) -> Tensor:
    """The ranks' `local` tensors [n, ...] of equal shape, one after the other: [ranks * n, ...]."""
    found = local.new_empty(len(local) * mesh.size(dim), *local.shape[1:])
    dist.all_gather_into_tensor(found, local, group=mesh.get_group(dim))
    return found


def total(counts: Iterable[tuple[Any, Sequence[float]]]) -> list[float]:
    """The sums of the counts over layers; those of sharded ones, on `rows`, also over ranks."""
    sums: dict[Any, Tensor] = {}
    for layer, numbers in counts:
        own = next((p for p in layer._parameters.values() if is_sharded(p)), None)
        key = None if own is None else (own.device_mesh, own.placements)
        count = torch.tensor(numbers, dtype=torch.float64)
        sums[key] = sums[key] + count if key in sums else count
    totals = [_over_ranks(count, *(key or ())) for key, count in sums.items()]
    return torch.stack(totals).sum(0).tolist() if totals else []


def total_each(counts: Iterable[tuple[Any, Sequence[float]]]) -> list[list[float]]:
    """The sums of the counts of each layer, as of `total`, in one sum over the ranks."""
    pairs = [*counts]
    many = len(pairs)
    sums = total(
        (layer, [n if i == j else 0.0 for n in numbers for j in range(many)])
        for i, (layer, numbers) in enumerate(pairs)
    )
    return [sums[i::many] for i in range(many)]


def _over_ranks(count: Tensor, mesh: Any = None, placements: Any = ()) -> Tensor:
    if mesh is None:
        return count
    from torch.distributed.tensor import DTensor, Partial, Replicate

    partial = [Partial() if p.is_shard() else Replicate() for p in placements]
    local = count.to(mesh.device_type)
    return DTensor.from_local(local, mesh, partial, run_check=False).full_tensor().cpu()
