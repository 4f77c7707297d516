"""Collects the papers' tables for the page, as they were made here or with the papers' values
alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from reproduce import records
from reproduce.execute.blocks import EVIDENCE
from reproduce.execute.jobs import finished_runs, plan
from reproduce.render import listing
from reproduce.render.cells import UNKNOWN
from reproduce.render.grid import BLANK, OURS, PAPER, SOURCE
from reproduce.render.report.html import badge
from reproduce.render.table import Rendered, render, render_measured
from reproduce.specs.table import Table

MEASURED = Path(__file__).parents[2] / "measured"
Verdicts = Mapping[tuple[str, str, str], str]  # table, column and row -> verdict


@dataclass(frozen=True)
class Made:
    """A table as it was rendered for a tier. files: where its numbers are; [] if nothing was run
    for it."""

    tier: str
    rendered: Rendered
    files: list[Path] = field(default_factory=list)

    @property
    def device(self) -> str:
        """The device of the runs."""
        return self.rendered.facts["Device"].partition(",")[0]

    @property
    def revisions(self) -> str:
        """The short git revisions of the runs; `-` without any."""
        found = re.findall(r"revision ([0-9a-f]{7,})", self.rendered.facts["Code"])
        return ", ".join(name[:7] for name in found) or "-"

    @property
    def where(self) -> str:
        """The tier and the device in words."""
        return f"tier {self.tier}" + (f" on {self.device}" if self.device else "")

    @property
    def has_values(self) -> bool:
        """True if at least one cell has a value."""
        cells = {value for line in self.rendered.grid.lines for value in line.values}
        return bool(cells - {"", BLANK, UNKNOWN})

    @property
    def heads(self) -> list[str]:
        """The headings of the table in one part."""
        grid = self.rendered.grid
        names = zip(grid.groups, grid.columns, strict=True)
        return [*grid.stubs, *(", ".join(filter(None, name)) for name in names)]

    def rows(self, table: str, verdicts: Verdicts) -> list[list[Any]]:
        """The table in the layout of the paper's, with the verdicts on our values."""
        grid = self.rendered.grid
        sourced, heads = grid.stubs[-1] == SOURCE, self.heads[len(grid.stubs) :]
        rows: list[list[Any]] = []
        for line in grid.lines:
            if set(line.values) == {BLANK}:
                continue
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
    made = []
    for tier in table.tiers:
        for path in sorted(MEASURED.glob(f"*/{table.name}-{tier}.csv")):
            made.append(_of(tier, render_measured(table, tier, path), path.with_suffix("")))
    for tier, one in table.tiers.items():
        if one.block:
            collected = records.collect(table, tier, runs)
            path = EVIDENCE / f"{one.block}.jsonl"
            if collected.runs and path.is_file():
                made.append(Made(tier, render(collected.table, tier, collected.runs), [path]))
        elif listing.read_progress(table, tier, runs) is not None:
            rendered = render(table, tier, finished_runs(plan(table, tier, runs)))
            made.append(_of(tier, rendered, listing.stem(table, tier, runs)))
    if made:
        return made
    tier = [name for name, one in table.tiers.items() if not one.unavailable][-1]
    empty = render(table, tier, [])
    grid = (
        empty.grid.of_source(PAPER) if SOURCE in empty.grid.stubs else replace(empty.grid, lines=[])
    )
    return [Made(tier, replace(empty, grid=grid))]


def _of(tier: str, rendered: Rendered, stem: Path) -> Made:
    files = [stem.with_name(stem.name + end) for end in (".md", ".csv", "-runs.csv")]
    return Made(tier, rendered, [path for path in files if path.is_file()])
