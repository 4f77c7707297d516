"""The cells of a table: measured values over seeds, and the papers' values."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from experiments.runs import stats
from experiments.runs.finished import FinishedRun
from experiments.support.errors import UserError
from reproduce.engine import PlacedRun
from reproduce.published import Published, in_unit, look_up
from reproduce.spec import BENCH, COMPARING, Column, Measure, Table, TableRow, Variant

ILLEGAL = "sparsity.illegal_groups"
MARK = "*"  # printed after our value if the paper's lies outside its interval
OTHER = "†"  # printed after a comparison with another row than the first

Numbers = dict[str, float | int | str | None]


@dataclass(frozen=True)
class Cell:
    """One printed cell: its text, and the numbers in it by name. values: the values of the mean
    that it shows, by seed."""

    text: str
    numbers: Numbers = field(default_factory=dict)
    values: list[float] = field(default_factory=list)


def value(run: PlacedRun, path: str, measures: dict[str, Measure]) -> float | None:
    """The quantity of a run that a column's `value` names; None if this run does not have it."""
    if "," in path:
        several = [value(run, part.strip(), measures) for part in path.split(",")]
        known = [figure for figure in several if figure is not None]
        return stats.mean(known) if len(known) == len(several) else None
    name, _, rest = path.partition(".")
    if name == "exp":
        inner = value(run, rest, measures)
        return None if inner is None else math.exp(inner)
    if name == "tail":
        first = 0.9 * run.result["steps"]
        tail = [r[rest] for r in run.log if r["step"] >= first and r.get(rest) is not None]
        return stats.mean(tail) if tail else None
    if name not in measures:
        return _walk(run.result, path, run)
    tasks = measures[name].tasks
    if tasks and rest == "mean":
        found = [value(run, f"{name}.{task}.score", measures) for task in tasks]
        known = [score for score in found if score is not None]
        return stats.mean(known) if len(known) == len(tasks) else None
    task, _, metric = rest.partition(".") if tasks else ("", "", rest)
    content = run.measures.get(f"{name}.{task}" if task else name)
    return None if content is None else _walk(content["metrics"], metric, run)


def _walk(found: Any, path: str, run: PlacedRun) -> float | None:
    for key in path.split("."):
        if key not in found:
            raise UserError(f"the results of {run.directory} have no {path}")
        found = found[key]
    return found


def offered(table: Table, tier: str, path: str) -> bool:
    """True if the tier makes the measurements that a column's `value` names."""
    if "," in path:
        return all(offered(table, tier, part.strip()) for part in path.split(","))
    name, _, rest = path.partition(".")
    if name == "exp":
        return offered(table, tier, rest)
    if name in {part for other in table.tiers.values() for part in other.measure}:
        measure = table.tiers[tier].measure.get(name)
        if measure is None:
            return False
        return not measure.tasks or rest == "mean" or rest.partition(".")[0] in measure.tasks
    return True


def measured(table: Table, tier: str, column: Column) -> bool:
    """True if the tier measures a column."""
    path = column.value_in(tier)
    return path is not None and offered(table, tier, path)


