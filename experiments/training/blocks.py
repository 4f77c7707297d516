"""The transformer blocks of a model, and activation checkpointing block by block."""

from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The transformer blocks by name: members of module lists of one class with linears."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        children = list(module.children())
        if (
            isinstance(module, nn.ModuleList | nn.Sequential)
            and len({type(child) for child in children}) == 1
            and any(isinstance(m, nn.Linear) for m in children[0].modules())
            and not any(f"{name}.".startswith(f"{other}.") for other in found)
        ):
            found |= {f"{name}.{i}": child for i, child in enumerate(children)}
    return found


def trained_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks that are trained, without those of a teacher inside the model."""
    return [b for b in blocks(model).values() if any(p.requires_grad for p in b.parameters())]


def recompute(model: nn.Module) -> None:
    """Make each trained block keep only its input for the backward pass, where it is recomputed.
    The modules keep their identity, names and hooks; only their class changes."""
    for block in trained_blocks(model):
        kind: Any = type(block)
        block.__class__ = _recomputed(kind)


def recomputes(model: nn.Module) -> bool:
    """True if blocks of the model are recomputed in the backward pass (`recompute`)."""
    return any(isinstance(module, _Recomputed) for module in model.modules())


class _Recomputed:
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own: Any = super().forward  # type: ignore[misc]
        if not torch.is_grad_enabled():
            return own(*args, **kwargs)
        return checkpoint(own, *args, use_reentrant=False, **kwargs)


@cache
def _recomputed(cls: Any) -> Any:
    return type(cls.__name__, (_Recomputed, cls), {"__doc__": cls.__doc__})
