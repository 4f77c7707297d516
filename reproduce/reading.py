"""Reads the spec files into the dataclasses of spec.py.

By the C parser of YAML and without OmegaConf, which takes seconds for all of them.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from pathlib import Path
from typing import Any

from experiments.support.errors import UserError
from reproduce.spec import Table

TABLES = Path(__file__).parent / "tables"


def read_table(path: Path) -> Table:
    """The table of one spec file.

    Raises:
        UserError: a key that does not exist or is missing, or a value of the wrong kind.
    """
    import yaml

    try:
        return build(Table, {"name": path.stem, **_content(path)}, "the file")
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from error


def _content(path: Path) -> dict[str, Any]:
    """The content of a spec file; keys that it lacks come from the table that it is `based_on`, if
    any."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    content = yaml.load(path.read_text(encoding="utf-8"), loader)
    if not isinstance(content, dict):
        raise ValueError("it holds no keys")
    base = content.pop("based_on", None)
    if base is None:
        return content
    other = path.with_name(f"{base}.yaml")
    if not other.is_file():
        raise ValueError(f"based_on: there is no {other.name}")
    return {**_content(other), **content}


def read_tables(folder: Path = TABLES) -> list[Table]:
    """All tables in a folder, sorted by name."""
    return [read_table(path) for path in sorted(folder.glob("*.yaml"))]


def build(kind: Any, given: Any, where: str) -> Any:
    """The plain value `given` converted to the type `kind`, dataclasses included.

    Raises:
        ValueError: it is none; the message says where.
    """
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(given, dict):
        hints = typing.get_type_hints(kind)
        fields = {field.name: field for field in dataclasses.fields(kind)}
        if unknown := sorted(str(key) for key in given.keys() - fields.keys()):
            known = ", ".join(fields)
            raise ValueError(f"{where} has no key {', '.join(unknown)}; it takes {known}")
        values = {k: build(hints[k], v, f"{where}: {k}") for k, v in given.items()}
        for name, field in fields.items():
            required = field.default is field.default_factory  # both are MISSING
            if required and name not in given:
                raise ValueError(f"{where}: {name} is missing")
        make: Any = kind
        return make(**values)
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
        raise ValueError(f"{where}: {given!r} is no {name}")
    return given
