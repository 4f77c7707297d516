"""Renders finished runs as a table: Markdown and terminal for people, CSV with all digits."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from experiments.bench.timing import load_text
from reproduce.cells import Cell, Numbers, offered, ours, paper, published_cell, value
from reproduce.engine import PlacedRun
from reproduce.scale import of_records
from reproduce.spec import BENCH, Column, Table, TableRow, Variant

ABSENT = ("not measured", "not in this tier")  # cells for which a whole column is left out


@dataclass(frozen=True)
class Rendered:
    """A rendered table. header: the lines above it. cells: its rows of printed cells. units: by the
    table's columns, which need not be columns of the rendered text."""

    title: str
    header: list[str]
    units: dict[str, str]
    columns: list[str]
    cells: list[list[str]]
    summary: list[Numbers]
    per_run: list[Numbers]

    def markdown(self) -> str:
        """The header and the table as Markdown."""
        lines = [f"# {self.title}", "", *(f"- {line}" for line in self.header), ""]
        lines += [_markdown_row(self.columns), _markdown_row("---" for _ in self.columns)]
        lines += [_markdown_row(row) for row in self.cells]
        return "\n".join(lines) + "\n"

    def print(self) -> None:
        """Print header and table on the terminal."""
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table as RichTable

        # Into a file or a pipe without line breaks inside cells, whatever the terminal's width.
        console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
        console.print(f"\n{self.title}", style="bold", markup=False)
        for line in self.header:
            console.print(f"- {line}", markup=False)
        table = RichTable(box=SIMPLE_HEAD)
        for number, column in enumerate(self.columns):
            words = number == 0 or column in ("of", "method")
            table.add_column(column, justify="left" if words else "right", overflow="fold")
        for row in self.cells:
            table.add_row(*map(escape, row))
        console.print(table)


def render(table: Table, tier: str, runs: list[PlacedRun]) -> Rendered:
    """The table of a tier from the finished runs; cells that are missing say so.

    A paper's table has one line per metric, variant and method, ours beside the published value; a
    table of our own has one line per variant and method, the metrics side by side.
    """
    variants = table.variants_of(tier)
    rows = [row for row in table.rows_of(tier) if not row.stage]
    n = len(table.tiers[tier].seeds)
    mine: dict[tuple[str, str, str], Cell] = {}
    papers: dict[tuple[str, str, str], tuple[Cell, Cell]] = {}
    units = {column.label: _unit(table, variants, rows, column) for column in table.columns}
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
                cell = Cell("not offered", {"n": 0})
                if there:
                    runs_of, baseline = of[row.label], of[rows[0].label]
                    cell = ours(table, tier, column, runs_of, baseline, units[column.label])
                mine[key] = cell
                if table.paper and (column.published or column.label in row.cells):
                    papers[key] = paper(table, tier, variant, row, column, cell)
    not_run = {row.label for row in rows if row.not_run}
    named = [variant.label for variant in variants] != [""]
    lines = [(variant.label, row.label) for variant in variants for row in rows]
    of_column = ["of"] if named else []
    if table.paper:
        no_paper = (Cell("-"), Cell("-"))
        columns = ["metric", *of_column, "method", "paper", f"ours (n={n})", "difference", "tier"]
        cells = []
        for column in table.columns:
            for label, row_label in lines:
                key = (label, row_label, column.label)
                if row_label in not_run and key not in papers:
                    continue
                published, difference = papers.get(key, no_paper)
                nothing = "paper" not in published.numbers and mine[key].text in ABSENT
                if table.tiers[tier].block and nothing:  # nobody's numbers: named in the header
                    continue
                texts = [published.text, mine[key].text, difference.text, tier]
                cells.append([column.label, *([label] if named else []), row_label, *texts])
    else:
        columns = [*of_column, "method", *(_heading(column, n) for column in table.columns)]
        cells = [
            [*([label] if named else []), row_label]
            + [mine[label, row_label, column.label].text for column in table.columns]
            for label, row_label in lines
        ]
    summary = []
    for label, row_label in lines:
        numbers: Numbers = {"of": label} if named else {}
        numbers |= {"method": row_label, "tier": tier}
        for column in table.columns:
            key = (label, row_label, column.label)
            for part in (mine[key], *papers.get(key, ())):
                numbers |= {f"{column.label}: {name}": v for name, v in part.numbers.items()}
        summary.append(numbers)
    return Rendered(
        title=table.title,
        header=_header(table, tier, runs),
        units=units,
        columns=columns,
        cells=cells,
        summary=summary,
        per_run=[_per_run(table, tier, run) for run in runs],
    )


def _heading(column: Column, n: int) -> str:
    return f"{column.label} (n={n})" if column.show == "mean_std" else column.label


def _header(table: Table, tier: str, runs: list[PlacedRun]) -> list[str]:
    chosen = table.tiers[tier]
    lines = [f"Tier {tier}: {chosen.setting}"]
    if table.paper:
        lines.append(f"The paper: {table.published_setting}.")
        lines += table.notes
        if table.driver == BENCH:
            lines.append("The device named below is not the paper's: no difference to it is taken.")
        elif tier != "full":
            lines.append("This tier is not the paper's setting: no difference to it is taken.")
        elif chosen.incomparable:
            lines.append(f"No difference to the paper is taken: {chosen.incomparable}.")
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
    if chosen.block:
        columns = {column.label: column.value_in(tier) for column in table.columns}
        absent_columns = [k for k, v in columns.items() if v is None or not offered(table, tier, v)]
        if absent_columns:
            lines.append(f"Not measured in this tier: {'; '.join(absent_columns)}.")
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
            " ± is the standard deviation over seeds; [ ] is the 95 % interval of the difference "
            "at equal seeds, that is, equal initial weights and data."
        )
    lines.append(told)
    facts = {
        "Corpus": [_corpus(run.result["corpus"]) for run in runs if "corpus" in run.result],
        "Device": [_device(run.result) for run in runs],
        "Code": [revision(run.result["environment"]) for run in runs],
    }
    for name, values in facts.items():
        distinct = list(dict.fromkeys(values))
        mixed = "NOT THE SAME FOR ALL RUNS: " if len(distinct) > 1 else ""
        if distinct:
            lines.append(f"{name}: {mixed}{'; '.join(distinct)}.")
    if table.driver == BENCH and runs:
        used = dict.fromkeys(run.result["backend"] for run in runs)
        lines.append(f"Products: {'; '.join(used)}.")
        lines += _load(runs)
    return lines


def _load(runs: list[PlacedRun]) -> list[str]:
    """A line on the GPU's clock and power during the measurements; [] on a CPU."""
    if runs[0].result["config"]["sustained_s"] is None:
        return []
    metrics = [run.result["metrics"] for run in runs]
    mhz, watts = ([found[name] for found in metrics] for name in ("sm_mhz", "watts"))
    return [f"Clocks: {load_text(mhz, watts)}."]


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


def _markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
