"""Measures an MLP, forward and backward, whose 2:4 weights are packed in every step."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.bench.timing import Call, in_turns
from models.gpt2 import MLP, GPTConfig
from reproduce.measure.base import MethodLayer, Report, Result
from reproduce.measure.packed import microseconds, packing
from reproduce.measure.setup import BUFFERS, bench, check_ffn, clock_and_power


@dataclass(frozen=True, kw_only=True)
class Settings(MethodLayer):
    """An MLP width -> inner -> width."""


def measure(config: Settings, _: Report) -> Result:
    """Times of forward and backward of an MLP, dense and with 2:4 weights that are chosen and
    packed in every step, and of the calls of `packing` on its input, in microseconds."""
    shape = GPTConfig(1, 1, config.width, vocab_size=1, n_inner=config.inner)
    check_ffn(config)
    built = {
        label: bench(config, name, lambda: MLP(shape), ("*",))
        for label, name in {"dense": "dense", "sparse": config.method}.items()
    }
    inputs = [x.detach().flatten(0, 1) for x in built["dense"].inputs]
    calls: dict[str, Call] = {
        "dense": built["dense"].forward_backward,
        "sparse": built["sparse"].whole,
        **packing(inputs),
    }
    times = in_turns(calls, config.on, config.repeats, BUFFERS)
    return microseconds(times) | clock_and_power(times), built["sparse"].converted.used
