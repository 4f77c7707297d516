"""Judges the papers' claims on time and memory by the measured tables in `measured/h200`.

The rules are in `claims.yaml`. A verdict holds for the device of the measurement, which is not the
paper's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.runs.stats import holm, mean, p_value, paired_interval
from experiments.support.errors import UserError
from reproduce.claims import NOT_TESTED, Claims, Speed, by_size, verdict
from reproduce.reading import MEASURED, TABLES, read_rows, read_table
from reproduce.spec import Table

SHOWN = "shown, not judged"


@dataclass(frozen=True)
class Line:
    """One row of a measured table. paper: the paper's factor over dense, if it has one. ours: our
    factor, the mean of n repeats, with its `interval`. why: the reason why it is not judged."""

    label: str
    paper: float | None
    ours: float
    n: int
    interval: tuple[float, float]
    verdict: str
    why: str = ""

    @property
    def share(self) -> float | None:
        """Our gain as a fraction of the paper's, if that has one."""
        return None if self.paper in (None, 1) else (self.ours - 1) / (self.paper - 1)


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
        lines, why = [_gain(claims, speed, x, paper.get(x), ours[x]) for x in labels], ""
    judged = [line.verdict for line in lines if line.verdict != SHOWN]
    result = verdict(judged) if judged else SHOWN
    return Measured(speed, result, lines, device, code, why)


def _gain(
    claims: Claims, speed: Speed, label: str, paper: float | None, repeats: dict[int, float]
) -> Line:
    """The verdict on one row by our gain over dense. A count has no error, however often it was
    made."""
    counted = speed.kind == "counted"
    values = list(repeats.values())[: 1 if counted else None]
    ours, interval = mean(values), paired_interval(values)
    line = Line(label, paper, ours, len(values), interval, SHOWN, speed.left_out.get(label, ""))
    if paper is None or line.why:
        return line
    if len(values) == 1:
        noise = 0.0 if counted else claims.noise
        interval = ours * (1 - noise), ours * (1 + noise)
    sign = -1 if speed.less else 1
    low, high = sorted(sign * (end - 1) for end in interval)
    certain = (low > 0) - (high < 0)
    half = sign * (paper - 1) / 2
    return replace(line, verdict=by_size((low, high), half, certain, speed.own_setting))


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
        log = [math.log(ours[label][seed] / ours[other][seed]) for seed in both]
        quotient = paper[label] / paper[other] if {label, other} <= paper.keys() else None
        factor = math.exp(mean(log)) if both else math.nan
        low, high = map(math.exp, paired_interval(log))
        why = speed.left_out.get(label, "")
        first = SHOWN if why else NOT_TESTED
        lines.append(Line(label, quotient, factor, len(both), (low, high), first, why))
        logs += [] if why else [log]
    fewest = min(line.n for line in lines)
    if fewest < claims.seeds:
        return lines, f"{fewest} of {claims.seeds} repeats ({_command(speed)})"
    ps = iter(holm([p_value(log) for log in logs]))
    for place, line in enumerate(lines):
        if not line.why:
            low, high = map(math.log, line.interval)
            half = None if line.paper is None else math.log(line.paper) / 2
            certain = ((low + high > 0) or -1) if next(ps) < claims.level else 0
            found = by_size((low, high), half, certain, speed.own_setting)
            lines[place] = replace(line, verdict=found)
    return lines, ""


# --- what was measured ---------------------------------------------------------------------------


def _file(folder: Path, speed: Speed, suffix: str) -> Path:
    return folder / f"{speed.table}-full{suffix}"


def _published(folder: Path, speed: Speed) -> dict[str, float]:
    """The paper's factors by row."""
    return _column(_file(folder, speed, ".csv"), f"{speed.column}: paper")


def _repeats(folder: Path, speed: Speed) -> dict[str, dict[int, float]]:
    """Our factors by row and seed: those of every run if the file of runs is there, else only the
    mean, as that of seed 0."""
    runs = read_rows(_file(folder, speed, "-runs.csv"))
    if not runs:
        means = _column(_file(folder, speed, ".csv"), f"{speed.column}: mean")
        return {label: {0: mean} for label, mean in means.items()}
    value = {column.label: column.value for column in _table(speed).columns}.get(speed.column) or ""
    factors: dict[str, dict[int, float]] = {}
    for row in (row for row in runs if row.get(value)):
        factors.setdefault(row["method"], {})[int(row["seed"])] = float(row[value])
    return factors


def _column(path: Path, name: str) -> dict[str, float]:
    return {row["method"]: float(row[name]) for row in read_rows(path) if row.get(name)}


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
