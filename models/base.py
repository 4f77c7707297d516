"""The base class of models: the hooks that a trainer calls, with a default for each."""

from __future__ import annotations

from typing import Any

from torch import nn

from models.groups import param_groups


class Model(nn.Module):
    """A model that can be trained: `model(**batch)` returns (output, loss).

    Each hook is called in every optimizer step, before that of the sparse method.
    """

    def param_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Optimizer groups: matrices and embeddings are decayed, biases and norms are not."""
        return param_groups(self.named_parameters(), weight_decay)

    def on_step_begin(self, step: int) -> None:
        """Called before the first micro-batch of optimizer step `step`."""

    def on_gradients(self, step: int) -> None:
        """Called after unscaling and clipping, before `optimizer.step()`."""

    def on_step_end(self, step: int) -> None:
        """Called after `optimizer.step()`."""

    def metrics(self) -> dict[str, float]:
        """The model's own entries of the training log, by name."""
        return {}
