"""Runs the trainings of a table: the baseline first, what is finished not again.

A run is known by its config alone, so tables share runs, and a second call does what is missing.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments import pretrain, results
from experiments.checkpoint import write_atomic
from experiments.config import RunConfig, load
from experiments.errors import UserError
from experiments.tracking import read_metrics
from reproduce.spec import Table

Report = Callable[[str], None]
Train = Callable[[RunConfig, Report], Any]


@dataclass(frozen=True)
class Job:
    """One training that a table needs."""

    label: str
    seed: int
    config: RunConfig

    def __str__(self) -> str:
        return f"{self.label}, seed {self.seed}"


@dataclass(frozen=True)
class Run:
    """A finished job: its `result.json` and the records of its `metrics.jsonl`."""

    job: Job
    result: dict[str, Any]
    log: list[dict[str, Any]]


def plan(table: Table, tier: str, runs: Path) -> list[Job]:
    """The jobs of a table in the order in which they run: row by row, seed by seed.

    Raises:
        UserError: a row whose overrides do not fit together.
    """
    chosen = table.tiers[tier]
    jobs: list[Job] = []
    for row in table.rows:
        for seed in chosen.seeds:
            own = [f"tier={tier}", f"seed={seed}"]
            try:
                config = load([*chosen.overrides, *row.overrides, *own])
            except UserError as error:
                raise UserError(f"{table.name}, tier {tier}, {row.label}: {error}") from error
            config = replace(config, runs=runs)
            if row.starts_from is not None:
                [source] = [j for j in jobs if (j.label, j.seed) == (row.starts_from, seed)]
                config = replace(config, init=source.config.directory())
            jobs.append(Job(row.label, seed, config))
    return jobs


def result_of(job: Job) -> dict[str, Any] | None:
    """The content of its `result.json`, if it was run to the end.

    What starts from an unfinished run cannot be finished: it has no name yet.
    """
    source = job.config.init
    if source is not None and not (source / results.FILE).is_file():
        return None
    return pretrain.finished(job.config)


def execute(jobs: list[Job], report: Report, train: Train = pretrain.run) -> None:
    """Run what is not finished, in order. A failure is reported in one line and the rest go on."""
    waiting = [(n, job) for n, job in enumerate(jobs, 1) if result_of(job) is None]
    report(f"{len(jobs)} runs: {len(jobs) - len(waiting)} done already, {len(waiting)} to do")
    start = time.monotonic()
    for position, (number, job) in enumerate(waiting):
        elapsed = time.monotonic() - start
        left = ""
        if position:
            rest = elapsed / position * (len(waiting) - position)
            left = f" ({clock(elapsed)} elapsed, about {clock(rest)} left)"
        report(f"[{number}/{len(jobs)}] {job}{left}")
        try:
            trace = job.config.directory() / "failure.txt"
            trace.unlink(missing_ok=True)
            train(job.config, lambda message: report(f"  {message}"))
        except UserError as error:
            report(f"failed: {job}: {_one_line(error)}")
        except Exception as error:
            write_text(trace, traceback.format_exc())
            report(f"failed: {job}: {type(error).__name__}: {_one_line(error)} (see {trace})")
    if waiting:
        report(f"{clock(time.monotonic() - start)} for {len(waiting)} runs")


def finished(jobs: list[Job]) -> list[Run]:
    """Those jobs that were run to the end, with what came out."""
    runs = []
    for job in jobs:
        result = result_of(job)
        if result is not None:
            log = read_metrics(job.config.directory() / "metrics.jsonl")
            runs.append(Run(job, result, log))
    return runs


def write_text(path: Path, text: str) -> None:
    """Atomically."""

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    write_atomic(path, write)


def clock(seconds: float) -> str:
    """`m:ss`, or `h:mm:ss` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
