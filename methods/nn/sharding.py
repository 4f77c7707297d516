"""Layers under FSDP2: `torch.distributed.fsdp.fully_shard`, applied after `Method.convert`.

Every rank then holds some rows of each parameter, of its gradient and of the optimizer's moments,
as DTensors. The other state of a converted layer is handled as follows:

    masks               sharded by rows like the weight: DTensors in the layer and in state dicts;
                        each rank also keeps the whole mask as bits, gathered when it has changed
    scale, permutation  whole on every rank, like all other buffers
    operands            not kept: most products prune, and pack where they run sparse, the weight
                        that FSDP has gathered, each by itself (operands.Pruned). For other layers
                        operands are derived when they are used, and again in the backward pass

Masks are gathered at the end of a step. If they were gathered in its passes, the gather would wait
for that of the next block's weights, which runs at the same time, and the products for both.

A method's hooks see the DTensors and work on them entry by entry (decay, update rules). A layer
makes choices from its weight on the local rows if each group of `rows_together` rows is on one
rank; otherwise from whole tensors, which are gathered for one layer at a time. A layer gets its
`Shards` when a hook first finds it sharded (`shard_layers`).
"""

import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from common_kernels import pack_mask, unpack_mask

from . import ranks
from .dtensors import (
    all_gather,
    chunk_of,
    full,
    gathered,
    is_sharded,
    rows_of,
    shard_dim,
    sharded_like,
)
from .gemms import autocast_dtype


def check_unsharded(model: nn.Module) -> None:
    """Raise ValueError if `model` is already sharded, or has no numbers yet."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta and not ranks.is_alone():  # a rank that gets numbers from rank 0
            raise ValueError(
                f"{name} is on the meta device, and masks and scales follow from the weights: call "
                "to_empty and the initialisation before convert"
            )
        if is_sharded(parameter):
            raise ValueError(
                f"{name} is sharded already; call convert(model) first and fully_shard after it"
            )


def shard_layers(layers: Iterable[nn.Module], model: nn.Module | None = None) -> None:
    """Shard the masks of converted layers whose weights have been sharded.

    model: the model that holds the layers. Parameters that FSDP left gathered, after a forward pass
        without a backward pass, are resharded first.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not dist.is_initialized():  # walking through a model takes time
        return
    for module in () if model is None else model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()
    new = {}
    for layer in layers:
        own = [p for p in layer._parameters.values() if is_sharded(p)]
        if own and getattr(layer, "shards", own) is None:
            _check(layer, own[0])
            new[layer] = own[0]
    for layer, like in new.items():  # if none is refused
        _shard(layer, like)
    gather_masks(new)


def _check(layer: Any, like: Any) -> None:
    """Raise ValueError if a converted layer cannot be sharded. like: as for `_shard`."""
    from torch.distributed.tensor import Shard

    cut = [p for p in like.placements if not p.is_replicate()]
    if [type(p) for p in cut] != [Shard] or cut[0].dim != 0:
        raise ValueError(
            f"a converted weight is placed as {like.placements}; shard it along dim 0 only, which "
            "is fully_shard's default"
        )
    if "place" in vars(layer):
        raise ValueError(
            f"a matrix that {type(layer.place[0]).__name__} multiplies itself cannot be sharded "
            "once converted; put it into exclude"
        )
    if layer.conv1d is not None:
        raise ValueError(
            "a Conv1D of transformers cannot be sharded; load the model with models.gpt2.from_hf "
            "or models.hf.CausalLM"
        )
    check_products(layer.accelerated)


def _shard(layer: Any, like: Any) -> None:
    """Give a converted layer its `Shards`. like: one of its sharded parameters."""
    layer.shards = Shards(drop_operands(layer), of_products=prunes_itself(layer))
    for name, buffer in layer._buffers.items():
        if buffer is not None and buffer.ndim == 2 and len(buffer) == len(like):
            layer._buffers[name] = sharded_like(buffer, like)  # on the CPU, with CPU offload
    vars(layer)["forward"] = types.MethodType(_forward(), layer)


MASKS = torch.bool, torch.uint8  # dtypes of masks, as entries and as bits
# What decides which operands a layer has.
DERIVING = (
    "effective_weight", "sparse_weight", "exact_weight", "derive", "pack", "draw", "operands",
    "in_place", "forward", "products", "packed_operands",
)  # fmt: skip


def prunes_itself(layer: Any) -> bool:
    """True if the products of a layer can prune its weight: its class says how, and none that is
    derived from that one has other operands."""
    if layer.precision is not None or not layer.prunes:
        return False
    for cls in type(layer).__mro__:
        if "prunes" in vars(cls):
            break
        if any(name in vars(cls) for name in DERIVING):
            return False
    return True


