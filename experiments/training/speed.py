"""The time that sparse products saved in a training, for its `result.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.support.results import FILE, NoResult, check_shape, read_training
from methods.nn.acceleration import Acceleration

_SHAPE = {"config": {"train": dict, "impl": dict}, "environment": {"device": str}}
# Settings that do not change the time of a step.
_IDLE = ("matmul", "checkpoint_every", "loggers")


def gain(
    acceleration: Acceleration | None, step_ms: float, micro_batches: int, dense_ms: float | None
) -> dict[str, Any] | None:
    """The record of how each layer's products ran and why (`Acceleration.as_dict`), and for a
    `step` the milliseconds that sparse products save (`saved_ms`) and its speed-up over dense:
    `expected_gain` from the products alone, and `measured_gain` if there is a dense run
    (`of_dense`).

    None if no layer has products to choose from.
    """
    if acceleration is None or not acceleration.layers:
        return None
    step = {
        "ms": step_ms,
        "micro_batches": micro_batches,
        "saved_ms": micro_batches * acceleration.saved_ms,
        "expected_gain": acceleration.gain(step_ms, micro_batches),
        "dense_ms": dense_ms,
        "measured_gain": None if dense_ms is None else dense_ms / step_ms,
    }
    return {**acceleration.as_dict(), "step": step}


def summary(speed: dict[str, Any]) -> str:
    """The gain of a step as one line; "" if nothing ran sparse."""
    step = speed["step"]
    if not step["saved_ms"]:
        return ""
    line = (
        f"{step['ms']:.4g} ms a step; sparse products save {step['saved_ms']:.3g} ms of it: alone "
        f"they make it {step['expected_gain']:.2f} times as fast"
    )
    if step["measured_gain"] is None:
        return line
    return f"{line}; measured beside the dense run: {step['measured_gain']:.2f}"


def of_dense(directory: Path, config: dict[str, Any], device: str) -> float | None:
    """Milliseconds of a step of the same training by `method=dense`, if one was finished on this
    device beside `directory`; None otherwise."""
    for path in sorted(directory.parents[1].glob(f"dense*/seed*/{FILE}")):
        try:
            result = read_training(path.parent)
            check_shape(path.parent, result, _SHAPE)
        except NoResult:
            continue
        alike = _of_steps(result["config"]) == _of_steps(config)
        if alike and result["environment"]["device"] == device and "step_seconds" in result:
            return 1e3 * float(result["step_seconds"])
    return None


def _of_steps(config: dict[str, Any]) -> dict[str, Any]:
    """The settings, apart from the method, on which the time of a step depends."""
    impl = {key: value for key, value in config["impl"].items() if key not in _IDLE}
    parts = {"model": config["model"], "train": config["train"], "impl": impl}
    return json.loads(json.dumps(parts))  # in memory it has tuples, in a file lists
