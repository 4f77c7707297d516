"""Renders finished runs as a table: Markdown and terminal for people, CSV with all digits."""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

from experiments.bench.timing import load_text
from reproduce.cells import (
    MARK,
    OTHER,
    Cell,
    Numbers,
    compared,
    measured,
    offered,
    ours,
    paper,
    published_cell,
    value,
)
from reproduce.engine import PlacedRun
from reproduce.grid import BLANK, OURS, PAPER, SOURCE, STUBS, WIDTH, Grid, Line
from reproduce.scale import of_records
from reproduce.spec import BENCH, COMPARING, Column, Table, TableRow, Variant

NOT_OFFERED = "not offered"  # by a row or a variant
Key = tuple[str, str, str]  # labels of variant, row and column


@dataclass(frozen=True)
class Rendered:
    """A rendered table. header: the lines above it. grid: its rows and columns as printed. units:
    by the table's columns, which need not be columns of the grid. summary: the long form, a line
    for every variant and row."""

    title: str
    header: list[str]
    units: dict[str, str]
    grid: Grid
    summary: list[Numbers]
    per_run: list[Numbers]

    def markdown(self) -> str:
        """The header and the table as Markdown, in lines of 80 characters where words allow."""
        header = "".join(f"{_wrapped(line)}\n" for line in self.header)
        return f"# {self.title}\n\n{header}\n{self.grid.markdown()}"

    def print(self) -> None:
        """Print header and table on the terminal, in the same parts as in Markdown."""
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table as RichTable

        console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
        console.print(f"\n{self.title}", style="bold", markup=False)
        for line in self.header:
            console.print(_wrapped(line, console.width), markup=False)
        for part in self.grid.parts(min(WIDTH, console.width)):
            group = escape(part.groups[0]) or None
            table = RichTable(box=SIMPLE_HEAD, title=group, title_justify="left")
            for head in part.stubs:
                table.add_column(escape(head), overflow="fold")
            for head in part.columns:
                table.add_column(escape(head), justify="right", overflow="fold")
            for row in part.printed():
                table.add_row(*map(escape, [*row.names, *row.values]))
            console.print(table)


