"""Checks of values that several groups of the config hold: names of folders, and seeds."""

from __future__ import annotations

import re


def check_name(key: str, name: str) -> None:
    """A ValueError unless a value that names a folder stays one plain part of its path."""
    if not re.fullmatch(r"[^\W_][\w.+-]{0,99}", name):
        raise ValueError(
            f"{key}={name!r} names a folder: begin it with a letter or a digit, then take letters, "
            "digits and . _ + - alone, at most 100"
        )


def check_seed(seed: int, bits: int = 63) -> None:
    """A ValueError for a seed that the random generators do not take."""
    if not 0 <= seed < 2**bits:
        raise ValueError(f"seed={seed}; it must lie in [0, 2**{bits})")
