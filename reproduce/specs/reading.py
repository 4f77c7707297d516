"""Reads the files of specs and of measured tables."""

import csv
import hashlib
import io
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