def _wrapped(line: str, width: int = WIDTH) -> str:
    return textwrap.fill(
        f"- {line}", width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def render(table: Table, tier: str, runs: list[PlacedRun]) -> Rendered:
    """The table of a tier from the finished runs, in the paper's rows and columns; cells that are
    missing say so."""
    variants = table.variants_of(tier)
    rows = [row for row in table.rows_of(tier) if not row.stage]
    mine: dict[Key, Cell] = {}
    papers: dict[Key, tuple[Cell, Cell]] = {}
    units = units_of(table, tier)
    for variant in variants:
        of = {
            row.label: [
                r for r in runs if (r.place.variant, r.place.row) == (variant.label, row.label)
            ]
            for row in rows
        }
        for row in rows:
            for column in table.columns:
                key = (variant.label, row.label, column.label)
                there = not row.not_run and (not variant.rows or row.label in variant.rows)
                cell = Cell(NOT_OFFERED, {"n": 0})
                if there:
                    runs_of, baseline = of[row.label], of[row.against or rows[0].label]
                    cell = ours(table, tier, column, runs_of, baseline, units[column.label])
                    if row.against and column.show in COMPARING and cell.numbers.get("n"):
                        cell = Cell(cell.text + OTHER, {**cell.numbers, "against": row.against})
                mine[key] = cell
                if table.paper and (column.published or column.label in row.cells):
                    papers[key] = paper(table, tier, variant, row, column, cell)
    named = [variant.label for variant in variants] != [""]
    summary = []
    for label, row_label in [(variant.label, row.label) for variant in variants for row in rows]:
        numbers: Numbers = {"of": label} if named else {}
        numbers |= {"method": row_label, "tier": tier}
        for column in table.columns:
            key = (label, row_label, column.label)
            for part in (mine[key], *papers.get(key, ())):
                numbers |= {f"{column.label}: {name}": v for name, v in part.numbers.items()}
        summary.append(numbers)
    confirmed = {column for (*_, column), (cell, _) in papers.items() if "paper" in cell.numbers}
    shown = [c for c in table.columns if measured(table, tier, c) or c.label in confirmed]
    theirs = {column for *_, column in papers} if tier != "smoke" else set()
    beside = any(column.label in theirs for column in shown)
    unknown = theirs - {column.label for column in shown}
    return Rendered(
        title=table.title,
        header=_header(table, tier, runs, unknown),
        units=units,
        grid=_grid(table, tier, shown, mine, papers if beside else None),
        summary=summary,
        per_run=[_per_run(table, tier, run) for run in runs],
    )


def _grid(
    table: Table,
    tier: str,
    columns: list[Column],
    mine: dict[Key, Cell],
    papers: dict[Key, tuple[Cell, Cell]] | None,
) -> Grid:
    """The cells in the paper's rows and columns, which are told by where its values are found:
    what `published_column` names, and quantities unless `published_row` does, lies across.

    papers: None if its values are not to be shown.
    """
    labels: dict[str, list[str]] = {
        "variant": [variant.label for variant in table.variants_of(tier)],
        "row": [row.label for row in table.rows_of(tier) if not row.stage],
        "column": [column.label for column in columns],
    }
    lying = {axis for axis in labels if f"{{{axis}}}" in table.published_column}
    if "{column}" not in table.published_row:
        lying.add("column")
    down = [axis for axis in labels if axis not in lying]
    # Quantities before variants: what the paper shows comes first, what is ours follows.
    across = [axis for axis in ["column", "variant", "row"] if axis in lying]
    # A single variant says nothing between other names: the header has it.
    single = len(labels["variant"]) == 1 and ["variant"] not in (down, across)
    told = labels.keys() - {"variant" if single else ""}

    def places(axes: list[str]) -> list[dict[str, str]]:
        return [dict(zip(axes, p, strict=True)) for p in product(*(labels[a] for a in axes))]

    def names(place: dict[str, str]) -> list[str]:
        return [label for axis, label in place.items() if axis in told]

    offers = {column.label for column in columns if measured(table, tier, column)}

    def own(key: Key) -> str:
        if key[-1] not in offers or mine[key].text == NOT_OFFERED:
            return BLANK
        return mine[key].text + (papers[key][1].text if papers and key in papers else "")

    lines = []
    for at in places(down):
        keys = [_key(at | place) for place in places(across)]
        if papers is not None:
            theirs = [papers[key][0].text if key in papers else BLANK for key in keys]
            lines.append(Line([*names(at), PAPER], theirs))
        source = [OURS] * (papers is not None)
        lines.append(Line([*names(at), *source], [own(key) for key in keys]))
    stubs = [STUBS[axis] for axis in down if axis in told] + [SOURCE] * (papers is not None)
    n = len(table.tiers[tier].seeds)
    of_n = {c.label for c in columns if c.show == "mean_std" and n > 1 and not table.paper}
    groups, heads = [], []
    for place in places(across):
        group, *within = names(place)
        groups.append(group if within else "")
        heads.append(", ".join(within) or group + f" (n={n})" * (group in of_n))
    return Grid(stubs, groups, heads, lines)


def _key(place: dict[str, str]) -> Key:
    return place["variant"], place["row"], place["column"]


def _header(table: Table, tier: str, runs: list[PlacedRun], unknown: set[str]) -> list[str]:
    """The lines above a table. unknown: columns of the paper's that neither it nor we have."""
    chosen = table.tiers[tier]
    lines = [f"Tier {tier}: {chosen.setting}"]
    variants = [variant.label for variant in table.variants_of(tier) if variant.label]
    if len(variants) == 1:
        lines.append(f"All rows: {variants[0]}.")
    if table.paper:
        if any(override.startswith("shrink=") for override in chosen.overrides):
            lines.append("Sizes in labels and in the notes below are those of the tier full.")
        lines.append(f"The paper: {table.published_setting}.")
        lines += table.notes
        if table.driver == BENCH:
            lines.append("The device named below is not the paper's: no difference to it is taken.")
        elif tier != "full":
            lines.append("This tier is not the paper's setting: no difference to it is taken.")
        elif chosen.incomparable:
            lines.append(f"No difference to the paper is taken: {chosen.incomparable}.")
        if compared(table, tier):
            lines.append(_marking(len(chosen.seeds)))
        if tier != "smoke":  # which shows no published value
            lines += _reservations(table, tier)
        not_run: dict[str, list[str]] = {}
        for row in table.rows_of(tier):
            not_run.setdefault(row.not_run, []).append(row.label)
        for reason, labels in not_run.items():
            if reason:
                lines.append(f"Not run: {'; '.join(labels)}: {reason}.")
        absent = {
            "rows": [r.label for r in table.rows if r not in table.rows_of(tier) and not r.stage],
            "of": [v.label for v in table.variants if v not in table.variants_of(tier)],
        }
        for what, labels in absent.items():
            if labels:
                lines.append(f"Not in this tier ({what}): {'; '.join(labels)}.")
    lacking = [c.label for c in table.columns if not measured(table, tier, c)]
    if lacking:
        told = f"Not measured in this tier: {'; '.join(lacking)}."
        if unknown:
            left_out = [label for label in lacking if label in unknown]
            which = "all of them" if left_out == lacking else "; ".join(left_out)
            told += f" Left out, the paper's values being not available either: {which}."
        lines.append(told)
    if chosen.block:
        told = of_records(run.result for run in runs) or "none yet"
        lines.append(
            f"Nothing is trained for this tier: it shows the records of block {chosen.block} "
            f"({told}); `python -m reproduce run {chosen.block}` makes what is missing."
        )
    trained = len(list(table.trainings(tier)))
    seeds = ", ".join(map(str, chosen.seeds))
    of_seeds = f"seeds {seeds}" if len(chosen.seeds) > 1 else f"one seed ({seeds})"
    told = f"Runs: {len(runs)} of {trained}, {of_seeds}."
    if len(chosen.seeds) > 1 and table.driver != BENCH:
        told += (
            " ± is the standard deviation over seeds; in brackets stands the 95 % interval of the "
            "difference at equal seeds, that is, equal initial weights and data."
        )
    if len(chosen.seeds) > 1 and any(column.show == "interval" for column in table.columns):
        told += " In brackets stands the 95 % interval of the mean (Student's t)."
    lines.append(told)
    for row in table.rows_of(tier):
        if row.against:
            other = f'"{row.label}" is compared with "{row.against}", not with the first row'
            lines.append(f"Marked {OTHER}: {other}.")
    facts: dict[str, Callable[[dict[str, Any]], str]] = {
        "Corpus": lambda result: _corpus(result["corpus"]) if "corpus" in result else "",
        "Device": _device,
        "Code": lambda result: revision(result["environment"]),
    }
    for name, fact in facts.items():
        if told := _of_runs(fact, runs):
            lines.append(f"{name}: {told}.")
    if table.driver == BENCH and runs:
        used = dict.fromkeys(run.result["backend"] for run in runs)
        lines.append(f"Products: {'; '.join(used)}.")
        lines += _load(runs)
    return lines


def _of_runs(fact: Callable[[dict[str, Any]], str], runs: list[PlacedRun]) -> str:
    """A fact of the runs' results, "" if none has it. Where they differ, that of most comes last,
    and the rows of the others are named."""
    rows: dict[str, Counter[str]] = {}
    for run in runs:
        if found := fact(run.result):
            rows.setdefault(found, Counter())[run.place.row] += 1
    if len(rows) < 2:
        return "".join(rows)
    *fewer, most = sorted(rows, key=lambda found: rows[found].total())
    told = [
        f"{found} ({', '.join(f'{n} of {row}' for row, n in rows[found].items())})"
        for found in fewer
    ]
    return f"not the same for all runs: {'; '.join(told)}; {most} (the other {rows[most].total()})"


def _marking(n: int) -> str:
    if n < 2:
        return "One seed has no interval: no difference to the paper is marked."
    return (
        f"Ours is marked {MARK} where the paper's value lies outside the 95 % interval of our mean "
        "over the seeds (Student's t)."
    )


def _load(runs: list[PlacedRun]) -> list[str]:
    """A line on the GPU's clock and power during the measurements; [] on a CPU."""
    if runs[0].result["config"]["sustained_s"] is None:
        return []
    metrics = [run.result["metrics"] for run in runs]
    mhz, watts = ([found[name] for found in metrics] for name in ("sm_mhz", "watts"))
    return [f"Clocks: {load_text(mhz, watts)}."]


def units_of(table: Table, tier: str) -> dict[str, str]:
    """The units of a table's columns, by their labels."""
    variants, rows = table.variants_of(tier), table.rows_of(tier)
    return {column.label: _unit(table, variants, rows, column) for column in table.columns}


def _unit(table: Table, variants: list[Variant], rows: list[TableRow], column: Column) -> str:
    """The unit of a column: its own, or that of its published values."""
    if column.unit:
        return column.unit
    cells = (published_cell(table, variant, row, column) for variant in variants for row in rows)
    return next((cell.unit for cell in cells if cell is not None), "")


def _reservations(table: Table, tier: str) -> list[str]:
    """Lines on the published values that are second-hand or hard to believe: which, from where and
    why."""
    found: dict[str, list[str]] = {}
    for variant in table.variants_of(tier):
        for row in table.rows_of(tier):
            for column in table.columns:
                cell = None if row.stage else published_cell(table, variant, row, column)
                if cell is not None and cell.reservation:
                    found.setdefault(cell.reservation, []).append(row.label)
    return [
        f"Published values of {'; '.join(dict.fromkeys(labels))}: {reservation}."
        for reservation, labels in found.items()
    ]


def _corpus(manifest: dict[str, Any]) -> str:
    train, val = manifest["splits"]["train"], manifest["splits"]["val"]
    unit = "images" if "images" in train else "tokens"
    whole = [manifest["sha256"]] if unit == "images" else [train["sha256"], val["sha256"]]
    hashes = ", ".join(digest[:12] for digest in whole)
    return (
        f"{manifest['name']}, {train[unit]:,} training and {val[unit]:,} validation {unit} "
        f"(sha256 {hashes})"
    )


def _device(result: dict[str, Any]) -> str:
    environment = result["environment"]
    several = f"{result.get('world_size', 1)} x " * (result.get("world_size", 1) > 1)
    parts = [several + environment["device"]]
    if "config" not in result:  # the record of a block
        return f"{parts[0]}, torch {environment['versions']['torch']}"
    parts.append(f"{environment['threads']} threads")
    impl = result["config"].get("impl")
    if impl is not None:
        parts += [
            result["config"]["train"]["dtype"],
            "compiled" if impl["compile"] else "",
            f"micro-batch {impl['micro_batch']}" if impl["micro_batch"] else "",
            f"backend {result['backend']}",
        ]
    parts.append(f"torch {environment['versions']['torch']}")
    return ", ".join(part for part in parts if part)


def revision(environment: dict[str, Any]) -> str:
    """The revision of the code in words; `environment`: what `git_state` says, or more."""
    if environment["git_revision"] is None:
        return "unknown revision (no git checkout)"
    changed = " with uncommitted changes" if environment["git_dirty"] else ""
    return f"revision {environment['git_revision'][:12]}{changed}"


def _per_run(table: Table, tier: str, run: PlacedRun) -> Numbers:
    own: Numbers = {"of": run.place.variant} if run.place.variant else {}
    own |= {"method": run.place.row, "seed": run.place.seed}
    for column in table.columns:
        path = column.value_in(tier)
        if path is not None and offered(table, tier, path):
            own[path] = value(run, path, table.tiers[tier].measure)
    environment = run.result["environment"]
    return own | {
        "config_hash": run.result["config_hash"],
        "directory": str(run.directory),
        "git_revision": environment["git_revision"],
        "git_dirty": environment["git_dirty"],
        "device": environment["device"],
    }
