"""Renders finished runs as a table: for people in Markdown, and as CSV with all digits."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from reproduce.execute.jobs import PlacedRun
from reproduce.judge.text import wrapped
from reproduce.render import cells
from reproduce.render.cells import DENSE, OTHER, Cell, Numbers
from reproduce.render.grid import BLANK, OURS, PAPER, SOURCE, STUBS, Grid, Line
from reproduce.render.header import Facts, all_dense, facts, header
from reproduce.specs.reading import read_rows
from reproduce.specs.table import BENCH, Column, Table, TableRow

NOT_OFFERED = "not offered"  # the text of a cell whose row is not run, or not for its variant
Key = tuple[str, str, str]  # labels of variant, row and column
CellOf = Callable[[str, TableRow, Column, str], Cell]  # of variant, row, column and unit


@dataclass(frozen=True)
class Rendered:
    """A rendered table."""

    title: str
    header: list[str]  # the lines above it
    units: dict[str, str]  # of the table's columns, by label
    grid: Grid
    facts: Facts  # on the runs
    summary: list[Numbers]  # a line for every variant and row
    per_run: list[Numbers]  # a line for every run

    def markdown(self) -> str:
        """The header and the table as Markdown, wrapped at 80 characters if words allow it."""
        header = "".join(f"{line}\n" for line in wrapped(f"- {line}" for line in self.header))
        return f"# {self.title}\n\n{header}\n{self.grid.markdown()}"


def render(table: Table, tier: str, runs: list[PlacedRun]) -> Rendered:
    """The table of a tier from finished runs. Cells without a value say why."""
    by_place: dict[tuple[str, str], list[PlacedRun]] = {}
    for run in runs:
        by_place.setdefault((run.place.variant, run.place.row), []).append(run)

    def cell(variant: str, row: TableRow, column: Column, unit: str) -> Cell:
        first = row.against or table.shown_rows(tier)[0].label
        own, baseline = (by_place.get((variant, label), []) for label in (row.label, first))
        made = cells.ours(table, tier, column, own, baseline, unit)
        if row.against and column.show == "paired" and made.numbers.get("n"):
            return Cell(made.text + OTHER, {**made.numbers, "against": row.against})
        dense = made.numbers.get("n") and any(all_dense(run.result) for run in own)
        return Cell(made.text + DENSE, made.numbers) if dense else made

    per_run = [_per_run(table, tier, run) for run in runs]
    return _rendered(table, tier, cell, facts(table, tier, runs), per_run)


def render_measured(table: Table, tier: str, path: Path) -> Rendered:
    """The table of a committed measurement, from the CSV and JSON files that make.py wrote."""
    lines = {(line.get("of", ""), line["method"]): line for line in read_rows(path)}
    known: Facts = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))["facts"]

    def cell(variant: str, row: TableRow, column: Column, unit: str) -> Cell:
        line, start = lines[variant, row.label], f"{column.label}: "
        names = (f"{start}{name}" for name in ("mean", "std", "low", "high", column.show))
        own = {name.removeprefix(start): float(line[name]) for name in names if line.get(name)}
        numbers: Numbers = {**own, "n": int(line.get(f"{start}n") or 0)}
        if not numbers["n"]:
            return cells.ours(table, tier, column, [], [], unit)
        return Cell(cells.text(table, tier, column, numbers, unit), numbers)

    return _rendered(table, tier, cell, known, [])


def _rendered(
    table: Table, tier: str, ours_of: CellOf, known: Facts, per_run: list[Numbers]
) -> Rendered:
    """The table of these cells of ours, with the paper's. known: the facts on the runs."""
    places = [*product(table.variants_of(tier), table.rows_of(tier))]
    units: dict[str, str] = {}
    for column in table.columns:  # the unit of its spec, or else that of its published values
        confirmed_cells = (cells.published_cell(table, *place, column) for place in places)
        theirs = next((cell.unit for cell in confirmed_cells if cell is not None), "")
        units[column.label] = column.unit or theirs
    mine: dict[Key, Cell] = {}
    papers: dict[Key, tuple[Cell, Cell]] = {}
    rows = table.shown_rows(tier)
    for variant, row, column in product(table.variants_of(tier), rows, table.columns):
        own = Cell(NOT_OFFERED, {"n": 0})
        if not row.not_run and (not variant.rows or row.label in variant.rows):
            own = ours_of(variant.label, row, column, units[column.label])
        key = (variant.label, row.label, column.label)
        mine[key] = own
        if table.paper and (column.published or column.label in row.cells):
            papers[key] = cells.paper(table, tier, variant, row, column, own)
    confirmed = {column for (*_, column), (cell, _) in papers.items() if "paper" in cell.numbers}
    shown = [c for c in table.columns if cells.measured(table, tier, c) or c.label in confirmed]
    printed = {column for *_, column in papers} if tier != "smoke" else set()
    with_paper = any(column.label in printed for column in shown)
    unknown = printed - {column.label for column in shown}
    summary: dict[tuple[str, str], Numbers] = {}
    named = any(variant.label for variant in table.variants_of(tier))
    for key, cell in mine.items():
        of, method, label = key
        first: Numbers = {"of": of} if named else {}
        numbers = summary.setdefault((of, method), first | {"method": method, "tier": tier})
        for part in (cell, *papers[key]) if key in papers else (cell,):
            numbers |= {f"{label}: {name}": v for name, v in part.numbers.items()}
    return Rendered(
        title=table.title,
        header=header(table, tier, known, unknown),
        units=units,
        grid=_grid(table, tier, shown, mine, papers if with_paper else None),
        facts=known,
        summary=[*summary.values()],
        per_run=per_run,
    )


