"""The bytes that a model under a method holds between steps."""

from __future__ import annotations

import torch

from experiments.bench.variants import Converted
from experiments.support.memory import buffer_bytes


def parts(converted: Converted, optimizer: torch.optim.Optimizer | None = None) -> dict[str, int]:
    """The bytes held between steps: parameters (their gradients take the same), the optimizer's
    state, and the converted layers' masks, packed operands and dense operands."""
    sizes = {"weights": sum(p.nbytes for p in converted.model.parameters())}
    if optimizer is not None:
        state = [t for s in optimizer.state.values() for t in s.values()]
        sizes["optimizer"] = sum(t.nbytes for t in state if isinstance(t, torch.Tensor))
    for kind in ("masks", "packed", "operands"):
        sizes[kind] = sum(buffer_bytes(layer, kind) for layer in converted.layers.values())
    return sizes


def trained_and_held(converted: Converted, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """The bytes of weights, gradients and optimizer state, and of everything held between steps."""
    sizes = parts(converted, optimizer)
    trained = 2 * sizes["weights"] + sizes["optimizer"]
    return trained, trained + sum(sizes[kind] for kind in ("masks", "packed", "operands"))
