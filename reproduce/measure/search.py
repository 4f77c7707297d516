"""Measures the search for transposable masks of a weight."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from common_kernels import backend, transposable_mask24
from common_kernels.masks import ALGORITHMS
from experiments.bench import operators
from experiments.bench.timing import Call, in_turns
from experiments.support.errors import UserError
from reproduce.measure.base import Layer, Report, Result
from reproduce.measure.setup import buffers, clock_and_power


@dataclass(frozen=True, kw_only=True)
class Settings(Layer):
    """A weight [inner, width]."""

    products: ClassVar[tuple[str, ...]] = ()


def measure(config: Settings, _: Report) -> Result:
    """Throughput of the search for transposable masks of a weight [inner, width], in bytes of the
    weight per second: by algorithm, in the precision of the config and in fp32 (`_fp32`)."""
    shape = (config.ffn, config.width)
    dtypes = {"": config.dtype, "_fp32": torch.float32}
    count = buffers(config, math.prod(shape) * config.dtype.itemsize)
    with config.on:
        weights = {key: list(torch.randn(count, *shape, dtype=d)) for key, d in dtypes.items()}
    calls: dict[str, Call] = {}
    for key, rotating in weights.items():
        operators.check("transposable_mask24", rotating[0])
        check_two_approx(rotating[0])
        for algorithm in ALGORITHMS:
            calls[algorithm + key] = partial(search, rotating, algorithm)
    times = in_turns(calls, config.on, config.repeats, count)
    metrics = clock_and_power(times)
    for key, rotating in weights.items():
        own = {algorithm: times[algorithm + key].ms for algorithm in ALGORITHMS}
        metrics |= {f"{a}{key}_ms": ms for a, ms in own.items()}
        metrics |= {f"{a}{key}_gbs": rotating[0].nbytes / ms / 1e6 for a, ms in own.items()}
        metrics[f"over_two_approx{key}"] = own["two_approx"] / own["exact"]
    return metrics, backend.resolve(config.on)


def search(weights: list[Tensor], algorithm: str, i: int) -> Tensor:
    """The mask of weight number i."""
    return transposable_mask24(weights[i], algorithm)


def check_two_approx(w: Tensor) -> None:
    """Raise a `UserError` unless the 2-approximation keeps at most two entries in each row and
    column of a tile, and at least half of the magnitude that the exact search keeps."""
    found, exact = (tiles(transposable_mask24(w, a)) for a in ("two_approx", "exact"))
    magnitude = tiles(w.abs())
    legal = (found.sum(-1) <= 2).all() and (found.sum(-2) <= 2).all()
    kept, best = ((magnitude * mask).sum((-1, -2)) for mask in (found, exact))
    if not (legal and (2 * kept >= best * (1 - 1e-6)).all()):
        raise UserError(
            f"the masks of the 2-approximation are wrong on {tuple(w.shape)}: no time is reported"
        )


def tiles(x: Tensor) -> Tensor:
    """x [4 a, 4 b] as fp64 tiles [a, b, 4, 4]."""
    return x.double().unflatten(0, (-1, 4)).unflatten(-1, (-1, 4)).transpose(1, 2)
