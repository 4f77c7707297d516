"""Measures a feed-forward network and a whole block of GPT-2, dense and under a method."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import nn

from experiments.bench.timing import Call, in_turns
from experiments.bench.variants import Bench
from models.gpt2 import MLP, Block, GPTConfig
from reproduce.measure.base import MethodLayer, Report, Result
from reproduce.measure.setup import (
    BUFFERS,
    bench,
    check_ffn,
    clock_and_power,
    described,
    ends_dense,
    milliseconds,
    to_compare,
)

MICRO_STEPS = 64  # forward and backward passes in one iteration of the logs of FST's authors


@dataclass(frozen=True, kw_only=True)
class Settings(MethodLayer):
    """A block of GPT-2."""


def measure(config: Settings, _: Report) -> Result:
    """Speed of a feed-forward network (`ffn`) and of a whole GPT-2 block (`block`), in training and
    at inference.

    `<part>_speedup` is that of forward and backward alone, as in FST's logs, where masks are chosen
    and weights packed in the first iteration only. `<part>_step_speedup` includes the hooks of a
    step with one micro-batch, and the step's share of the mask search.
    """
    shape = GPTConfig(1, config.heads, config.width, vocab_size=1, n_inner=config.inner)
    check_ffn(config)
    built = {
        "ffn": lambda: nn.Sequential(OrderedDict(mlp=MLP(shape))),  # a name for the method's globs
        "block": lambda: Block(shape),
    }
    pairs: dict[str, tuple[Bench, Bench]] = {}
    calls: dict[str, Call] = {}
    for part, build in built.items():
        dense, sparse = (bench(config, n, build, ("*mlp.*",)) for n in ("dense", config.method))
        pairs[part] = dense, sparse
        inference = {} if ends_dense(config) else {"inference": sparse}
        named = to_compare(dense, sparse, inference).items()
        calls |= {f"{part} {name}": call for name, call in named}
    found = in_turns(calls, config.on, config.repeats, BUFFERS)
    metrics = clock_and_power(found)
    for part, (_dense, sparse) in pairs.items():
        own = {n.removeprefix(f"{part} "): t for n, t in found.items() if n.startswith(part)}
        times = milliseconds(own, sparse)
        metrics |= {
            f"{part}_dense_ms": MICRO_STEPS * times["dense"],
            f"{part}_sparse_ms": MICRO_STEPS * times["products"],
            f"{part}_speedup": times["dense"] / times["products"],
            f"{part}_step_speedup": times["dense"] / times["step"],
            f"{part}_inference_speedup": 1.0,
        }
        if not ends_dense(config):
            speedup = times["dense inference"] / times["inference"]
            metrics[f"{part}_inference_speedup"] = speedup
    return metrics, described(sparse, found)
