"""Copies of modules on the meta device, and real tensors for them."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from torch import Tensor, nn

from .linear import SparseLinear


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
    """Give a model on the meta device real tensors, those of `state` if it has them; tied tensors
    stay tied."""
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
