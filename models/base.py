"""The base class of models, with a default for each hook that a trainer calls; checks of sizes."""

from __future__ import annotations

from typing import Any

from torch import nn

from models.groups import param_groups


class Model(nn.Module):
    """A model that can be trained: `model(**batch)` returns (output, loss).

    Each hook is called in every optimizer step, before the same hook of the sparse method.
    """

    def param_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Optimizer groups: matrices and embeddings with weight decay, biases and norms without."""
        return param_groups(self.named_parameters(), weight_decay)

    def on_step_begin(self, step: int) -> None:
        """Called before the first micro-batch of optimizer step `step`."""

    def on_gradients(self, step: int) -> None:
        """Called after unscaling and clipping, before `optimizer.step()`."""

    def on_step_end(self, step: int) -> None:
        """Called after `optimizer.step()`."""

    def metrics(self) -> dict[str, float]:
        """The model's own entries in the training log, by name."""
        return {}


def check_sizes(config: Any) -> None:
    """Raise a `ValueError` if a size in the config of a text model is below 1, or if `n_embd` is
    not a multiple of `n_head`."""
    for name in ("n_layer", "n_head", "n_embd", "vocab_size", "block_size", "n_inner"):
        if (value := getattr(config, name)) is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if config.n_embd % config.n_head:
        raise ValueError(
            f"n_embd must be a multiple of n_head, got n_embd={config.n_embd}, "
            f"n_head={config.n_head}"
        )


def check_length(tokens: int, block_size: int) -> None:
    """Raise a `ValueError` if a sequence is longer than the model's longest one."""
    if tokens > block_size:
        raise ValueError(
            f"sequence of {tokens} tokens is longer than the model's block_size={block_size}"
        )
