"""From finished runs to a table: Markdown and terminal for people, CSV with all digits."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from experiments.errors import UserError
from reproduce import stats
from reproduce.engine import Run
from reproduce.published import look_up
from reproduce.spec import Column, Row, Table

Numbers = dict[str, float | int | str | None]


@dataclass(frozen=True)
class Cell:
    """What is printed, and the figures behind it by name."""

    text: str
    numbers: Numbers = field(default_factory=dict)


@dataclass(frozen=True)
class Rendered:
    """A table as text. `header` are the lines above it, `cells` its rows of printed cells."""

    title: str
    header: list[str]
    columns: list[str]
    cells: list[list[str]]
    summary: list[Numbers]
    per_run: list[Numbers]

    def markdown(self) -> str:
        lines = [f"# {self.title}", "", *(f"- {line}" for line in self.header), ""]
        lines += [_markdown_row(self.columns), _markdown_row("---" for _ in self.columns)]
        lines += [_markdown_row(row) for row in self.cells]
        return "\n".join(lines) + "\n"

    def print(self) -> None:
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
            words = number == 0 or column == "method"
            table.add_column(column, justify="left" if words else "right", overflow="fold")
        for row in self.cells:
            table.add_row(*map(escape, row))
        console.print(table)


def render(table: Table, tier: str, runs: list[Run]) -> Rendered:
    """The table of a tier from the runs that there are; what is missing says so.

    A paper's table has one row per metric and method, ours beside the published value; a table of
    our own has one row per method, the metrics side by side.
    """
    seeds = table.tiers[tier].seeds
    by_label = {row.label: [r for r in runs if r.job.label == row.label] for row in table.rows}
    baseline = by_label[table.rows[0].label]
    ours = {
        (row.label, column.label): _ours(column, by_label[row.label], baseline, len(seeds))
        for row in table.rows
        for column in table.columns
    }
    paper = {
        (row.label, column.label): _paper(table, tier, row, column, ours[row.label, column.label])
        for row in table.rows
        for column in table.columns
        if column.published
    }
    if table.paper:
        no_paper = (Cell("-"), Cell("-"))
        columns = ["metric", "method", "paper", f"ours (n={len(seeds)})", "difference", "tier"]
        cells = []
        for column in table.columns:
            for row in table.rows:
                key = (row.label, column.label)
                published, difference = paper.get(key, no_paper)
                cells.append(
                    [key[1], key[0], published.text, ours[key].text, difference.text, tier]
                )
    else:
        columns = ["method", *(_heading(column, len(seeds)) for column in table.columns)]
        cells = [
            [row.label, *(ours[row.label, column.label].text for column in table.columns)]
            for row in table.rows
        ]
    summary = []
    for row in table.rows:
        numbers: Numbers = {"method": row.label, "tier": tier}
        for column in table.columns:
            key = (row.label, column.label)
            for part in (ours[key], *paper.get(key, ())):
                numbers |= {f"{column.label}: {name}": v for name, v in part.numbers.items()}
        summary.append(numbers)
    return Rendered(
        title=table.title,
        header=_header(table, tier, runs),
        columns=columns,
        cells=cells,
        summary=summary,
        per_run=[_per_run(table, run) for run in runs],
    )


def csv_text(rows: list[Numbers]) -> str:
    """Rows as CSV; the header is the union of their keys in order of appearance."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    file = io.StringIO()
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def value(run: Run, path: str) -> float | None:
    """The quantity that a column's `value` names; None if this run did not measure it."""
    if path.startswith("tail."):
        name, first = path.removeprefix("tail."), 0.9 * run.result["steps"]
        tail = [r[name] for r in run.log if r["step"] >= first and r.get(name) is not None]
        return stats.mean(tail) if tail else None
    found: Any = run.result
    for key in path.split("."):
        if key not in found:
            raise UserError(f"{run.job.config.directory()}/result.json has no {path}")
        found = found[key]
    return found


def _values(column: Column, runs: list[Run]) -> dict[int, float]:
    """seed -> value, of the runs that measured it."""
    if column.value is None:
        return {}
    found = {run.job.seed: value(run, column.value) for run in runs}
    return {seed: v for seed, v in found.items() if v is not None}


