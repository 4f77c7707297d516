"""Makes the cells of a table: our values over the seeds, and the paper's values."""

import math
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from experiments.runs import stats
from experiments.runs.finished import FinishedRun
from experiments.support.errors import UserError
from reproduce.execute.jobs import PlacedRun
from reproduce.specs.published import Published, in_unit, look_up, names_in
from reproduce.specs.table import BENCH, Column, Measure, Table, TableRow, Variant

ILLEGAL = "sparsity.illegal_groups"
MARK = "*"  # printed after our value if the paper's lies outside the interval of ours
OTHER = "†"  # printed after a comparison with another row than the first
DENSE = "‡"  # printed after a figure of a method whose products were all dense
UNKNOWN = "not available"  # printed for a value of the paper that nobody confirmed

Numbers = dict[str, float | int | str | None]
Runs = list[PlacedRun]


@dataclass(frozen=True)
class Cell:
    """One printed cell."""

    text: str
    numbers: Numbers = field(default_factory=dict)  # those in it, by name
    values: list[float] = field(default_factory=list)  # of the seeds, if it shows their mean


def value(run: PlacedRun, path: str, measures: dict[str, Measure]) -> float | None:
    """The number of a run at `path`, the `value` of a column; None if the run lacks it."""
    name, _, rest = path.partition(".")
    if "," in path:
        return _mean([value(run, part.strip(), measures) for part in path.split(",")])
    if name == "exp":
        inner = value(run, rest, measures)
        return None if inner is None else math.exp(inner)
    if name == "tail":
        first = 0.9 * run.result["steps"]
        tail = [r[rest] for r in run.log if r["step"] >= first and r.get(rest) is not None]
        return _mean(tail)
    if name not in measures:
        return _walk(run.result, path, run)
    tasks = measures[name].tasks
    if tasks and rest == "mean":
        return _mean([value(run, f"{name}.{task}.score", measures) for task in tasks])
    task, _, metric = rest.partition(".") if tasks else ("", "", rest)
    content = run.measures.get(f"{name}.{task}" if task else name)
    return None if content is None else _walk(content["metrics"], metric, run)


def _mean(parts: list[float | None]) -> float | None:
    """The mean; None if there is none, or a part is unknown."""
    known = [number for number in parts if number is not None]
    return stats.mean(known) if known and len(known) == len(parts) else None


def _walk(results: Any, path: str, run: PlacedRun) -> float | None:
    """The entry of nested results at a dotted path."""
    for key in path.split("."):
        if key not in results:
            raise UserError(f"the results of {run.directory} have no {path}")
        results = results[key]
    return results


def offered(table: Table, tier: str, path: str) -> bool:
    """True if the tier makes the measurements that `path`, the `value` of a column, needs."""
    own = table.tiers[tier].measure
    names = {name for other in table.tiers.values() for name in other.measure}
    for part in path.removeprefix("exp.").split(","):
        name, _, rest = part.strip().partition(".")
        tasks = own[name].tasks if name in own else []
        of_task = not tasks or rest == "mean" or rest.partition(".")[0] in tasks
        if name in names - own.keys() or not of_task:
            return False
    return True


def measured(table: Table, tier: str, column: Column) -> bool:
    """True if a column has values in this tier."""
    path = column.value_in(tier)
    return path is not None and offered(table, tier, path)


def ours(
    table: Table, tier: str, column: Column, runs: Runs, baseline: Runs, unit: str = ""
) -> Cell:
    """Our cell of one row. runs: the row's runs, one for each seed. baseline: those of the row that
    it is compared with. unit: printed after the numbers, as by `in_unit`."""
    path, chosen = column.value_in(tier), table.tiers[tier]
    if path is None:
        return Cell("not measured", {"n": 0})
    if not offered(table, tier, path):
        return Cell("not in this tier", {"n": 0})
    own, base = (
        {
            run.place.seed: column.scale * number
            for run in some
            if (number := value(run, path, chosen.measure)) is not None
        }
        for some in (runs, baseline)
    )
    if column.show == "paired":
        if runs and runs == baseline:
            return Cell("baseline")
        own = {seed: v - base[seed] for seed, v in own.items() if seed in base}
    if own and column.value == ILLEGAL and all(map(_ends_dense, runs)):
        return Cell("dense by design", {"n": len(own)})
    if not own:
        finished = len(runs) == len(chosen.seeds) and path.partition(".")[0] not in chosen.measure
        not_run = "not run yet" if chosen.block else "not run"
        return Cell("not measured" if finished else not_run, {"n": 0})
    numbers = _numbers(column, [*own.values()])
    means = column.show in ("mean_std", "interval")
    return Cell(text(table, tier, column, numbers, unit), numbers, [*own.values()] * means)