def ours(
    table: Table,
    tier: str,
    column: Column,
    runs: list[PlacedRun],
    baseline: list[PlacedRun],
    unit: str = "",
) -> Cell:
    """The cell of one row's runs, over the seeds. baseline: the runs of the row that it is compared
    with.

    unit: printed after the numbers, as by `in_unit`.
    """
    path = column.value_in(tier)
    if path is None:
        return Cell("not measured", {"n": 0})
    if not offered(table, tier, path):
        return Cell("not in this tier", {"n": 0})
    wanted, measures = len(table.tiers[tier].seeds), table.tiers[tier].measure
    own, base = (_values(column, path, some, measures) for some in (runs, baseline))
    if column.show == "paired" and runs and runs == baseline:
        return Cell("baseline")
    if column.show in COMPARING:
        own = {seed: v for seed, v in own.items() if seed in base}
    n = len(own)
    if n and column.value == ILLEGAL and all(_ends_dense(run) for run in runs):
        return Cell("dense by design", {"n": n})
    if n == 0:
        there = len(runs) == wanted and path.partition(".")[0] not in measures
        not_run = "not run yet" if table.tiers[tier].block else "not run"
        return Cell("not measured" if there else not_run, {"n": 0})
    few = f" (n={n})" if n < wanted else ""
    form = column.format
    match column.show:
        case "mean_std":
            mean, std = stats.mean(list(own.values())), stats.std(list(own.values()))
            spread = f" ± {std:{form}}" if n > 1 else ""
            of_n = f" (n={n})" if table.paper and n > 1 else few
            text = f"{in_unit(f'{mean:{form}}{spread}', unit)}{of_n}"
            numbers: Numbers = {"mean": mean, "std": std if n > 1 else None, "n": n}
            return Cell(text, numbers, list(own.values()))
        case "paired":
            differences = [v - base[seed] for seed, v in own.items()]
            mean, (low, high) = stats.mean(differences), stats.paired_interval(differences)
            if n == 1:
                return Cell(f"{mean:{form}}{few or ' (n=1)'}", {"mean": mean, "n": 1})
            text = f"{mean:{form}} [{low:{form}}, {high:{form}}]{few}"
            return Cell(text, {"mean": mean, "low": low, "high": high, "n": n})
        case "interval":
            mean, (low, high) = (
                stats.mean(list(own.values())),
                stats.paired_interval([*own.values()]),
            )
            spread = f" [{low:{form}}, {high:{form}}]" if n > 1 else ""
            numbers = {"mean": mean, "low": low, "high": high, "n": n} if n > 1 else {"mean": mean}
            text = f"{in_unit(f'{mean:{form}}{spread}', unit)}{few}"
            return Cell(text, {"n": n, **numbers}, list(own.values()))
        case "ratio":
            amount = stats.mean([v / base[seed] for seed, v in own.items()])
        case "speedup":
            amount = stats.mean([base[seed] / v for seed, v in own.items()])
        case "sum":
            amount = sum(own.values())
        case _:
            amount = stats.mean(list(own.values()))
    return Cell(f"{in_unit(f'{amount:{form}}', unit)}{few}", {column.show: amount, "n": n})


def _ends_dense(run: PlacedRun) -> bool:
    if "config" not in run.result:  # the record of a block does not tell
        return False
    return FinishedRun(run.directory, run.result).trained_with.ends_dense


def _values(
    column: Column, path: str, runs: list[PlacedRun], measures: dict[str, Measure]
) -> dict[int, float]:
    """The column's value of each run that has it, by seed."""
    found = {run.place.seed: value(run, path, measures) for run in runs}
    return {seed: column.scale * v for seed, v in found.items() if v is not None}


def compared(table: Table, tier: str) -> bool:
    """True if a tier has the paper's setting, so that differences to the paper are shown: only the
    full tier, and never for speed, which the paper measured on another device."""
    return tier == "full" and table.driver != BENCH and not table.tiers[tier].incomparable


def paper(
    table: Table, tier: str, variant: Variant, row: TableRow, column: Column, own: Cell
) -> tuple[Cell, Cell]:
    """(cell of the published value, cell of our difference to it). The smoke tier shows no
    published value, because it trains and times something else.

    The text of the difference is `MARK` if its 95 % interval (Student's t over the seeds, as in all
    comparisons of this project) does not contain 0, else "".
    """
    cell = published_cell(table, variant, row, column)
    if cell is None:
        named = published_name(table, variant, row, column) or row.published
        return Cell("not available" if named else "-"), Cell("")
    if tier == "smoke":
        return Cell("-"), Cell("")
    published = Cell(cell.text(column.format), {"paper": cell.value, "evidence": cell.evidence})
    mean = own.numbers.get("mean")
    if not compared(table, tier) or cell.value is None or not isinstance(mean, float):
        return published, Cell("")
    low, high = stats.paired_interval([v - cell.value for v in own.values])
    outside = low > 0 or high < 0  # False for a single seed, which has no interval
    return published, Cell(MARK * outside, {"difference": mean - cell.value})


def published_cell(
    table: Table, variant: Variant, row: TableRow, column: Column
) -> Published | None:
    """The paper's value, if it is confirmed."""
    name = published_name(table, variant, row, column)
    where = row.published_table or table.published_table
    if name is None or table.paper is None or where is None:
        return None
    return look_up(table.paper, where, *name)


def published_name(
    table: Table, variant: Variant, row: TableRow, column: Column
) -> tuple[str, str] | None:
    """The (row, column) of a cell in `published.json`, which may lack it; None if the spec names
    none."""
    names = {"row": row.published, "variant": variant.published, "column": column.published}
    templates = row.cells.get(column.label)
    if templates is None:
        templates = [table.published_row, table.published_column]
        if column.published is None:
            return None
    if any(f"{{{k}}}" in "".join(templates) and name is None for k, name in names.items()):
        return None
    first, second = (template.format(**names) for template in templates)
    return first, second
