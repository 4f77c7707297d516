"""The options that every method takes, checks of options, and what a driver must know of a method
with its options before it calls the hooks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .conversion import PRESETS
from .fp8_gemms import FP8


def number(default: float | None, low: float, high: float = math.inf) -> Any:
    """An option with a default that is None or a number in [low, high]."""
    return field(default=default, metadata={"range": (low, high)})


def choice(default: Any, choices: Any) -> Any:
    """An option with a default that is one of `choices`."""
    return field(default=default, metadata={"choices": choices})


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options that every method takes.

    include, exclude: globs on module names (`transformer.h.0.mlp.c_fc`); a linear is converted
        when an include glob matches and no exclude glob does. `include` is a list of them or one
        word: `ffn`, the feed-forward networks, or `all`, all linears of the transformer blocks, by
        the names of conversion.py.
    total_steps: optimizer steps of the whole training; fractions are resolved against it.
    seed: seed of the method's own randomness (MVUE), separate from that of model and data.
    measure_every: optimizer steps between two measurements of the flip rate; 0 = never. Measured is
        the first choice of masks at or after each multiple of this number.
    flips_by_layer: `metrics` also reports the flip rate of each layer, as `flip_rate.<name>`.
    """

    include: Any = "ffn"  # str | tuple[str, ...]; omegaconf knows no such union
    exclude: tuple[str, ...] = ()
    total_steps: int = 0
    seed: int = 0
    measure_every: int = 10
    flips_by_layer: bool = False

    def __post_init__(self) -> None:
        for name in ("include", "exclude"):
            globs = getattr(self, name)
            if name == "include" and isinstance(globs, str) and globs in PRESETS:
                continue
            if not isinstance(globs, list | tuple) or not all(isinstance(g, str) for g in globs):
                words = f" or one of {', '.join(PRESETS)}" if name == "include" else ""
                raise ValueError(
                    f"{name} must be a list of globs on module names{words}, got {globs!r}"
                )
            object.__setattr__(self, name, tuple(globs))
        for name in ("total_steps", "seed", "measure_every"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name}={value!r}; it must be a whole number")
            if value < 0:
                hint = "; leave it out, the Trainer's callback reads max_steps"
                hint = hint if name == "total_steps" else ""
                raise ValueError(f"{name}={value}; it must not be negative{hint}")
        for name, choices in {"fp8": FP8, "mvue": ("exact", "sequential", "off")}.items():
            if hasattr(self, name):
                check_choice(name, getattr(self, name), choices)
        for name, allowed in self._limits().items():
            if "range" in allowed:
                check_range(name, getattr(self, name), *allowed["range"])
            else:
                check_choice(name, getattr(self, name), allowed["choices"])

    @classmethod
    def _limits(cls) -> dict[str, Mapping[str, Any]]:
        """The limits that `number` and `choice` set, by option; a subclass may change a default."""
        own = [vars(base).get("__dataclass_fields__", {}).values() for base in cls.__mro__[::-1]]
        return {f.name: f.metadata for of_class in own for f in of_class if f.metadata}

    def pattern(self, name: str) -> tuple[int, int]:
        """(n, m) of the converted linear of this name: n non-zeros in m consecutive inputs."""
        return getattr(self, "n", 2), getattr(self, "m", 4)


@dataclass(frozen=True, kw_only=True)
class NMConfig(Config):
    """Options of a method with any N:M pattern: keep n of m consecutive inputs."""

    n: int = 2
    m: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pattern(self.n, self.m, f"n={self.n} and m={self.m}")


@dataclass(frozen=True, kw_only=True)
class PartialConfig(Config):
    """dense_columns: the share of each linear's inputs, those with the largest weights, that stay
    dense (columns.py). Of the products of training only fprop can then run packed, and `metrics`
    counts illegal groups of the other inputs.
    """

    dense_columns: float = number(0.0, 0, 1)


@dataclass(frozen=True)
class Capabilities:
    """The value of `Method.capabilities`.

    mask_period: optimizer steps between two choices of the masks.
    acts_on_gradients: a training without `on_gradients` would be another method's.
    changes_only_weights: the method needs no products of its own, but for options that
        `Method.check_matrix` knows.
    needs_adamw: it works only with AdamW or its own variant of it, as `Method.optimizer` returns,
        because it has its own update rule or reads AdamW's moments.
    quantizes: operands are quantised with one scale per micro-batch, so that the size of a
        micro-batch changes the result.
    ends_dense: the trained model is dense; it is then also fine-tuned densely.
    calibration_sequences: the number of sequences that `Method.calibrate` needs before `convert`; 0
        if it is not needed.
    """

    mask_period: int = 1
    acts_on_gradients: bool = False
    changes_only_weights: bool = False
    needs_adamw: bool = False
    quantizes: bool = False
    ends_dense: bool = False
    calibration_sequences: int = 0


def check_pattern(n: int, m: int, where: str) -> None:
    if not 0 < n < m <= 128:
        raise ValueError(f"{where}; N:M keeps n of m consecutive weights, 0 < n < m <= 128")


def check_range(name: str, value: Any, low: float, high: float) -> None:
    """Raise ValueError for an option that is neither None nor a number in [low, high]."""
    if not isinstance(value, int | float | None):
        raise ValueError(f"{name}={value!r}; it must be a number")
    if value is not None and not (low <= value <= high and value < math.inf):
        words = f"be at least {low:g}" if high == math.inf else f"lie in [{low:g}, {high:g}]"
        raise ValueError(f"{name}={value}; it must {words}")


def check_choice(name: str, value: Any, choices: Any) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}; choose one of {', '.join(map(str, choices))}")
