"""Collects the papers' tables for the page, as they were made here or with the papers' values
alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.support.errors import UserError
from reproduce import coverage
from reproduce.cells import UNKNOWN
from reproduce.grid import OURS, PAPER, SOURCE, Grid
from reproduce.grid import read as read_grid
from reproduce.render import render
from reproduce.report.html import badge
from reproduce.spec import Table

MEASURED = Path(__file__).parents[1] / "measured"
Verdicts = Mapping[tuple[str, str, str], str]  # table, column and row -> verdict


@dataclass(frozen=True)
class Made:
    """A table as it was rendered for a tier. grid: None if there is nothing to show. files: where
    its numbers are; [] if nothing was run for it."""

    tier: str
    header: list[str]
    grid: Grid | None
    files: list[Path] = field(default_factory=list)

    def fact(self, name: str) -> str:
        """The line of the header with this name, `Device` or `Code`; "" if there is none."""
        start = f"{name}: "
        lines = (line for line in self.header if line.startswith(start))
        return next(lines, start).removeprefix(start).rstrip(".")

    @property
    def device(self) -> str:
        """The device of the runs."""
        return self.fact("Device").partition(",")[0]

    @property
    def revisions(self) -> str:
        """The short git revisions of the runs; `-` without any."""
        found = re.findall(r"revision ([0-9a-f]{7,})", self.fact("Code"))
        return ", ".join(name[:7] for name in found) or "-"

    @property
    def where(self) -> str:
        """The tier and the device in words."""
        return f"tier {self.tier}" + (f" on {self.device}" if self.device else "")

    @property
    def has_values(self) -> bool:
        """True if at least one cell has a value."""
        cells = [value for line in self.grid.lines for value in line.values] if self.grid else []
        return any(value not in ("", "-", UNKNOWN) for value in cells)

    @property
    def heads(self) -> list[str]:
        """The headings of the table in one part."""
        assert self.grid is not None
        names = zip(self.grid.groups, self.grid.columns, strict=True)
        return [*self.grid.stubs, *(", ".join(filter(None, name)) for name in names)]

    @property
    def words(self) -> list[int]:
        """The numbers of the columns that name the rows."""
        return [*range(len(self.grid.stubs))] if self.grid else []

    def rows(self, table: str, verdicts: Verdicts) -> list[list[Any]]:
        """The table in the layout of the paper's, with the verdicts on our values."""
        assert self.grid is not None
        sourced, heads = self.grid.stubs[-1] == SOURCE, self.heads[len(self.grid.stubs) :]
        rows: list[list[Any]] = []
        for line in self.grid.lines:
            label = ", ".join(line.names[:-1] if sourced else line.names)
            ours = not sourced or line.names[-1] == OURS
            found = [verdicts.get((table, head, label)) if ours else None for head in heads]
            values = [
                badge(verdict).join([f"{value} ", ""]) if verdict else value
                for value, verdict in zip(line.values, found, strict=True)
            ]
            rows.append([*line.names, *values])
        return rows


def found(table: Table, runs: Path) -> list[Made]:
    """The tiers of a table that were made, the committed ones first; if none was, the largest tier
    with only the paper's values."""
    paths = [*sorted(MEASURED.glob(f"*/{table.name}-*.md"))]
    for tier in table.tiers:
        stem = coverage.stem(table, tier, runs)
        path = stem.with_name(f"{stem.name}.md")
        paths += [path] if path.is_file() else []
    if paths:
        return [read(path) for path in paths]
    tier = [name for name, one in table.tiers.items() if not one.unavailable][-1]
    empty = render(table, tier, [])
    grid = empty.grid.of_source(PAPER) if SOURCE in empty.grid.stubs else None
    return [Made(tier, empty.header, grid)]


def read(path: Path) -> Made:
    """The table in a file that `Rendered.markdown` wrote.

    Raises:
        UserError: the file has no table.
    """
    markdown = path.read_text(encoding="utf-8")
    grid = read_grid(markdown)
    if grid is None:
        raise UserError(f"{path} has no table in it; make it again or remove it")
    unwrapped = markdown.replace("\n  ", " ").splitlines()
    header = [line.removeprefix("- ") for line in unwrapped if line.startswith("- ")]
    files = [path, path.with_suffix(".csv"), path.with_name(f"{path.stem}-runs.csv")]
    tier = path.stem.rpartition("-")[2]
    return Made(tier, header, grid, [path for path in files if path.is_file()])