def _ends_dense(run: PlacedRun) -> bool:
    if "config" not in run.result:  # the record of a block
        return False
    return FinishedRun(run.directory, run.result).trained_with.capabilities.ends_dense


def _numbers(column: Column, values: list[float]) -> Numbers:
    """The numbers that the column's `show` asks for; `values` are differences if it is `paired`."""
    n, mean = len(values), stats.mean(values)
    if column.show == "mean_std":
        return {"mean": mean, "std": stats.std(values) if n > 1 else None, "n": n}
    if column.show in ("mean", "sum"):
        return {column.show: mean if column.show == "mean" else sum(values), "n": n}
    low, high = stats.paired_interval(values)
    ends: Numbers = {"low": low, "high": high} if n > 1 else {}
    numbers: Numbers = {"mean": mean, **ends}
    return {**numbers, "n": n} if column.show == "paired" else {"n": n, **numbers}


def text(table: Table, tier: str, column: Column, numbers: Numbers, unit: str = "") -> str:
    """The numbers of one of our cells as they are printed."""
    n, form = numbers["n"], column.format
    always = column.show == "mean_std" and table.paper is not None and n != 1
    count = f" (n={n})" if n != len(table.tiers[tier].seeds) or always else ""
    spread = f" ± {numbers['std']:{form}}" if numbers.get("std") is not None else ""
    if "low" in numbers:
        spread = f" [{numbers['low']:{form}}, {numbers['high']:{form}}]"
    if column.show == "paired":
        return f"{numbers['mean']:{form}}{spread}{count or ' (n=1)' * (n == 1)}"
    name = "mean" if "mean" in numbers else column.show
    return f"{in_unit(f'{numbers[name]:{form}}{spread}', unit)}{count}"


def paper(
    table: Table, tier: str, variant: Variant, row: TableRow, column: Column, own: Cell
) -> tuple[Cell, Cell]:
    """(the cell of the published value, the cell of our difference to it). The text of the
    difference is `MARK` if its 95 % interval (Student's t over the seeds, as in all comparisons of
    this project) does not contain 0, else "". The smoke tier shows no published value, because it
    trains and times something else. own: our cell."""
    cell = published_cell(table, variant, row, column)
    if cell is None:
        named = published_name(table, variant, row, column) or row.published
        return Cell(UNKNOWN if named else "-"), Cell("")
    if tier == "smoke":
        return Cell("-"), Cell("")
    published = Cell(cell.text(column.format), {"paper": cell.value, "evidence": cell.evidence})
    mean = own.numbers.get("mean")
    # Only the setting of the full tier is the paper's, and never the device that speed is of.
    compared = tier == "full" and table.driver != BENCH and not table.tiers[tier].incomparable
    if not compared or cell.value is None or not isinstance(mean, float):
        return published, Cell("")
    # For a single seed there is no interval, and so nothing outside of it.
    outside = stats.excludes_zero(*stats.paired_interval([v - cell.value for v in own.values]))
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


def unmatched(table: Table) -> tuple[list[str], list[str]]:
    """(the tables of the paper's that the spec names and `published.json` does not have, the names
    there of rows, columns or cells of the others that the spec does not name). A misspelt name
    shows here, and what nobody confirmed or we do not measure."""
    asked: dict[str, set[tuple[str, str]]] = {}
    for tier, row, column in product(table.tiers, table.rows, table.columns):
        known = asked.setdefault(row.published_table or table.published_table or "", set())
        for variant in table.variants_of(tier):
            known |= {*filter(None, [published_name(table, variant, row, column)])}
    there, found = {of: names_in(table.paper or "", of) for of in asked}, []
    for of, names in asked.items():
        rows, columns = {one for one, _ in names}, {other for _, other in names}
        for one, other in (name for name in there[of] if name not in names):
            own = f"{one} / {other}" if other in columns else other
            found.append(own if one in rows else one)
    return [of for of in asked if of and not there[of]], [*dict.fromkeys(found)]


def published_name(
    table: Table, variant: Variant, row: TableRow, column: Column
) -> tuple[str, str] | None:
    """The (row, column) by which `published.json` names the value of a cell, if it has one; None if
    the spec says that it has none."""
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
