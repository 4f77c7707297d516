"""Measures one linear width -> inner under a method, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.bench import linear
from experiments.bench.timing import in_turns
from reproduce.measure.base import MethodLayer, Metrics, Report, Result
from reproduce.measure.setup import BUFFERS, check_products, clock_and_power, described, matmul


@dataclass(frozen=True, kw_only=True)
class Settings(MethodLayer):
    """A linear width -> inner, on batch * length tokens."""


def measure(config: Settings, _: Report) -> Result:
    """Speed of one linear, forward and backward. `prune_ms`: time to choose masks and
    pack alone."""
    shape = (config.tokens, config.width, config.ffn)
    check_products(config, (config.width, config.ffn))
    of = (shape, config.dtype, config.on, matmul(config), BUFFERS)
    dense, sparse = linear.build("dense", *of), linear.build(config.method, *of)
    calls = {
        "dense": dense.forward_backward,
        "sparse": sparse.whole,
        "prune": lambda _: sparse.hooks(sparse.converted.searching),
    }
    times = in_turns(calls, config.on, config.repeats, BUFFERS)
    metrics: Metrics = {f"{name}_ms": time.ms for name, time in times.items()}
    metrics["speedup"] = times["dense"].ms / times["sparse"].ms
    return metrics | clock_and_power(times), described(sparse, times)
