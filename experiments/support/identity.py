"""The plain values by which a config dataclass enters a run's hash."""

from __future__ import annotations

import dataclasses
from typing import Any


def identity_of(config: Any) -> dict[str, Any]:
    """The fields of a config dataclass that differ from their defaults, as plain values.

    A run's hash covers these alone, so that it stays when an option is added, or one that nobody
    set is removed. Whoever changes the default of a field gives the field another name, because
    old runs would be taken for runs with the new default.
    """
    values = dataclasses.asdict(config)
    return {
        field.name: values[field.name]
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != _default(field)
    }


def _default(field: dataclasses.Field[Any]) -> Any:
    """The default of a field; `MISSING` without one."""
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()
