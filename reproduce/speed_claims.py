"""Judges the papers' claims on time and memory by the measured tables in `measured/h200`.

The rules are in `claims.yaml`. A verdict holds for the device of the measurement, which is not the
paper's.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass, replace
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
    """One row of a measured table. paper: the paper's factor over dense, if it has one. ours: our
    factor, the mean of n repeats, with its `interval`."""

    label: str
    paper: float | None
    ours: float
    n: int
    interval: tuple[float, float]
    verdict: str


@dataclass(frozen=True)
class Measured:
    """A statement with its verdict.

    lines: the rows of the table that it is about. device, code: the device and the revision of the
    measurement. why: the reason why it was not tested.
    """

    speed: Speed
    verdict: str
    lines: list[Line]
    device: str = ""
    code: str = ""
    why: str = ""


def judge_speed(claims: Claims, speed: Speed, folder: Path = MEASURED) -> Measured:
    """A statement with its verdict by the measured tables in `folder`.

    Raises:
        UserError: the measured table does not have the column or the rows.
    """
    if not _file(folder, speed, ".csv").is_file():
        return Measured(speed, NOT_TESTED, [], why=f"not measured ({_command(speed)})")
    paper, ours = _published(folder, speed), _repeats(folder, speed)
    labels = [label for label in ours if label.endswith(speed.rows)]
    if not labels:
        raise UserError(f"{folder}: {speed.table} has no {speed.column!r} of rows {speed.rows!r}")
    device, code = _fact(folder, speed, "Device"), _fact(folder, speed, "Code")
    if speed.than:
        lines, why = _faster(claims, speed, labels, paper, ours)
    else:
        lines = [_gain(claims, speed, label, paper.get(label), ours[label]) for label in labels]
        why = ""
    judged = [line.verdict for line in lines if line.verdict != SHOWN]
    result = verdict(judged) if judged else SHOWN
    return Measured(speed, result, lines, device, code, why)


def _gain(
    claims: Claims, speed: Speed, label: str, paper: float | None, repeats: dict[int, float]
) -> Line:
    """The verdict on one row: our gain over dense is at least half of the paper's, or not."""
    values = list(repeats.values())
    ours, interval = mean(values), paired_interval(values)
    if paper is None:
        return Line(label, None, ours, len(values), interval, SHOWN)
    low, high = interval
    if len(values) == 1:
        low, high = ours * (1 - claims.noise), ours * (1 + claims.noise)
    least, most = (1 - high, 1 - low) if speed.less else (low - 1, high - 1)
    half = (1 - paper if speed.less else paper - 1) / 2
    result = CONFIRMED if least >= half else REFUTED if most < half else INCONCLUSIVE
    return Line(label, paper, ours, len(values), interval, result)


def _faster(
    claims: Claims,
    speed: Speed,
    labels: list[str],
    paper: dict[str, float],
    ours: dict[str, dict[int, float]],
) -> tuple[list[Line], str]:
    """(the rows with verdicts, the reason why they were not tested or ""). Their factors are
    relative to the rows whose labels end with `than`."""
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
    for line, p, log in zip(lines, holm([p_value(log) for log in logs]), logs, strict=True):
        direction = CONFIRMED if mean(log) > 0 else REFUTED
        judged.append(replace(line, verdict=direction if p < claims.level else INCONCLUSIVE))
    return judged, ""


# --- what was measured ---------------------------------------------------------------------------


def _file(folder: Path, speed: Speed, suffix: str) -> Path:
    return folder / f"{speed.table}-full{suffix}"


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _published(folder: Path, speed: Speed) -> dict[str, float]:
    """The paper's factors by row."""
    rows, name = _rows(_file(folder, speed, ".csv")), f"{speed.column}: paper"
    return {row["method"]: float(row[name]) for row in rows if row.get(name)}


def _repeats(folder: Path, speed: Speed) -> dict[str, dict[int, float]]:
    """Our factors by row and seed: those of every run if the file of runs is there, else only the
    mean, as that of seed 0."""
    runs = _file(folder, speed, "-runs.csv")
    factors: dict[str, dict[int, float]] = {}
    if not runs.is_file():
        rows = _rows(_file(folder, speed, ".csv"))
        name = f"{speed.column}: mean"
        return {row["method"]: {0: float(row[name])} for row in rows if row.get(name)}
    columns = {column.label: column.value for column in _table(speed).columns}
    value = columns.get(speed.column) or ""
    for row in _rows(runs):
        if row.get(value):
            factors.setdefault(row["method"], {})[int(row["seed"])] = float(row[value])
    return factors


def _table(speed: Speed) -> Table:
    return read_table(TABLES / f"{speed.table}.yaml")


def _command(speed: Speed) -> str:
    """The command that makes the measurement."""
    table = _table(speed)
    return f"python -m reproduce {table.command} paper={table.paper} tier=full"


def _fact(folder: Path, speed: Speed, name: str) -> str:
    """The line of the table's header with this name, `Device` or `Code`."""
    text = _file(folder, speed, ".md").read_text(encoding="utf-8")
    start = f"- {name}: "
    lines = (line for line in text.splitlines() if line.startswith(start))
    return next(lines, start).removeprefix(start).rstrip(".")
