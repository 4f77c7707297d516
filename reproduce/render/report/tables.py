"""Collects the papers' tables for the page, as they were made here or with the papers' values
alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from reproduce import records
from reproduce.execute.blocks import EVIDENCE
from reproduce.execute.jobs import finished_runs, plan
from reproduce.render import listing
from reproduce.render.grid import PAPER
from reproduce.render.table import Rendered, render, render_measured
from reproduce.specs.table import Table

MEASURED = Path(__file__).parents[2] / "measured"


@dataclass(frozen=True)
class Made:
    """A table as it was rendered for a tier."""

    tier: str
    rendered: Rendered
    files: list[Path] = field(default_factory=list)  # where its numbers are, if it was run

    @property
    def where(self) -> str:
        """The tier and the device in words."""
        device = self.rendered.facts["Device"].partition(",")[0]
        return f"tier {self.tier}" + (f" on {device}" if device else "")


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
    papers = [line for line in empty.grid.lines if line.names[-1] == PAPER]
    return [Made(tier, replace(empty, grid=replace(empty.grid, lines=papers)))]


def _of(tier: str, rendered: Rendered, stem: Path) -> Made:
    files = [stem.with_name(stem.name + end) for end in (".md", ".csv", "-runs.csv")]
    return Made(tier, rendered, [path for path in files if path.is_file()])
