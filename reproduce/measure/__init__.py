"""Measures one cell of a speed or memory table on the present device.

Each class of `MEASURES` is a measure. What is measured is compared with a dense model of the same
shape, in turns, on a GPU under a sustained load, after the products agreed with plain formulas.

The package is a driver like those of `experiments`, with `load`, `run` and `finished`. A result is
identified by its settings and the device, and is stored, so that it is measured only once.
"""

import warnings
from typing import Any

import torch

from experiments.bench.timing import allow_repeated_steps
from experiments.config.compose import one_line_errors
from experiments.support import memory, results
from experiments.support.errors import UserError
from experiments.support.typed import typed
from reproduce.measure import layers, operators, packed, sam, slope
from reproduce.measure.adapters import Adapters
from reproduce.measure.base import Base, Report

_ALL: list[type[Base]] = [
    *(Adapters, layers.Linear, layers.GPT2Block, layers.Decoder),
    *(layers.SlowDown, layers.Parts, layers.Training, slope.SlopeLayer, slope.Shapes),
    *(operators.ImposedZeros, operators.Product, operators.Search, operators.Geglu),
    *(packed.Kernels, packed.PackedMLP, packed.Decode, sam.EncoderTraining, sam.EncoderInference),
]
MEASURES = {measure.what: measure for measure in _ALL}


def load(overrides: list[str]) -> Base:
    """The settings of `key=value` overrides in hydra's syntax; the key `what` names the measure."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    with one_line_errors():
        parsed = OverridesParser.create().parse_overrides(overrides)
        values: dict[str, Any] = {override.key_or_group: override.value() for override in parsed}
        values = {k: str(v) if hasattr(v, "text") else v for k, v in values.items()}
        what = values.pop("what", None)
        if what not in MEASURES:
            raise UserError(f"what={what}; choose of {', '.join(MEASURES)}")
        settings: Base = typed(MEASURES[what], what, values)
        return settings


def finished(config: Base) -> dict[str, Any] | None:
    """The stored result of this config on this device, or None."""
    return results.read_finished(config.directory(), config.digest())


def run(config: Base, report: Report = print) -> dict[str, Any]:
    """Measure, unless there is a result already; return the content of `result.json`."""
    stored = finished(config)
    if stored is not None:
        return stored
    memory.free(config.on)  # a measurement that failed still used its memory at its end
    if config.on.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        with warnings.catch_warnings():
            allow_repeated_steps()
            metrics, used = config.measure(report)
    finally:
        torch.set_num_threads(threads)
        memory.free(config.on)
    result = {
        "config_hash": config.digest(),
        "config": config.identity(),
        "seed": config.seed,
        "tier": config.tier,
        "metrics": metrics,
        "backend": used,
    }
    measured = {name: number for name, number in metrics.items() if number is not None}
    report(", ".join(f"{name} {number:.4g}" for name, number in measured.items()))
    return results.write_result(config.directory(), result)
