"""The papers' own values, from `published.json`."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("published.json")


@dataclass(frozen=True)
class Published:
    """One confirmed value. evidence: `primary`, or `second-hand` (somebody's notes)."""

    value: float
    unit: str
    evidence: str
    source: str

    def text(self, spec: str) -> str:
        """As printed; `spec` is a Python format."""
        label = "" if self.evidence == "primary" else f" ({self.evidence})"
        return f"{self.value:{spec}}{self.unit and ' '}{self.unit}{label}"


@functools.cache
def _cells(path: Path) -> dict[tuple[str, str, str, str], Published]:
    content = json.loads(path.read_text(encoding="utf-8"))
    return {
        (cell["work"], cell["table"], cell["row"], cell["column"]): Published(
            cell["value"], cell["unit"], cell["evidence"], content["sources"][cell["source"]]
        )
        for cell in content["cells"]
    }


def look_up(work: str, table: str, row: str, column: str, path: Path = FILE) -> Published | None:
    """The value of one cell; None if nobody confirmed it."""
    return _cells(path).get((work, table, row, column))
