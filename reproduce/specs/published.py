"""Looks up the papers' own values in `published.json`."""

import functools
import json
from dataclasses import dataclass, fields
from pathlib import Path

FILE = Path(__file__).with_name("published.json")


@dataclass(frozen=True)
class Published:
    """A published value that was confirmed."""

    value: float | None  # None: the source says so, for example because memory ran out
    unit: str
    evidence: str  # `primary`, or `second-hand` if from somebody's notes or read off a plot
    source: str
    note: str = ""
    confidence: str = "high"  # or `medium`
    doubt: str = ""  # why the printed value is hard to believe

    def text(self, spec: str) -> str:
        """The value as it is printed. spec: the Python format of the number."""
        labels = [self.evidence] * (self.evidence != "primary") + ["doubtful"] * bool(self.doubt)
        label = f" ({', '.join(labels)})" if labels else ""
        if self.value is None:
            return f"none{label}"
        return in_unit(f"{self.value:{spec}}", self.unit) + label

    @property
    def reservation(self) -> str:
        """The reason to treat the value with care, with its source; "" if there is none."""
        if self.value is None:
            return f"some are none: {self.note}"
        if self.doubt:
            return f"as printed in {self.source}, but {self.doubt}"
        if (self.evidence, self.confidence) == ("primary", "high"):
            return ""
        kind = "of medium confidence" if self.evidence == "primary" else self.evidence
        return f"{kind}, from {self.source}" + (f": {self.note}" if self.note else "")


def in_unit(number: str, unit: str) -> str:
    """A formatted number with its unit: `1.5x`, `3.0 ms`, `2`."""
    return f"{number}{'' if unit in ('', 'x') else ' '}{unit}"


@functools.cache
def _cells(path: Path) -> dict[tuple[str, str, str, str], Published]:
    content = json.loads(path.read_text(encoding="utf-8"))
    known, cells = {field.name for field in fields(Published)}, {}
    for cell in content["cells"]:
        cell["source"] = content["sources"][cell["source"]]
        own = {key: value for key, value in cell.items() if key in known}
        cells[cell["work"], cell["table"], cell["row"], cell["column"]] = Published(**own)
    return cells


def look_up(work: str, table: str, row: str, column: str, path: Path = FILE) -> Published | None:
    """The published value of one cell; None if no confirmed value is known."""
    return _cells(path).get((work, table, row, column))


def names_in(work: str, table: str, path: Path = FILE) -> list[tuple[str, str]]:
    """The (row, column) of every value of a table."""
    return [(row, column) for of, one, row, column in _cells(path) if (of, one) == (work, table)]
