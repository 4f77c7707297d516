"""The plain values by which a config dataclass enters a run's hash."""

from __future__ import annotations

import dataclasses
from typing import Any


def identity_of(config: Any) -> dict[str, Any]:
    """The fields of a config dataclass that a run's hash covers, as plain values.

    A field that was added after runs had been made carries `metadata={"added": True}`. It counts
    only if it differs from its default, so that those runs keep their hashes.
    """
    values = dataclasses.asdict(config)
    for field in dataclasses.fields(config):
        if field.metadata.get("added") and getattr(config, field.name) == field.default:
            del values[field.name]
    return values