def _ours(column: Column, runs: list[Run], baseline: list[Run], wanted: int) -> Cell:
    if column.value is None:
        return Cell("not measured", {"n": 0})
    own, base = _values(column, runs), _values(column, baseline)
    if column.show == "paired" and runs and runs == baseline:
        return Cell("baseline")
    if column.show in ("paired", "ratio"):
        own = {seed: v for seed, v in own.items() if seed in base}
    n = len(own)
    if n == 0:
        return Cell("not measured" if len(runs) == wanted else "not run", {"n": 0})
    few = f" (n={n} of {wanted})" if n < wanted else ""
    form = column.format
    match column.show:
        case "mean_std":
            mean, std = stats.mean(list(own.values())), stats.std(list(own.values()))
            spread = f" ± {std:{form}}" if n > 1 else ""
            text = f"{mean:{form}}{spread}{few}"
            return Cell(text, {"mean": mean, "std": std if n > 1 else None, "n": n})
        case "paired":
            differences = [v - base[seed] for seed, v in own.items()]
            mean, (low, high) = stats.mean(differences), stats.paired_interval(differences)
            if n == 1:
                return Cell(f"{mean:{form}}{few or ' (n=1)'}", {"mean": mean, "n": 1})
            text = f"{mean:{form}} [{low:{form}}, {high:{form}}]{few}"
            return Cell(text, {"mean": mean, "low": low, "high": high, "n": n})
        case "ratio":
            amount = stats.mean([v / base[seed] for seed, v in own.items()])
        case "sum":
            amount = sum(own.values())
        case _:
            amount = stats.mean(list(own.values()))
    return Cell(f"{amount:{form}}{few}", {column.show: amount, "n": n})


def _paper(table: Table, tier: str, row: Row, column: Column, own: Cell) -> tuple[Cell, Cell]:
    """The published value, and our difference to it in the full tier: the paper's setting."""
    assert table.paper and table.published_table and column.published
    if row.published is None:
        return Cell("extra row of ours"), Cell("-")
    cell = look_up(table.paper, table.published_table, row.published, column.published)
    if cell is None:
        return Cell("not available"), Cell("-")
    published = Cell(cell.text(column.format), {"paper": cell.value, "evidence": cell.evidence})
    mean = own.numbers.get("mean")
    if tier != "full" or not isinstance(mean, float):
        return published, Cell("-")
    difference = mean - cell.value
    return published, Cell(f"{difference:+{column.format}}", {"difference": difference})


def _heading(column: Column, n: int) -> str:
    return f"{column.label} (n={n})" if column.show == "mean_std" else column.label


def _header(table: Table, tier: str, runs: list[Run]) -> list[str]:
    chosen = table.tiers[tier]
    lines = [f"Tier {tier}: {chosen.setting}"]
    if table.paper:
        lines.append(f"The paper: {table.published_setting}.")
        if tier != "full":
            lines.append("This tier is not the paper's setting: no difference to it is taken.")
    lines.append(
        f"Runs: {len(runs)} of {len(table.rows) * len(chosen.seeds)}, "
        f"seeds {', '.join(map(str, chosen.seeds))}. ± is the standard deviation over seeds; "
        "[ ] is the 95 % interval of the difference at equal seeds, that is, equal initial "
        "weights and data."
    )
    facts = {
        "Corpus": [_corpus(run.result["corpus"]) for run in runs],
        "Device": [_device(run.result) for run in runs],
        "Code": [_revision(run.result["environment"]) for run in runs],
    }
    for name, values in facts.items():
        distinct = list(dict.fromkeys(values))
        mixed = "NOT THE SAME FOR ALL RUNS: " if len(distinct) > 1 else ""
        if distinct:
            lines.append(f"{name}: {mixed}{'; '.join(distinct)}.")
    return lines


def _corpus(manifest: dict[str, Any]) -> str:
    train, val = manifest["splits"]["train"], manifest["splits"]["val"]
    return (
        f"{manifest['name']}, {train['tokens']:,} training and {val['tokens']:,} validation tokens "
        f"(sha256 {train['sha256'][:12]}, {val['sha256'][:12]})"
    )


def _device(result: dict[str, Any]) -> str:
    environment = result["environment"]
    impl = result["config"]["impl"]
    parts = [
        f"{result['world_size']} x " * (result["world_size"] > 1) + environment["device"],
        f"{environment['threads']} threads",
        impl["dtype"],
        "compiled" if impl["compile"] else "",
        f"micro-batch {impl['micro_batch']}" if impl["micro_batch"] else "",
        f"backend {result['backend']}",
        f"torch {environment['versions']['torch']}",
    ]
    return ", ".join(part for part in parts if part)


def _revision(environment: dict[str, Any]) -> str:
    if environment["git_revision"] is None:
        return "unknown revision (no git checkout)"
    changed = " with uncommitted changes" if environment["git_dirty"] else ""
    return f"revision {environment['git_revision'][:12]}{changed}"


def _per_run(table: Table, run: Run) -> Numbers:
    own: Numbers = {"method": run.job.label, "seed": run.job.seed}
    for column in table.columns:
        if column.value is not None:
            own[column.value] = value(run, column.value)
    environment = run.result["environment"]
    return own | {
        "config_hash": run.result["config_hash"],
        "directory": str(run.job.config.directory()),
        "git_revision": environment["git_revision"],
        "git_dirty": environment["git_dirty"],
        "device": environment["device"],
    }


def _markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
