"""Measures how much slower a block of GPT-2 trains under Bi-Mask than dense."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from experiments.bench.timing import Call, in_turns
from reproduce.measure.base import Layer, Report, Result
from reproduce.measure.setup import BUFFERS, bench, clock_and_power, gpt2


@dataclass(frozen=True, kw_only=True)
class Settings(Layer):
    """A block of GPT-2."""

    products: ClassVar[tuple[str, ...]] = ()


def measure(config: Settings, _: Report) -> Result:
    """Time of a training step of one GPT-2 block under Bi-Mask over that of a dense one, including
    the choice of masks and the step's share of the search for permutations."""
    dense = bench(config, "dense", gpt2(config), ("*",))
    sparse = bench(config, "bi_mask", gpt2(config), ("*",))
    converted, period = sparse.converted, sparse.converted.method.config.permute_every

    def step(i: int, number: int = 1) -> None:
        converted.before(number)
        sparse.forward_backward(i)
        converted.after(number)

    calls: dict[str, Call] = {
        "dense": dense.forward_backward,
        "step": step,
        "step with a search": partial(step, number=0),
    }
    times = in_turns(calls, config.on, config.repeats, BUFFERS)
    found = {name: time.ms for name, time in times.items()}
    search = max(0.0, found["step with a search"] - found["step"])
    metrics = clock_and_power(times) | {
        "dense_ms": found["dense"],
        "step_ms": found["step"],
        "search_ms": search,
        "slow_down": (found["step"] + search / period) / found["dense"],
    }
    return metrics, converted.used
