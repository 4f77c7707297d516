"""The base class of models, with a default for each hook that a trainer calls; named sizes, and
checks of sizes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, ClassVar, Self

from torch import Tensor, nn


def param_groups(
    named: Iterable[tuple[str, nn.Parameter]], weight_decay: float, no_decay: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Two groups of the trainable parameters: matrices and embeddings with weight decay; biases,
    norms and the parameters named in `no_decay` without."""
    groups: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for name, parameter in named:
        if parameter.requires_grad:
            groups[parameter.dim() < 2 or name in no_decay].append(parameter)
    return [
        {"params": groups[0], "weight_decay": weight_decay},
        {"params": groups[1], "weight_decay": 0.0},
    ]


class SquaredReLU(nn.Module):
    """relu(x)^2."""

    def forward(self, x: Tensor) -> Tensor:
        positive = x.relu()
        return positive * positive


class Model(nn.Module):
    """A model that can be trained: `model(**batch)` returns (output, loss).

    Each hook is called in every optimizer step, before the same hook of the sparse method.
    """

    def num_params(self) -> int:
        """Number of parameters; a tied weight is counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

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


class Sized:
    """Base class of configs with named sizes."""

    sizes: ClassVar[dict[str, dict[str, Any]]]

    @classmethod
    def of_size(cls, size: str, **overrides: Any) -> Self:
        """The config of a named size; `nano` is for the CPU. overrides: fields with other
        values."""
        if size not in cls.sizes:
            choices = ", ".join(cls.sizes)
            raise ValueError(f"unknown size {size!r} of a {cls.__name__}; choose from {choices}")
        return cls(**{**cls.sizes[size], **overrides})


class TextConfig(Sized):
    """Base class of the configs of text models."""

    n_embd: int
    n_inner: int | None

    @property
    def ffn_width(self) -> int:
        """Outputs of the first linear of a feed-forward network."""
        return 4 * self.n_embd if self.n_inner is None else self.n_inner


def check_sizes(config: Any) -> None:
    """Raise a `ValueError` if `n_embd` in the config of a text model is not a multiple of
    `n_head`."""
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
