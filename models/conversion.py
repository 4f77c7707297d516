"""Checks for models that are converted from or to another library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def check_settings(
    kind: str, config: Any, required: Mapping[str, Any], problems: Iterable[str] = ()
) -> None:
    """Refuse a model whose config differs from what our model is.

    Args:
        kind: the name of the architecture.
        required: the settings that the config must have.
        problems: further reasons to refuse it.
    Raises:
        ValueError: naming all settings that differ, and the further reasons.
    """
    different = [
        f"{name}={getattr(config, name)!r} (needs {value!r})"
        for name, value in required.items()
        if getattr(config, name) != value
    ]
    if reasons := [*different, *problems]:
        raise ValueError(f"this {kind} cannot be converted: {'; '.join(reasons)}")


def check_plain(kind: str, names: Iterable[str], expected: Iterable[str]) -> None:
    """Refuse a model with other tensors than its architecture has, as while a sparse method is
    attached.

    Args:
        kind: the name of the architecture.
        names, expected: the names of the model's tensors, and of those of a plain model.
    Raises:
        ValueError: naming the first tensor that differs.
    """
    if extra := sorted({*names} ^ {*expected}):
        raise ValueError(
            f"not a plain {kind} ({extra[0]} and {len(extra) - 1} more names differ); "
            "call the method's finalize(model) first"
        )
