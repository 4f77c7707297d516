"""Reads YAML files into dataclasses: the specs of tables, blocks and claims.

OmegaConf is not used, because it would take seconds for all of the specs.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import hashlib
import io
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from experiments.support.errors import UserError, one_line

MEASURED = Path(__file__).parents[1] / "measured" / "h200"


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file; [] without one."""
    if not path.is_file():
        return []
    content, sums = path.read_bytes(), path.with_name("SHA256SUMS")
    line = f"{hashlib.sha256(content).hexdigest()}  {path.name}"
    if sums.is_file() and line not in sums.read_text(encoding="utf-8").splitlines():
        anew = f"if it was measured anew, run `sha256sum *.csv > {sums.name}` in its folder"
        raise UserError(f"{path} does not fit {sums.name}; restore it or, {anew}")
    return list(csv.DictReader(io.StringIO(content.decode(), newline="")))


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys with values of a YAML file, read by the C parser if it is installed, which is much
    faster. Raises a `yaml.YAMLError`, or a `ValueError` if it has no keys."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    content = yaml.load(path.read_text(encoding="utf-8"), loader)
    if not isinstance(content, dict):
        raise ValueError("it has no keys")
    return content


@contextmanager
def errors_in(path: Path) -> Iterator[None]:
    """A context for reading `path`: errors in its content become a `UserError` naming it."""
    import yaml

    try:
        yield
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: {one_line(error)}") from error


_hints = functools.cache(typing.get_type_hints)  # most of the time otherwise


def build(kind: Any, given: Any, where: str) -> Any:
    """The plain value `given` converted to the type `kind`, which may be a dataclass. Raises a
    `ValueError` that says `where` the value is if it cannot be converted."""
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(given, dict):
        constructor: Any = kind
        hints, fields = _hints(constructor), dataclasses.fields(kind)
        if unknown := sorted(str(key) for key in given.keys() - hints.keys()):
            known = ", ".join(field.name for field in fields)
            raise ValueError(f"{where} has no key {', '.join(unknown)}; it takes {known}")
        for field in fields:
            required = field.default is field.default_factory  # both are MISSING
            if required and field.name not in given:
                raise ValueError(f"{where}: {field.name} is missing")
        return constructor(**{k: build(hints[k], v, f"{where}: {k}") for k, v in given.items()})
    if origin is typing.Literal:
        if given not in inside:
            raise ValueError(f"{where}={given}; choose of {', '.join(inside)}")
        return given
    if origin is list and isinstance(given, list):
        return [build(inside[0], v, f"{where}[{n}]") for n, v in enumerate(given)]
    if origin is dict and isinstance(given, dict):
        return {str(k): build(inside[1], v, f"{where}.{k}") for k, v in given.items()}
    if origin is types.UnionType:  # X | None
        return None if given is None else build(inside[0], given, where)
    if kind is float and isinstance(given, int) and not isinstance(given, bool):
        return float(given)
    if not isinstance(kind, type) or type(given) is not kind:
        name = getattr(kind, "__name__", str(kind))
        raise ValueError(f"{where}: {given!r} is not of type {name}")
    return given
