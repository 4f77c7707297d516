"""The base class of models, with a default for each hook that a trainer calls; the parts that
models share, named sizes, and checks of configs.

Shapes: B sequences, T tokens, C = n_embd channels, H = n_head heads, V = vocab_size.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ClassVar, Self

import torch
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


def sinusoids(length: int, width: int) -> Tensor:
    """The table [length, width] of sin and cos of position / 10000^(2i / width), in alternation
    (Vaswani et al., 2017, arXiv 1706.03762, section 3.5)."""
    frequencies = 10000.0 ** -(torch.arange(0, width, 2) / width)
    angles = torch.arange(length)[:, None] * frequencies
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


class MLP(nn.Module):
    """Feed-forward network, [B, T, C] -> [B, T, C].

    activation: from the outputs of the first linear, `config.ffn_width`, to the inputs of the
        second, of which a `gated` one has half as many.
    """

    def __init__(
        self,
        config: Any,
        activation: Callable[[Tensor], Tensor],
        gated: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.activation, inner = activation, config.ffn_width // (1 + gated)
        self.fc1 = nn.Linear(config.n_embd, config.ffn_width, bias=bias)
        self.fc2 = nn.Linear(inner, config.n_embd, bias=bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.fc2(self.activation(self.fc1(x))))


@torch.no_grad()
def draw_weights(module: nn.Module, std: Callable[[str], float] = lambda name: 0.02) -> None:
    """Draw a module's matrices from N(0, std), given their names, and set biases to zero."""
    for name, parameter in module.named_parameters():
        if parameter.dim() == 2:
            parameter.normal_(std=std(name))
        elif name.endswith("bias"):
            parameter.zero_()


class Sized:
    """Base class of configs with named sizes."""

    sizes: ClassVar[dict[str, dict[str, Any]]]

    @classmethod
    def of_size(cls, size: str, **overrides: Any) -> Self:
        """The config of a named size; `nano` is for the CPU. overrides: other fields."""
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


def check_multiple(config: Any, name: str, of: str) -> None:
    """Raise a `ValueError` if a number in a config is not a multiple of another one."""
    value, factor = getattr(config, name), getattr(config, of)
    if value % factor:
        raise ValueError(f"{name} must be a multiple of {of}, got {name}={value}, {of}={factor}")


def check_choice(config: Any, name: str, *choices: str) -> None:
    """Raise a `ValueError` if a word in a config is none of these."""
    if (value := getattr(config, name)) not in choices:
        *first, last = map(repr, choices)
        raise ValueError(f"{name} must be {', '.join(first)} or {last}, got {value!r}")


def check_length(tokens: int, block_size: int) -> None:
    """Raise a `ValueError` if a sequence is longer than the model's longest one."""
    if tokens > block_size:
        raise ValueError(
            f"sequence of {tokens} tokens is longer than the model's block_size={block_size}"
        )


def converted(
    kind: str, theirs: Any, fields: Mapping[str, str], fixed: Mapping[str, Any], *problems: str
) -> dict[str, Any]:
    """The values of our config for the transformers config `theirs` of a `kind` of model. fields:
    our fields by the names of theirs. fixed: what theirs must have. problems: further reasons to
    refuse it. Raises a `ValueError` that names all reasons and settings that differ."""
    different = [
        f"{name}={getattr(theirs, name)!r} (needs {value!r})"
        for name, value in fixed.items()
        if getattr(theirs, name) != value
    ]
    if reasons := [*different, *problems]:
        raise ValueError(f"this {kind} cannot be converted: {'; '.join(reasons)}")
    return {ours: getattr(theirs, name) for name, ours in fields.items()}


def check_plain(kind: str, names: Iterable[str], expected: Iterable[str]) -> None:
    """Raise a `ValueError` if a `kind` of model has other tensors, `names`, than those `expected`,
    as while a sparse method is attached."""
    if extra := sorted({*names} ^ {*expected}):
        raise ValueError(
            f"not a plain {kind} ({extra[0]} and {len(extra) - 1} more names differ); "
            "call the method's finalize(model) first"
        )


def check_as_built(kind: str, model: Any) -> None:
    """`check_plain` of a model whose class takes its config."""
    with torch.device("meta"):
        check_plain(kind, model.state_dict(), type(model)(model.config).state_dict())


def copied(model: Any, state: Mapping[str, Tensor], like: Any) -> Any:
    """`model` with a copy of the tensors in `state`, in the dtype and mode of the model `like`."""
    model.to(next(like.parameters()).dtype).load_state_dict(state)
    return model.train(like.training)


def split_heads(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in one [B, T, 3 C] -> each [B, H, T, C / H]."""
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).transpose(1, 3).unbind(2)
    return q, k, v


def residual(
    x: Tensor, norm: nn.Module, layer: Callable[[Tensor], Tensor], pre_norm: bool
) -> Tensor:
    """A sub-layer with its residual sum, [..., C] -> [..., C]; its norm precedes it or follows the
    sum."""
    return x + layer(norm(x)) if pre_norm else norm(x + layer(x))
