"""Measures GEGLU, ours and torch's, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from common_kernels import backend, geglu
from experiments.bench import operators
from experiments.bench.timing import Call, in_turns
from reproduce.measure.base import Layer, Report, Result
from reproduce.measure.setup import buffers, clock_and_power


@dataclass(frozen=True, kw_only=True)
class Settings(Layer):
    """Inputs [batch * length, 2 inner]."""

    products: ClassVar[tuple[str, ...]] = ()


def measure(config: Settings, _: Report) -> Result:
    """Throughput of our GEGLU and of torch's, forward and backward, in bytes that must be read and
    written per second.

    The inputs [tokens, 2 inner] are column-major, as sparse products return them (`column`), or
    row-major (`row`).
    """
    tokens, wide = config.tokens, 2 * config.ffn
    count = buffers(config, tokens * wide * config.dtype.itemsize)
    functions = {"ours": geglu, "torch": plain_geglu}
    calls: dict[str, Call] = {}
    for layout in ("column", "row"):
        with config.on:
            x = random(count, (tokens, wide), layout, config.dtype)
            dy = random(count, (tokens, wide // 2), layout, config.dtype)
        for name in ("geglu", "geglu, forward and backward"):
            operators.check(name, x[0])
        for kind, function in functions.items():
            leaves = [t.requires_grad_() for t in x]
            calls[f"{kind}_{layout}_forward"] = partial(forward, function, x)
            calls[f"{kind}_{layout}"] = partial(both, function, leaves, dy)
    times = in_turns(calls, config.on, config.repeats, count)
    entries = tokens * wide * config.dtype.itemsize
    metrics = clock_and_power(times)
    for name, time in times.items():
        moved = (1.5 if name.endswith("_forward") else 4.0) * entries
        metrics |= {f"{name}_ms": time.ms, f"{name}_gbs": moved / time.ms / 1e6}
    metrics["over_torch"] = times["torch_column"].ms / times["ours_column"].ms
    return metrics, backend.resolve(config.on)


def random(count: int, shape: tuple[int, int], layout: str, dtype: torch.dtype) -> list[Tensor]:
    """`count` random matrices of this shape, whose columns or rows are contiguous."""
    if layout == "row":
        return list(torch.randn(count, *shape, dtype=dtype))
    return [x.t() for x in torch.randn(count, *shape[::-1], dtype=dtype)]


def plain_geglu(x: Tensor) -> Tensor:
    """GEGLU by torch's operators, in x's dtype."""
    value, gate = x.chunk(2, -1)
    return value * F.gelu(gate, approximate="tanh")


def forward(function: Callable[[Tensor], Tensor], xs: list[Tensor], i: int) -> Tensor:
    """The function of input number i, computed without autograd."""
    with torch.no_grad():
        return function(xs[i])


def both(
    function: Callable[[Tensor], Tensor], xs: list[Tensor], dys: list[Tensor], i: int
) -> Tensor:
    """The gradient of input number i, by a forward and a backward pass."""
    return operators.gradients(function)(xs[i], dys[i])