def _grid(
    table: Table,
    tier: str,
    columns: list[Column],
    mine: dict[Key, Cell],
    papers: dict[Key, tuple[Cell, Cell]] | None,
) -> Grid:
    """The cells in the layout of the paper's table, which follows from the names of its values.

    Variants, rows or columns of the spec that `published_column` names become columns, and so do
    the spec's columns unless `published_row` names them. All others become rows.

    papers: None if the paper's values are not shown.
    """
    labels: dict[str, list[str]] = {
        "variant": [variant.label for variant in table.variants_of(tier)],
        "row": [row.label for row in table.shown_rows(tier)],
        "column": [column.label for column in columns],
    }
    horizontal = {axis for axis in labels if f"{{{axis}}}" in table.published_column}
    if "{column}" not in table.published_row:
        horizontal.add("column")
    down = [axis for axis in labels if axis not in horizontal]
    # Quantities before variants: what the paper shows comes first, what is ours follows.
    across = [axis for axis in ["column", "variant", "row"] if axis in horizontal]
    # A single variant is named in the header, not in every row.
    single = len(labels["variant"]) == 1 and ["variant"] not in (down, across)
    named = labels.keys() - {"variant" if single else ""}

    def places(axes: list[str]) -> list[dict[str, str]]:
        return [dict(zip(axes, p, strict=True)) for p in product(*(labels[a] for a in axes))]

    def names(place: dict[str, str]) -> list[str]:
        return [label for axis, label in place.items() if axis in named]

    offers = {column.label for column in columns if cells.measured(table, tier, column)}

    def own(key: Key) -> str:
        if key[-1] not in offers or mine[key].text == NOT_OFFERED:
            return BLANK
        return mine[key].text + (papers[key][1].text if papers and key in papers else "")

    lines = []
    for at in places(down):
        every = (at | place for place in places(across))
        keys = [(key["variant"], key["row"], key["column"]) for key in every]
        if papers is not None:
            theirs = [papers[key][0].text if key in papers else BLANK for key in keys]
            lines.append(Line([*names(at), PAPER], theirs))
        source = [OURS] * (papers is not None)
        lines.append(Line([*names(at), *source], [own(key) for key in keys]))
    stubs = [STUBS[axis] for axis in down if axis in named] + [SOURCE] * (papers is not None)
    n = len(table.tiers[tier].seeds)
    of_n = {c.label for c in columns if c.show == "mean_std" and n > 1 and not table.paper}
    groups, heads = [], []
    for place in places(across):
        group, *within = names(place)
        groups.append(group if within else "")
        heads.append(", ".join(within) or group + f" (n={n})" * (group in of_n))
    return Grid(stubs, groups, heads, lines)


def _per_run(table: Table, tier: str, run: PlacedRun) -> Numbers:
    """The values of one run, and where they come from."""
    own: Numbers = {"of": run.place.variant} if run.place.variant else {}
    own |= {"method": run.place.row, "seed": run.place.seed}
    for column in table.columns:
        path = column.value_in(tier)
        if path is not None and cells.offered(table, tier, path):
            own[path] = cells.value(run, path, table.tiers[tier].measure)
    if table.driver == BENCH:
        own["backend"] = run.result["backend"]
    environment = run.result["environment"]
    return own | {
        "config_hash": run.result["config_hash"],
        "directory": str(run.directory),
        "git_revision": environment["git_revision"],
        "git_dirty": environment["git_dirty"],
        "device": environment["device"],
    }
