"""Judges what the papers say of time and memory, by the tables in `measured/h200` and
`claims.yaml`.

A verdict holds on the device of the measurement, which is not the paper's.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

from experiments.runs.stats import holm, mean, p_value, paired_interval
from experiments.support.errors import UserError
from reproduce.claims import (
    CONFIRMED,
    INCONCLUSIVE,
    NOT_TESTED,
    REFUTED,
    Claims,
    Speed,
    verdict,
)
from reproduce.paper_speeds import MEASURED
from reproduce.reading import TABLES, read_table
from reproduce.spec import Table

SHOWN = "shown, not judged"


@dataclass(frozen=True)
class Line:
    """One row of a measured table: the paper's factor and ours, which is the mean of n repeats,
    with its interval."""

    label: str
    paper: float | None
    ours: float
    n: int
    interval: tuple[float, float]
    verdict: str


@dataclass(frozen=True)
class Measured:
    """A statement with its verdict. device, code: the device and the revision that it was measured
    with. why: the reason why it was not tested."""

    speed: Speed
    verdict: str
    lines: list[Line]
    device: str = ""
    code: str = ""
    why: str = ""


def judge_speed(claims: Claims, speed: Speed, folder: Path = MEASURED) -> Measured:
    """The verdict on a statement by the measured tables in `folder`.

    Raises:
        UserError: the measured table has no such column or rows.
    """
    if not _file(folder, speed, ".csv").is_file():
        return Measured(speed, NOT_TESTED, [], why=f"not measured ({_command(speed)})")
    paper, ours = _papers(folder, speed), _repeats(folder, speed)
    labels = [label for label in ours if label.endswith(speed.rows)]
    if not labels:
        raise UserError(f"{folder}: {speed.table} has no {speed.column!r} of rows {speed.rows!r}")
    where = _fact(folder, speed, "Device"), _fact(folder, speed, "Code")
    if speed.than:
        lines, why = _faster(claims, speed, labels, paper, ours)
    else:
        lines = [_gain(claims, speed, label, paper.get(label), ours[label]) for label in labels]
        why = ""
    judged = [line.verdict for line in lines if line.verdict != SHOWN]
    found = verdict(judged) if judged or why else SHOWN
    return Measured(speed, found, lines, *where, why=why)


def _gain(
    claims: Claims, speed: Speed, label: str, paper: float | None, repeats: dict[int, float]
) -> Line:
    values = list(repeats.values())
    ours, interval = mean(values), paired_interval(values)
    if paper is None:
        return Line(label, None, ours, len(values), interval, SHOWN)
    low, high = interval
    if len(values) == 1:
        low, high = ours * (1 - claims.noise), ours * (1 + claims.noise)
    least, most = (1 - high, 1 - low) if speed.less else (low - 1, high - 1)
    half = (1 - paper if speed.less else paper - 1) / 2
    found = CONFIRMED if least >= half else REFUTED if most < half else INCONCLUSIVE
    return Line(label, paper, ours, len(values), interval, found)


def _faster(
    claims: Claims,
    speed: Speed,
    labels: list[str],
    paper: dict[str, float],
    ours: dict[str, dict[int, float]],
) -> tuple[list[Line], str]:
    """(the rows as factors of the rows that end with `than`, the reason why they were not tested or
    "")."""
    lines, logs = [], []
    for label in labels:
        other = label.removesuffix(speed.rows) + speed.than
        both = sorted(ours[label].keys() & ours.get(other, {}).keys())
        logs.append([math.log(ours[label][seed] / ours[other][seed]) for seed in both])
        quotient = paper[label] / paper[other] if {label, other} <= paper.keys() else None
        factor = math.exp(mean(logs[-1])) if both else math.nan
        low, high = map(math.exp, paired_interval(logs[-1]))
        lines.append(Line(label, quotient, factor, len(both), (low, high), NOT_TESTED))
    fewest = min(line.n for line in lines)
    if fewest < claims.seeds:
        return lines, f"{fewest} of {claims.seeds} repeats ({_command(speed)})"
    judged = []
    for line, p, found in zip(lines, holm([p_value(log) for log in logs]), logs, strict=True):
        sure = p < claims.level
        told = CONFIRMED if mean(found) > 0 else REFUTED
        told = told if sure else INCONCLUSIVE
        judged.append(Line(line.label, line.paper, line.ours, line.n, line.interval, told))
    return judged, ""


# --- what was measured ---------------------------------------------------------------------------


def _file(folder: Path, speed: Speed, suffix: str) -> Path:
    return folder / f"{speed.table}-full{suffix}"


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _papers(folder: Path, speed: Speed) -> dict[str, float]:
    rows, name = _rows(_file(folder, speed, ".csv")), f"{speed.column}: paper"
    return {row["method"]: float(row[name]) for row in rows if row.get(name)}


def _repeats(folder: Path, speed: Speed) -> dict[str, dict[int, float]]:
    """Our factors by row and seed: those of every run if they were kept beside the table, else the
    mean alone."""
    runs = _file(folder, speed, "-runs.csv")
    found: dict[str, dict[int, float]] = {}
    if not runs.is_file():
        rows = _rows(_file(folder, speed, ".csv"))
        name = f"{speed.column}: mean"
        return {row["method"]: {0: float(row[name])} for row in rows if row.get(name)}
    columns = {column.label: column.value for column in _table(speed).columns}
    value = columns.get(speed.column) or ""
    for row in _rows(runs):
        if row.get(value):
            found.setdefault(row["method"], {})[int(row["seed"])] = float(row[value])
    return found


def _table(speed: Speed) -> Table:
    return read_table(TABLES / f"{speed.table}.yaml")


def _command(speed: Speed) -> str:
    """The command that makes the measurement."""
    table = _table(speed)
    return f"python -m reproduce {table.command} paper={table.paper} tier=full"


def _fact(folder: Path, speed: Speed, name: str) -> str:
    """A line of the table's header by its name, Device or Code."""
    text = _file(folder, speed, ".md").read_text(encoding="utf-8")
    start = f"- {name}: "
    lines = (line for line in text.splitlines() if line.startswith(start))
    return next(lines, start).removeprefix(start).rstrip(".")
