"""Makes the page's section on the papers' tables, as they were made here or with the papers' values
alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from experiments.support.errors import UserError
from reproduce import coverage
from reproduce.cells import UNKNOWN
from reproduce.grid import OURS, PAPER, SOURCE, Grid
from reproduce.grid import read as read_grid
from reproduce.render import render
from reproduce.report import html
from reproduce.report.figures import badge
from reproduce.report.html import Markup, tag
from reproduce.report.links import Links
from reproduce.spec import Table

MEASURED = Path(__file__).parents[1] / "measured"
Verdicts = Mapping[tuple[str, str, str], str]  # table, column and row -> verdict
ArmsOf = Callable[[Table], Markup | None]


@dataclass(frozen=True)
class Made:
    """A table as it was rendered for a tier. path: its file; None if nothing was run for it. grid:
    None if there is nothing to show."""

    tier: str
    path: Path | None
    header: list[str]
    grid: Grid | None

    def fact(self, name: str) -> str:
        """The line of the header with this name, `Device` or `Code`; "" if there is none."""
        start = f"{name}: "
        lines = (line for line in self.header if line.startswith(start))
        return next(lines, start).removeprefix(start).rstrip(".")


def found(table: Table, runs: Path) -> list[Made]:
    """The tiers of a table that were made, the committed ones first; if none was, the largest tier
    with only the paper's values."""
    paths = [*sorted(MEASURED.glob(f"*/{table.name}-*.md"))]
    paths += [path for tier in table.tiers if (path := _own(table, tier, runs)).is_file()]
    if paths:
        return [read(path) for path in paths]
    offered = [name for name, tier in table.tiers.items() if not tier.unavailable]
    tier = offered[-1]
    empty = render(table, tier, [])
    grid = empty.grid.of_source(PAPER) if SOURCE in empty.grid.stubs else None
    return [Made(tier, None, empty.header, grid)]


def _own(table: Table, tier: str, runs: Path) -> Path:
    stem = coverage.stem(table, tier, runs)
    return stem.with_name(f"{stem.name}.md")


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
    return Made(path.stem.rpartition("-")[2], path, header, grid)


def section(
    tables: list[Table], runs: Path, verdicts: Verdicts, arms: ArmsOf, links: Links
) -> Markup:
    """The section on every table and figure of the papers and this project's own tables.

    arms: makes the rows of a table that have an arm in a block.
    """
    parts = []
    own = [table for table in tables if table.paper is None]
    parts += [_table(table, "", runs, verdicts, arms, links) for table in own]
    for title, listed in coverage.items().items():
        parts.append(tag("h3", title))
        absent = []
        for item in listed:
            specs = [t for t in tables if (t.paper, t.number) == (item.paper, item.number)]
            parts += [_table(table, item.name, runs, verdicts, arms, links) for table in specs]
            if not specs:
                absent.append(tag("li", f"{item.name}: {item.caption}. {item.reason}."))
        if absent:
            summary = f"{len(absent)} not covered, with reasons"
            parts.append(html.details(summary, tag("ul", absent)))
    return html.text(parts)


def _table(
    table: Table, name: str, runs: Path, verdicts: Verdicts, arms: ArmsOf, links: Links
) -> Markup:
    made = found(table, runs)
    small = arms(table)
    states = [_where(one) for one in made if one.path is not None]
    states += ["small models of a block"] if small else []
    state = f"made: {', '.join(states)}" if states else "not run"
    start = f"{name[:1].upper()}{name[1:]}: " if name else ""
    title = table.title.partition(": ")[2] if name else table.title
    summary = [tag("strong", start, title), " ", tag("span", state, class_="state")]
    return html.details(
        summary,
        small,
        [_made(table, one, verdicts, links) for one in made],
        id=html.slug("table", table.name),
    )


def _where(made: Made) -> str:
    device = made.fact("Device").partition(",")[0]
    return f"tier {made.tier}" + (f" on {device}" if device else "")


def _made(table: Table, made: Made, verdicts: Verdicts, links: Links) -> Markup:
    device = made.fact("Device").partition(",")[0] or "-"
    revision = revisions(made.fact("Code"))
    source: list[object] = [f"Tier {made.tier} was not run here."]
    if table.paper:
        shown = "above are the paper's" if _has_values(made.grid) else "of the paper are unknown"
        source = [f"Tier {made.tier} was not run here; the values {shown}."]
    if made.path is not None:
        paths = [made.path, made.path.with_suffix(".csv")]
        paths.append(made.path.with_name(f"{made.path.stem}-runs.csv"))
        files = html.listed([links.to(path) for path in paths if path.is_file()])
        source = ["From ", files, f"; revision {revision}, {html.unbroken(device)}."]
    paper = f" paper={table.paper}" if table.paper else ""
    line = f"python -m reproduce {table.command}{paper} tier={made.tier}"
    return html.text(
        _grid(table, made, verdicts) if _has_values(made.grid) else None,
        html.details("Settings and caveats", tag("ul", [tag("li", h) for h in made.header])),
        tag("p", source, " To make it:"),
        html.command(line),
    )


def _has_values(grid: Grid | None) -> bool:
    """True if at least one cell has a value."""
    cells = [value for line in grid.lines for value in line.values] if grid else []
    return any(value not in ("", "-", UNKNOWN) for value in cells)


def _grid(table: Table, made: Made, verdicts: Verdicts) -> Markup:
    """The table in the layout of the paper's, in one part, with the verdicts on our values."""
    assert made.grid is not None
    grid = made.grid
    sourced = grid.stubs[-1] == SOURCE
    heads = [", ".join(filter(None, name)) for name in zip(grid.groups, grid.columns, strict=True)]
    rows = []
    for line in grid.lines:
        label = ", ".join(line.names[:-1] if sourced else line.names)
        ours = not sourced or line.names[-1] == OURS
        found = [verdicts.get((table.name, head, label)) if ours else None for head in heads]
        values: list[object] = [
            [value, " ", badge(verdict)] if verdict else value
            for value, verdict in zip(line.values, found, strict=True)
        ]
        rows.append([*line.names, *values])
    words = range(len(grid.stubs))
    return html.table(f"{table.title}, tier {made.tier}", [*grid.stubs, *heads], rows, words)


def revisions(line: str) -> str:
    """The short git revisions that a line of a header names; `-` if there is none."""
    return ", ".join(name[:7] for name in re.findall(r"revision ([0-9a-f]{7,})", line)) or "-"
