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


def check_sizes(config: Any) -> None:
    """Refuse the sizes of a text model's config that no model can have.

    Raises:
        ValueError: a size is below 1, or `n_embd` is no multiple of `n_head`.
    """
    for name in ("n_layer", "n_head", "n_embd", "vocab_size", "block_size", "n_inner"):
        if (value := getattr(config, name)) is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if config.n_embd % config.n_head:
        raise ValueError(
            f"n_embd must be a multiple of n_head, got n_embd={config.n_embd}, "
            f"n_head={config.n_head}"
        )
