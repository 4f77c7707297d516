"""Makes dataclasses of plain values: of hydra's configs and of YAML files.

OmegaConf's structured configs are not used: they take seconds for hundreds of configs, and know
neither unions nor values that are typed already.
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_hints = functools.cache(typing.get_type_hints)  # most of the time otherwise

_TRUE, _FALSE = ("true", "yes", "on", "y", "1"), ("false", "no", "off", "n", "0")
_BOOLS = dict.fromkeys(_TRUE, True) | dict.fromkeys(_FALSE, False)


def _is(given: Any, kind: Any) -> bool:
    """True if a value is of a type that is a class; a bool is no number."""
    known = isinstance(kind, type) and isinstance(given, kind)
    return known and isinstance(given, bool) == (kind is bool)


def typed(kind: Any, key: str, given: Any) -> Any:
    """The value `given` as one of the type `kind`, a dataclass for example, of which it has the
    fields, typed or not. Raises a `ValueError` that names the `key`, "" at the top."""
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or _is(given, kind):
        return given
    if dataclasses.is_dataclass(kind) and isinstance(given, Mapping):
        constructor: Any = kind
        hints, fields = _hints(constructor), dataclasses.fields(kind)
        known = [field.name for field in fields]
        if unknown := sorted(str(name) for name in given if name not in known):
            told = f"{key} has no key" if key else "there is no key"
            raise ValueError(f"{told} {', '.join(unknown)}; it takes {', '.join(known)}")
        for field in fields:
            required = field.default is field.default_factory  # both are MISSING
            if required and field.name not in given:
                raise ValueError(f"{key}.{field.name} is missing".lstrip("."))
        parts = {n: typed(hints[n], f"{key}.{n}".lstrip("."), v) for n, v in given.items()}
        return constructor(**parts)
    if origin is typing.Literal:
        if given not in inside:
            raise ValueError(f"{key}={given}; choose of {', '.join(inside)}")
        return given
    if origin in (list, tuple):
        if not isinstance(given, list | tuple):
            raise ValueError(f"{key} must be a list, as in '{key}=[VALUE]'")
        kinds = inside if origin is tuple and inside[-1] is not ... else inside[:1] * len(given)
        if len(given) != len(kinds):
            raise ValueError(f"{key}={list(given)}; it must have {len(kinds)} values")
        each = enumerate(zip(kinds, given, strict=True))
        return origin(typed(own, f"{key}[{n}]", value) for n, (own, value) in each)
    if origin is dict and isinstance(given, Mapping):
        return {str(name): typed(inside[1], f"{key}.{name}", v) for name, v in given.items()}
    if origin is types.UnionType:
        fits = any(_is(given, one) for one in inside)
        return given if fits else typed(inside[0], key, given)
    if type(given) in {float: (int,), str: (int, float)}.get(kind, ()):
        return kind(given)
    if kind is bool and str(given).lower() in _BOOLS:  # `compile=1`, or a text of the environment
        return _BOOLS[str(given).lower()]
    if isinstance(given, str):  # of the environment, for example, where all values are texts
        with suppress(ValueError):
            if kind in (int, float, Path):
                return kind(given)
    raise ValueError(f"{key}: {given!r} is not of type {getattr(kind, '__name__', kind)}")
