"""The time that sparse products saved in a training, for its `result.json`."""

from __future__ import annotations

from typing import Any

from methods.nn.acceleration import Acceleration


def gain(
    acceleration: Acceleration | None, step_ms: float, micro_batches: int
) -> dict[str, Any] | None:
    """The record of how each layer's products ran and why (`Acceleration.as_dict`), and for a
    `step` the milliseconds that sparse products save (`saved_ms`) and its speed-up over dense
    products (`expected_gain`).

    None if no layer has products to choose from.
    """
    if acceleration is None or not acceleration.layers:
        return None
    step = {
        "ms": step_ms,
        "micro_batches": micro_batches,
        "saved_ms": micro_batches * acceleration.saved_ms,
        "expected_gain": acceleration.gain(step_ms, micro_batches),
    }
    return {**acceleration.as_dict(), "step": step}


def summary(speed: dict[str, Any]) -> str:
    """The gain of a step as one line; "" if nothing ran sparse."""
    step = speed["step"]
    if not step["saved_ms"]:
        return ""
    return (
        f"{step['ms']:.4g} ms a step; sparse products save {step['saved_ms']:.3g} ms of it: alone "
        f"they make it {step['expected_gain']:.2f} times as fast"
    )
