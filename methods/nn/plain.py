"""The plain model that a converted one would end as, for `save_pretrained` before `finalize`, and
copies of modules on the meta device."""

import copy
import itertools
import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from . import conversion, dtensors, lowrank, matrices
from .linear import SparseLinear


def save_plain(model: nn.Module) -> None:
    """Let a transformers model write explicit zeros, with low-rank terms in the weights, so that
    `from_pretrained` reads a model that computes the same."""
    transformers = sys.modules.get("transformers")
    if transformers is not None and isinstance(model, transformers.PreTrainedModel):
        layers = {n: m for n, m in model.named_modules() if isinstance(m, SparseLinear)}
        shapes = {name: without_numbers(layer, layer) for name, layer in layers.items()}
        # A partial, so that models can be pickled and a copy of a model saves its own weights.
        vars(model)["save_pretrained"] = partial(_save, model, shapes)


def _save(
    model: Any,
    shapes: dict[str, SparseLinear],
    save_directory: Any,
    is_main_process: bool = True,
    state_dict: dict[str, Tensor] | None = None,
    **options: Any,
) -> Any:
    """`PreTrainedModel.save_pretrained` of `model`, with the state of the plain model."""
    own = model.state_dict() if state_dict is None else state_dict
    whole = {name: dtensors.full(x) for name, x in own.items()}
    state = plain_state(model, whole, shapes)
    kind = type(model)
    return kind.save_pretrained(model, save_directory, is_main_process, state, **options)


def plain_state(
    model: nn.Module, state: dict[str, Tensor], shapes: dict[str, SparseLinear]
) -> dict[str, Tensor]:
    """The state dict of the equivalent plain model, made from `state`, the state dict of `model`.

    shapes: meta-device copies of the sparse layers, needed for those that are sharded.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, SparseLinear | lowrank.LowRankLinear):
            # accelerate wraps blocks with activation checkpointing.
            name = name.replace("_checkpoint_wrapped_module.", "")
            is_sharded = getattr(layer, "shards", None) is not None
            twin: nn.Module = copy.deepcopy(shapes[name] if is_sharded else layer)
            keys = {key: f"{name}.{key}" for key in twin.state_dict()}
            own = {key: state[whole] for key, whole in keys.items() if whole in state}
            if is_sharded:
                fill(twin, own)
            else:
                twin.load_state_dict(own, strict=False)  # it may be that of an average
            if isinstance(twin, SparseLinear):
                with torch.no_grad():
                    twin.restore()
            lowrank.merge(twin)
            conversion.from_linear(twin)
            for key in [key for key in state if key.rpartition(".")[0] == name]:
                del state[key]
            for key, value in twin.state_dict().items():
                state[matrices.plain_key(layer, name, key)] = value.cpu()
    return state


def without_numbers(copied: Any, module: nn.Module, others: dict[int, Any] | None = None) -> Any:
    """A copy of `copied`, which contains `module`, with the module's tensors on the meta device.

    others: replacements in the copy for other objects, by their id.
    """
    known = dict(others or {})
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        known[id(tensor)] = empty
    return copy.deepcopy(copied, known)


def fill(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Give a meta model real tensors, those of `state` if it has them; tied tensors stay tied."""
    filled: dict[int, Tensor] = {}
    for prefix, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in filled:
                    key = f"{prefix}.{name}" if prefix else name
                    found = state[key] if key in state else torch.empty_like(tensor, device="cpu")
                    if isinstance(tensor, nn.Parameter):
                        found = nn.Parameter(found, requires_grad=tensor.requires_grad)
                    filled[id(tensor)] = found
                tensors[name] = filled[id(tensor)]
    for module in model.modules():
        if isinstance(module, SparseLinear):
            module.reload()
