"""Checks of settings that several config groups contain: names, seeds, choices."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any


def check_name(key: str, name: str) -> None:
    """Raise a `ValueError` unless `name`, the value of `key`, can name a folder: one plain path
    component."""
    if not re.fullmatch(r"[^\W_][\w.+-]{0,99}", name):
        raise ValueError(
            f"{key}={name!r} names a folder: begin with a letter or digit, then use only letters, "
            "digits and . _ + -, at most 100 characters"
        )


def check_seed(seed: int, bits: int = 63) -> None:
    """Raise a `ValueError` unless the random generators take this seed."""
    if not 0 <= seed < 2**bits:
        raise ValueError(f"seed={seed}; it must lie in [0, 2**{bits})")


def check_choices(settings: Any, group: str, choices: Mapping[str, Iterable[str]]) -> None:
    """Raise a `ValueError` unless each setting named in `choices` has one of its values. group: its
    key with a dot, "" at the top."""
    for name, known in choices.items():
        if (value := getattr(settings, name)) not in known:
            raise ValueError(f"{group}{name}={value}; choose one of {', '.join(known)}")
