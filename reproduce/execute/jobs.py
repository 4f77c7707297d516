"""Plans the jobs of a table, trainings or benchmarks and then measurements of what was trained, and
collects their results.

A job is identified by its config, so that tables, variants and rows share runs, and a second call
does only what is missing. One that needs a finished run has no config before that run exists.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from experiments.support.errors import UserError
from experiments.training.tracking import read_metrics
from reproduce.specs.table import BENCH, Table, TableRow, Tier, Variant

Report = Callable[[str], None]  # prints a message on the progress
SHARED = ("pretrain", "distill", "dino", "translate", "finetune")  # run under torchrun, too
OUTPUT = "output.txt"  # in the directory of a job: what its process printed
INPUTS = "smoke_tasks"  # folder below that of the runs, written by smoke_tasks.py


@dataclass(eq=False)
class Job:
    """One training, benchmark or measurement."""

    label: str
    driver: str
    overrides: list[str]
    runs: Path  # the folder of all runs
    source: Job | None = None  # whose finished run this one starts from or measures
    source_key: str = ""  # of the override that takes the path of that run
    _config: Any = field(default=None, repr=False)

    def __str__(self) -> str:
        return self.label

    @cached_property
    def module(self) -> Any:
        """The driver's module, which has `load`, `run` and `finished`."""
        inside = "reproduce.measure" if self.driver == BENCH else f"experiments.{self.driver}"
        return importlib.import_module(inside)

    def arguments(self, source: Path | None) -> list[str]:
        """The driver's arguments, with the directory of the source's run filled in."""
        given = [] if source is None else [f"{self.source_key}={quoted(source)}"]
        return [*self.overrides, f"runs={quoted(self.runs)}", *given]

    def compose(self, source: Path | None) -> Any:
        """The config, with the directory of the source's run filled in."""
        return self.module.load(self.arguments(source))

    def command(self, launch: Sequence[str] = ()) -> list[str] | None:
        """The command line that runs the job, in words. A driver that can share its work among
        processes is started by `launch`, such as torchrun and its options, or by Python. None as
        long as the source's directory is not known."""
        source = None
        if self.source is not None:
            if self.source.config is None:
                return None
            source = self.source.config.directory()
        start = launch if launch and self.driver in SHARED else (sys.executable,)
        return [*start, "-m", f"experiments.{self.driver}", *self.arguments(source)]

    @property
    def config(self) -> Any:
        """The config; None as long as the source is not finished."""
        if self._config is None:
            if self.source is None:
                self._config = self.compose(None)
            elif self.source.result() is not None:
                self._config = self.compose(self.source.config.directory())
        return self._config

    def run(self, report: Report) -> None:
        """Run the job by its driver, in this process."""
        self.module.run(self.config, report)

    def result(self) -> dict[str, Any] | None:
        """The content of its `result.json`; None if the job is not finished, the file cannot be
        read, or the job's data are missing. Running the job reports the reason."""
        try:
            return None if self.config is None else self.module.finished(self.config)
        except UserError:
            return None


@dataclass(frozen=True)
class Place:
    """The place of a training in a table: the labels of its variant and row, and its seed."""

    variant: str
    row: str
    seed: int

    def __str__(self) -> str:
        return ", ".join(filter(None, [self.variant, self.row, f"seed {self.seed}"]))


@dataclass(frozen=True)
class Plan:
    """All jobs of a table in the order in which they run."""

    jobs: list[Job]
    # Each training or benchmark, and its measurements by `<measure>` or `<measure>.<task>`.
    places: dict[Place, tuple[Job, dict[str, Job]]]


def plan(table: Table, tier: str, runs: Path) -> Plan:
    """The plan of a table's tier: variant by variant, row by row, seed by seed."""
    chosen = table.tiers[tier]
    unique: dict[tuple[Any, ...], Job] = {}
    places: dict[Place, tuple[Job, dict[str, Job]]] = {}

    def job(label: str, driver: str, overrides: list[str], source: Job | None, key: str) -> Job:
        """The job that does this work; equal work shares one job."""
        new = Job(label, driver, overrides, runs, source, key)
        return unique.setdefault((driver, *overrides, id(source)), new)

    for variant, row, seed in table.trainings(tier):
        place = Place(variant.label, row.label, seed)
        own = [f"tier={tier}", f"seed={seed}"]
        overrides = [*_training(chosen, tier, variant, row), *own]
        source = None
        if row.starts_from is not None and not chosen.pretrained:
            source, _ = places[Place(variant.label, row.starts_from, seed)]
        trained = job(str(place), table.driver, overrides, source, "init")
        measures: dict[str, Job] = {}
        for name, measure in ({} if row.stage else chosen.measure).items():
            given = [*measure.overrides, *row.measure.get(name, []), *own]
            given = [o.replace("{inputs}", str(runs / INPUTS)) for o in given]
            for task in measure.tasks or [""]:
                part = f"{name}.{task}" if task else name
                with_task = [f"task={task}", *given] if task else given
                label = f"{place}, {part}"
                measures[part] = job(label, measure.driver, with_task, trained, "run")
        places[place] = trained, measures
    checked: set[tuple[str, ...]] = set()
    for one in unique.values():  # a measurement fits all runs or none: one check is enough
        try:
            if one.source is None:
                assert one.config is not None
            elif (one.driver, *one.overrides) not in checked:
                one.compose(runs / "unfinished")
        except UserError as error:
            raise UserError(f"{table.name}, tier {tier}, {one}: {error}") from error
        checked.add((one.driver, *one.overrides))
    return Plan(list(unique.values()), places)


def _training(chosen: Tier, tier: str, variant: Variant, row: TableRow) -> list[str]:
    """The overrides of a training."""
    started = chosen.started if row.starts_from is not None else []
    own = [*row.overrides, *row.tiers.get(tier, [])]
    given = [*chosen.overrides, *variant.overrides, *started, *own]
    return [override.replace("{variant}", variant.key) for override in given]


def quoted(path: Path) -> str:
    """A path as the value of a hydra override, in quotes where hydra needs them."""
    plain = re.fullmatch(r"[/.]?[A-Za-z_][\w./-]*", str(path), re.ASCII)
    if plain and str(path).lower() not in {"null", "true", "false", "nan", "inf"}:
        return str(path)
    text = str(path).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"


@dataclass(frozen=True)
class PlacedRun:
    """A finished training or benchmark, and its place in a table."""

    place: Place
    directory: Path
    result: dict[str, Any]  # the content of its `result.json`
    log: list[dict[str, Any]]  # the entries of its `metrics.jsonl`
    # The `result.json` of each of its measurements, by `<measure>` or `<measure>.<task>`.
    measures: dict[str, dict[str, Any]]


def finished_runs(plan: Plan) -> list[PlacedRun]:
    """The finished runs of a plan, in the order of the table's places."""
    runs = []
    for place, (job, measures) in plan.places.items():
        if (result := job.result()) is not None:
            directory = job.config.directory()
            log = read_metrics(directory / "metrics.jsonl")
            found = {part: own for part, one in measures.items() if (own := one.result())}
            runs.append(PlacedRun(place, directory, result, log, found))
    return runs
