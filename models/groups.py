"""Sorts a model's parameters into optimizer groups."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import nn


def param_groups(
    named: Iterable[tuple[str, nn.Parameter]], weight_decay: float, spared: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Two groups of the trainable parameters: matrices and embeddings with weight decay; biases,
    norms and the parameters named in `spared` without."""
    groups: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for name, parameter in named:
        if parameter.requires_grad:
            groups[parameter.dim() < 2 or name in spared].append(parameter)
    return [
        {"params": groups[0], "weight_decay": weight_decay},
        {"params": groups[1], "weight_decay": 0.0},
    ]
