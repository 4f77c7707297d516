"""SLoPe whose dense parameters never train: embeddings, norms, biases and the linears left dense.

The training loop of the released package (github.com/Mohammad-Mozaffari/slope, train.py, where it
does not use transformers' Trainer) calls `optimizer.zero_grad()` after the backward pass and before
`optimizer.step()`, so this optimizer, of all that is not compressed, finds no gradients and does
nothing, weight decay included. The compressed weights have an optimizer of their own.

All that is sparse is that of `methods.slope`.
"""

from __future__ import annotations

import torch

from .. import slope

Config = slope.Config


class Method(slope.Method):
    def on_gradients(self, step: int, optimizer: torch.optim.Optimizer | None = None) -> None:
        super().on_gradients(step, optimizer)
        if optimizer is None:
            raise ValueError(
                "released.slope_dense needs the optimizer: on_gradients(step, optimizer)"
            )
        sparse = {id(layer.values) for layer in self._layers()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in sparse:
                    parameter.grad = None
