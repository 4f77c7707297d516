"""Runs the unfinished jobs of a table, one after the other, and collects the results."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.support.checkpoint import write_text
from experiments.support.errors import UserError, one_line
from experiments.training.tracking import read_metrics
from reproduce.jobs import Job, Place, Plan

Report = Callable[[str], None]  # prints a message on the progress
Act = Callable[[Job, Report], Any]  # runs a job


@dataclass(frozen=True)
class PlacedRun:
    """A finished training or benchmark, and its place in a table.

    result: the content of its `result.json`. log: the entries of its `metrics.jsonl`. measures: the
    content of the `result.json` of each of its measurements, by `<measure>` or `<measure>.<task>`.
    """

    place: Place
    directory: Path
    result: dict[str, Any]
    log: list[dict[str, Any]]
    measures: dict[str, dict[str, Any]]


def run_job(job: Job, report: Report) -> Any:
    """Run a job by its driver; return the result."""
    return job.module.run(job.config, report)


def execute(
    jobs: list[Job],
    report: Report,
    act: Act = run_job,
    at_once: int = 0,
    stop: Callable[[], None] = lambda: None,
) -> int:
    """Run the jobs that are not finished, in order; return how many they were. The failure of a job
    is reported in one line, and the others are run.

    Args:
        at_once: so many jobs run side by side, each by `act` in a thread of its own; 0 = one after
            the other in this thread.
        stop: makes the `act` of all threads return, for an interrupt.
    """
    waiting = [(n, job) for n, job in enumerate(jobs, 1) if job.result() is None]
    report(f"{len(jobs)} runs: {len(jobs) - len(waiting)} done already, {len(waiting)} to do")
    if waiting and (why := lacking(job.config for _, job in waiting)):
        report(f"nothing is run: {why}; tier=smoke runs anywhere")
        return len(waiting)
    start = time.monotonic()
    ended = {job: threading.Event() for _, job in waiting}

    def run(position: int, number: int, job: Job) -> None:
        if job.source in ended:  # it was begun before, since it stands before
            ended[job.source].wait()
        elapsed = time.monotonic() - start
        left = ""
        if done := sum(event.is_set() for event in ended.values()):
            rest = elapsed / done * (len(waiting) - position)
            left = f" ({clock(elapsed)} elapsed, about {clock(rest)} left)"
        report(f"[{number}/{len(jobs)}] {job}{left}")
        try:
            _attempt(job, report, act)
        finally:
            ended[job].set()

    tasks = [(position, *task) for position, task in enumerate(waiting)]
    if not at_once:
        for task in tasks:
            run(*task)
    else:
        with ThreadPoolExecutor(at_once) as pool:
            try:
                for future in [pool.submit(run, *task) for task in tasks]:
                    future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                stop()
                raise
    if waiting:
        report(f"{clock(time.monotonic() - start)} for {len(waiting)} runs")
    return len(waiting)


def _attempt(job: Job, report: Report, act: Act) -> None:
    """Run a job; report its failure."""
    if job.source is not None and job.source.result() is None:
        report(f"failed: {job}: it needs the finished run of {job.source}")
        return
    trace = None
    try:
        trace = job.config.directory() / "failure.txt"
        trace.unlink(missing_ok=True)
        act(job, lambda message: report_lines(message, report))
    except UserError as error:
        report(f"failed: {job}: {one_line(error)}")
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        if trace is not None:
            write_text(trace, traceback.format_exc())
            reason += f" (see {trace})"
        report(f"failed: {job}: {reason}")


def lacking(configs: Iterable[Any]) -> str:
    """The needs of a config that this machine lacks, in words; "" if there is everything. A config
    may be None, that of a job whose source is not finished."""
    settings = [getattr(config, "impl", config) for config in configs]  # a benchmark has no impl
    on_gpu = [one for one in settings if getattr(one, "device", None) == "cuda"]
    if on_gpu and not torch.cuda.is_available():
        return "a GPU is needed, and torch sees none here"
    return next((why for one in on_gpu if (why := getattr(one, "no_products", ""))), "")


def report_lines(message: str, report: Report) -> None:
    """Report a driver's message, indented and without its tables, which the run's own files
    have."""
    for line in message.splitlines():
        if line.strip() and not line.startswith("|"):
            report(f"  {line}")


def finished_runs(plan: Plan) -> list[PlacedRun]:
    """The finished runs of a plan, in the order of the table's places."""
    runs = []
    for place, (job, measures) in plan.places.items():
        result = job.result()
        if result is None:
            continue
        directory = job.config.directory()
        log = read_metrics(directory / "metrics.jsonl")
        results = {part: measure.result() for part, measure in measures.items()}
        finished = {part: content for part, content in results.items() if content is not None}
        runs.append(PlacedRun(place, directory, result, log, finished))
    return runs


def clock(seconds: float) -> str:
    """Seconds as `m:ss`, or as `h:mm:ss` if they are an hour or more."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