def drop_operands(layer: Any) -> dict[str, Tensor]:
    """Remove the operands' buffers from a layer, and return their like on the meta device."""
    found = {}
    for name, buffer in layer._buffers.items():
        if buffer is not None and name in layer._non_persistent_buffers_set and name != "key":
            found[name] = torch.empty_like(buffer, device="meta")
            layer._buffers[name] = None
    return found


def device_of(layer: nn.Module) -> torch.device:
    """The device on which a layer computes, even if its shards are offloaded."""
    parameter: Any = next(layer.parameters())
    if not is_sharded(parameter):
        return parameter.device
    return torch.empty(0, device=parameter.device_mesh.device_type).device


def check_products(products: Any) -> None:
    """Raise ValueError if sharded weights cannot serve these products."""
    if products.fp8:
        raise ValueError(
            "FP8 units need whole weights; under FSDP2 do not call accelerate, or set fp8='paper', "
            "which is simulated"
        )
    if products.repack:
        raise ValueError(
            "repack_backward=True under FSDP2: no operand of sharded weights is held between "
            "passes; leave it out"
        )


@dataclass(eq=False)
class Shards:
    """The state of a converted layer while its parameters are sharded; see the module docstring.

    derived: meta tensors with the shapes and dtypes of the operands' buffers.
    of_products: the products prune the gathered weight themselves, and nothing is derived.
    viewed: True while the layer shows plain tensors, in `rows`, `unsharded` or the forward pass.
    whole: the gathered masks as bits, by buffer name.
    gathered: the masks that were gathered, each with its versions at that time.
    """

    derived: dict[str, Tensor]
    of_products: bool = False
    viewed: bool = False
    whole: dict[str, Tensor] = field(default_factory=dict)
    gathered: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def direct(self) -> bool:
        """True if the layer's products prune its gathered weight now."""
        return self.of_products and not self.viewed

    @torch.no_grad()
    def derive(self, layer: Any, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """Whole masks and operands for inputs of `dtype`, by buffer name, from a whole weight."""
        gather_masks([layer])
        found = {}
        for name, buffer in layer._buffers.items():
            if not is_sharded(buffer):
                continue
            if buffer.dtype not in MASKS:
                found[name] = gathered(buffer.to_local().to(device), buffer)
                continue
            bits, whole = self.whole[name], buffer.dtype == torch.bool
            found[name] = unpack_mask(bits, buffer.shape[1]) if whole else bits
        for name, own in self.derived.items():
            if own.dtype == torch.uint8 and dtype != layer.dtype:
                continue  # packed operands have one dtype
            # torch's empty_like is slow for meta tensors: it is written in Python.
            found[name] = torch.empty(own.shape, dtype=own.dtype, device=device)
        with _showing(layer, found):
            layer.derive()
            layer.draw()
        for name, own in self.derived.items():
            # A dense operand was rounded to the layer's dtype first, as without sharding.
            if own.dtype == layer.dtype and own.ndim == 2:
                found[name] = found[name].to(dtype)
        vars(layer).pop("_stored", None)  # a `CompressedLinear`'s cache of these buffers
        return found


@cache
def _forward() -> Any:
    """The forward pass of a sharded layer. Where operands are derived it is not compiled, although
    the rest of a model may be; to say so imports torch's compiler, which takes as long as torch."""

    @torch.compiler.disable
    def forward_of_derived(layer: Any, x: Tensor) -> Tensor:
        derive = partial(layer.shards.derive, layer, autocast_dtype(x), x.device)
        derived = derive()
        with _showing(layer, derived):
            # If other saved-tensor hooks are active (activation checkpointing), leave it to them;
            # the operands then live only as long as a block's recomputed forward pass.
            others = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
            with nullcontext() if others else _not_saved(derived, derive):
                return type(layer).forward(layer, x)

    def forward(layer: Any, x: Tensor) -> Tensor:
        if not layer.shards.of_products:
            return forward_of_derived(layer, x)
        if not torch.compiler.is_compiling():
            gather_masks([layer])
        return type(layer).forward(layer, x)

    return forward


def where_it_chooses(layer: Any) -> AbstractContextManager[None]:
    """A context in which a layer has all rows from which it chooses: its own ones, or all."""
    if layer.shards is None:
        return nullcontext()
    weight = next(p for p in layer._parameters.values() if p is not None)
    together = layer.rows_together
    whole = layer.shards.viewed or not together or chunk_of(weight) % together
    return rows(layer, bool(whole))


def gather_masks(layers: Iterable[Any]) -> None:
    """Gather the masks of sharded layers that have changed, by one collective for each mesh.

    All ranks change their rows at the same time, so either all gather or none.
    """
    meshes: dict[tuple[Any, int], list[tuple[Shards, str, Any]]] = {}
    for layer in (layer for layer in layers if layer.shards is not None):
        for name, buffer in layer._buffers.items():
            if is_sharded(buffer) and buffer.dtype in MASKS:
                before, versions = layer.shards.gathered.get(name, (None, None))
                if before is not buffer or versions != _versions(buffer):
                    place = buffer.device_mesh, shard_dim(buffer)
                    meshes.setdefault(place, []).append((layer.shards, name, buffer))
    for (mesh, dim), masks in meshes.items():
        ranks, parts = mesh.size(dim), []
        for _, _, buffer in masks:
            local = buffer.to_local().to(mesh.device_type)
            bits = pack_mask(local) if buffer.dtype == torch.bool else local
            parts.append(F.pad(bits, (0, 0, 0, chunk_of(buffer) - len(bits))))
        sizes = [part.numel() for part in parts]
        together = all_gather(torch.cat([part.flatten() for part in parts]), mesh, dim)
        wholes = [part.new_empty(ranks * len(part), part.shape[1]) for part in parts]
        places = [w.view(ranks, size) for w, size in zip(wholes, sizes, strict=True)]
        torch.split_with_sizes_copy(together.view(ranks, -1), sizes, 1, out=places)
        for (shards, name, buffer), whole in zip(masks, wholes, strict=True):
            shards.whole[name] = whole[: len(buffer)]
            shards.gathered[name] = buffer, _versions(buffer)


def _versions(buffer: Any) -> tuple[int, int]:
    """Hooks change the local rows and loading changes the DTensor; each has its own version."""
    return buffer._version, buffer.to_local()._version


def _not_saved(
    derived: dict[str, Tensor], again: Callable[[], dict[str, Tensor]]
) -> AbstractContextManager[Any]:
    """A context in which tensors of `derived` are not saved for the backward pass, which calls
    `again()` to derive them again."""
    places = {(t.data_ptr(), t.shape): name for name, t in derived.items()}
    anew: dict[str, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor | str:
        return places.get((tensor.data_ptr(), tensor.shape), tensor)

    def unpack(kept: Tensor | str) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if not anew:
            anew.update(again())
        return anew[kept]

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


@contextmanager
def _showing(layer: Any, tensors: dict[str, Any]) -> Iterator[None]:
    """A context in which `layer` has these parameters and buffers in place of its own."""
    homes = {n: layer._parameters if n in layer._parameters else layer._buffers for n in tensors}
    own = {n: home[n] for n, home in homes.items()}
    shards = vars(layer).get("shards")
    viewed = shards is not None and shards.viewed
    for name, home in homes.items():
        home[name] = tensors[name]
    if shards is not None:
        shards.viewed = True
    try:
        yield
    finally:
        if shards is not None:
            shards.viewed = viewed
        for name, home in homes.items():
            if name in home:  # if not, `restore` has removed it
                home[name] = own[name]


def unsharded(layer: Any) -> AbstractContextManager[None]:
    """`rows` of all ranks, gathered. All ranks must make the same changes."""
    return rows(layer, whole=True)


@contextmanager
@torch.no_grad()
def rows(layer: Any, whole: bool = False) -> Iterator[None]:
    """A context in which sharded tensors of `layer` are plain tensors on the mesh's device: this
    rank's rows, or the `whole`. In-place changes are kept."""
    shards, shown = vars(layer).get("shards"), {}
    viewed = shards is not None and shards.viewed
    held = {} if viewed else {**layer._parameters, **layer._buffers}
    own = {name: tensor for name, tensor in held.items() if is_sharded(tensor)}
    for name, tensor in own.items():
        plain = full(tensor) if whole else rows_of(tensor)
        shown[name] = plain = plain.to(tensor.device_mesh.device_type)
        if isinstance(tensor, nn.Parameter):
            shown[name] = nn.Parameter(plain.detach(), requires_grad=tensor.requires_grad)
    versions = {n: t._version for n, t in shown.items()}
    with _showing(layer, shown):
        yield
    for name, tensor in own.items():
        changed = shown[name].detach()
        if shown[name]._version != versions[name] and (whole or changed.device != tensor.device):
            if whole:
                changed = rows_of(sharded_like(changed, tensor))
            tensor.to_local().copy_(changed)
