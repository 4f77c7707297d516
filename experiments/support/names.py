"""Checks of names, seeds and choices for config dataclasses, and the values that identify a run."""

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

SEEDS = (0, 2**63 - 1)  # which random generators take


def digest(value: dict[str, Any]) -> str:
    """Hash of plain values, 16 hex digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


class Identified:
    """Base class of configs that are known by a hash."""

    def identity(self) -> dict[str, Any]:
        """Everything that the result depends on, as plain values."""
        raise NotImplementedError

    def digest(self) -> str:
        """Hash of `identity()`, 16 hex digits."""
        return digest(self.identity())


def check_name(key: str, name: str) -> None:
    """Raise a `ValueError` unless `name`, the value of `key`, is one plain path component."""
    if not re.fullmatch(r"[^\W_][\w.+-]{0,99}", name):
        raise ValueError(
            f"{key}={name!r} names a folder: begin with a letter or digit, then use only letters, "
            "digits and . _ + -, at most 100 characters"
        )


def check_choices(settings: Any, group: str, choices: Mapping[str, Iterable[str]]) -> None:
    """Raise a `ValueError` unless settings have one of their choices. group: as "train." or ""."""
    for name, known in choices.items():
        if (value := getattr(settings, name)) not in known:
            raise ValueError(f"{group}{name}={value}; choose one of {', '.join(known)}")


def check_bounds(settings: Any, group: str, **bounds: tuple[float, float]) -> None:
    """Raise a `ValueError` unless each setting lies between its two bounds, of which an infinite
    one is excluded; None is no number and passes. group: as for `check_choices`."""
    for name, (low, high) in bounds.items():
        value = getattr(settings, name)
        if value is not None and not (low <= value <= high and math.isfinite(value)):
            end = ")" if high == math.inf else "]"
            raise ValueError(f"{group}{name}={value}; it must lie in [{low:,}, {high:,}{end}")


def identity_of(config: Any) -> dict[str, Any]:
    """The fields of a config dataclass that differ from their defaults, as plain values. A run's
    hash covers these alone, so that new options leave it as it is. Whoever changes the default of a
    field gives it another name, because old runs would be taken for runs with the new default."""
    values, found = dataclasses.asdict(config), {}
    for field in dataclasses.fields(config):
        made = field.default_factory
        default = field.default if made is dataclasses.MISSING else made()
        if getattr(config, field.name) != default:
            found[field.name] = values[field.name]
    return found
