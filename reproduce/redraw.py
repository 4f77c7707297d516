"""Redraws the figures of committed measurements from their CSV files: `python -m reproduce.redraw
[TABLE ...]`.

It is needed after the drawing has changed. Nothing is measured.
"""

from __future__ import annotations

import sys
from pathlib import Path

from experiments.support.checkpoint import write_atomic
from reproduce.cells import Numbers
from reproduce.figure import plot, values
from reproduce.paper_speeds import MEASURED
from reproduce.reading import read_rows, read_tables
from reproduce.render import units_of
from reproduce.spec import Table

TIER = "full"


def summary(path: Path) -> list[Numbers]:
    """The lines of a table's CSV file; entries that are numbers are converted."""

    def parsed(text: str) -> float | str:
        try:
            return float(text)
        except ValueError:
            return text

    return [
        {name: parsed(text) if ": " in name else text for name, text in line.items()}
        for line in read_rows(path)
    ]


def redraw(table: Table, source: Path, path: Path) -> None:
    """Write the figure of a measured table to `path` (.png). source: the table's CSV file."""
    data, title = values(table, summary(source)), f"{table.title} ({TIER})"
    write_atomic(path, lambda p: plot(table.figure, data, title, units_of(table, TIER), p))


def main(names: list[str]) -> None:
    """Redraw the figures of the named tables; without names, of all that were measured."""
    for table in read_tables():
        source = MEASURED / f"{table.name}-{TIER}.csv"
        if source.exists() and (not names or table.name in names):
            redraw(table, source, source.with_suffix(".png"))
            print(source.with_suffix(".png"))


if __name__ == "__main__":
    main(sys.argv[1:])
