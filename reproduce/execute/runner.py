"""Runs a block: `python -m reproduce run BLOCK [minutes=N] [per_gpu=N]`.

Every run is a separate process, several on each GPU, because one small model does not fill a GPU. A
run is done if it has a record in `reproduce/evidence` or `runs/evidence`. A run from which others
start is trained before them if its weights are missing, even if it has a record. After the time
budget no run is started, and running ones are told to stop, which save a checkpoint first. They do
so as well if the runner dies (on Linux); the next runner waits until they have ended.
"""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.config.run import RunConfig
from experiments.data.manifest import DataConfig
from experiments.data.prepare import prepare
from experiments.images.dataset import load_images
from experiments.support.checkpoint import is_locked
from experiments.support.errors import UserError, deferred_stop
from reproduce.execute.blocks import EVIDENCE, Block, BlockRun
from reproduce.execute.jobs import clock, lacking
from reproduce.execute.processes import Process, terminate, visible_gpus

POLL = 0.2  # seconds
SCORES = ("val_top1", "knn_top1", "linear_top1")  # percent, for runs on images


@dataclass
class Worker:
    """A process that trains. runs: the runs that it makes, all with the same config."""

    runs: list[BlockRun]
    process: Process
    started: float

    def __str__(self) -> str:
        return " = ".join(str(run.job) for run in self.runs)


def run_block(
    block: Block,
    runs: Path,
    minutes: float | None = None,
    per_gpu: int = 1,
    report: Callable[[str], None] = print,
    committed: Path = EVIDENCE,
) -> bool:
    """Run everything that has no record yet, seed by seed; return True if all runs have a record in
    the end.

    Args:
        minutes: time budget; None = until all is done.
        per_gpu: simultaneous runs on each GPU, or on the CPU if there is no GPU.
        committed: folder of committed records.

    Raises:
        UserError: overrides that do not fit together, no GPU, or data that cannot be prepared.
    """
    queue = Queue(block, runs, per_gpu, report, committed)
    _prepare(block, [first.config for first, *_ in queue.waiting])
    queue.work(minutes)
    if queue.left:
        report(f"{queue.left} runs are left; start the same command again to go on")
    return queue.done == queue.total


def _prepare(block: Block, configs: list[RunConfig]) -> None:
    """Check that the trainings can begin, and prepare their data once instead of in every process.

    Raises:
        UserError: no GPU, or data that cannot be prepared.
    """
    if why := lacking(configs):
        raise UserError(f"block {block.name}: {why}")
    for data in {config.data for config in configs}:
        if isinstance(data, DataConfig):
            prepare(data)
        else:
            load_images(data)  # raises an error if they are missing


class Queue:
    """The trainings of a block that wait, and those that are running.

    A training is a list of runs, because variants with the same config share it. Numbers are those
    of runs.

    waiting: trainings in the order in which they are to be started. ahead: the first runs of those
    from which others start, which wait for them. working: running trainings by their place. held:
    those that another process is making, for example a child of a runner that was killed.
    durations: seconds of each finished training. begun: the time at which `work` began. total: runs
    that had no record at first.
    """

    def __init__(
        self,
        block: Block,
        runs: Path,
        per_gpu: int,
        report: Callable[[str], None],
        committed: Path,
    ) -> None:
        self.runs, self.report = runs, report
        self.kept, self.committed = runs / "evidence", committed
        everything = list(block.runs(runs))
        self.waiting = self._missing(everything)
        sources = {first.source for first, *_ in self.waiting if first.source is not None}
        self.ahead = {first for first, *_ in self.waiting if first in sources}
        self.places = (visible_gpus() or [None]) * per_gpu
        self.working: dict[int, Worker] = {}
        self.held: list[list[BlockRun]] = []
        self.durations: list[float] = []
        self.begun = 0.0
        self.total, self.done, self.failed = sum(map(len, self.waiting)), 0, 0
        done = len(everything) + len(self.ahead) - self.total
        report(
            f"{block.name}: {len(everything)} runs, {done} done already; "
            f"{len(self.places)} at a time"
        )
        if block.source is not None and self.ahead:
            source = block.source.block.name
            report(f"before them {len(self.ahead)} of block {source}, where they start")

    @property
    def left(self) -> int:
        """The number of runs that are neither done nor failed."""
        return self.total - self.done - self.failed

    def work(self, minutes: float | None) -> None:
        """Train until nothing waits; after so many minutes stop what is running."""
        self.begun = time.monotonic()
        deadline = self.begun + (minutes * 60 if minutes is not None else float("inf"))
        try:
            # An exception in the midst of `Popen.poll` would leave its lock taken, and no later
            # wait for that process would end.
            with deferred_stop(again=False) as stop:
                while stop.number is None and time.monotonic() < deadline:
                    self._fill(deadline)
                    if not self.working and not self.held:
                        break
                    time.sleep(POLL)
                    self._collect()
            if stop.number is not None and stop.kind is not None:
                signal.raise_signal(stop.number)  # its handler defers a second one
                raise stop.kind
        finally:
            terminate([worker.process for worker in self.working.values()])
            for worker in self.working.values():  # a stopped one may have finished
                self.done += sum(map(self._ended, worker.runs))

    def _fill(self, deadline: float) -> None:
        """Start a training at every free place, if one as long as the others can end in time."""
        expected = statistics.median(self.durations) if self.durations else 0.0
        ready = [training for training in self.waiting if training[0].source not in self.ahead]
        held = [training for training in ready if _is_held(training)]
        for first, *_ in (training for training in held if training not in self.held):
            self.report(f"{first.job}: another process is making it; waiting for that")
        self.held = held
        ready = [training for training in ready if training not in held]
        for place, gpu in enumerate(self.places):
            if place not in self.working and ready and time.monotonic() + expected < deadline:
                training = ready.pop(0)
                self.waiting.remove(training)
                log = training[0].file(self.kept / "logs").with_suffix(".txt")
                words = training[0].job.command()
                assert words is not None  # its source is finished
                process = Process(words, log, gpu, len(self.places))
                self.working[place] = Worker(training, process, time.monotonic())

    def _collect(self) -> None:
        """Keep the records of trainings that have ended, and report them."""
        for place in [p for p, w in self.working.items() if w.process.ended()]:
            worker = self.working.pop(place)
            result = worker.runs[0].result()
            if result is not None and all(map(self._ended, worker.runs)):
                self._succeeded(worker, result)
            elif _is_held(worker.runs):
                self.waiting.append(worker.runs)
            else:
                self._failed(worker)

    def _succeeded(self, worker: Worker, result: dict[str, Any]) -> None:
        now = time.monotonic()
        self.ahead.discard(worker.runs[0])
        self.done += len(worker.runs)
        self.durations.append(now - worker.started)
        elapsed = now - self.begun
        remaining = elapsed / self.done * self.left
        self.report(
            f"[{self.done}/{self.total}] {worker}: {_figures(result)}, {self.durations[-1]:.0f} s "
            f"({clock(elapsed)} elapsed, about {clock(remaining)} left)"
        )

    def _failed(self, worker: Worker) -> None:
        """Report a failure; trainings that start from the failed one are left out."""
        left_out = [training for training in self.waiting if training[0].source == worker.runs[0]]
        self.waiting = [training for training in self.waiting if training not in left_out]
        self.failed += len(worker.runs) + sum(map(len, left_out))
        self.report(f"failed: {worker}: {worker.process.reason()}")
        if left_out:
            self.report(f"left out: {sum(map(len, left_out))} runs that start there")

    def _missing(self, everything: list[BlockRun]) -> list[list[BlockRun]]:
        """The trainings to do, in order. A source whose weights are missing comes before runs that
        start from it."""
        trainings: dict[str, list[BlockRun]] = {}
        for run in everything:
            if run.record(self.committed, self.kept) is None and run.keep(self.kept) is None:
                if run.source is not None and not self._ended(run.source):
                    trainings.setdefault(run.source.digest(), [run.source])
                trainings.setdefault(run.digest(), []).append(run)
        return list(trainings.values())

    def _ended(self, run: BlockRun) -> bool:
        """True if a run is finished and its weights are here. Its record is saved, unless there is
        one already (for a source that was made again)."""
        if run.result() is None:
            return False
        return (run.record(self.committed, self.kept) or run.keep(self.kept)) is not None


def _is_held(training: list[BlockRun]) -> bool:
    """True if another process is making a training."""
    return is_locked(training[0].config.directory())


def _figures(record: dict[str, Any]) -> str:
    metrics = record["metrics"]
    loss = metrics.get("val_loss")
    told = ["val_loss is not finite" if loss is None else f"val_loss {loss:.4f}"]
    told += [f"{name} {metrics[name]:.2f}" for name in SCORES if name in metrics]
    return ", ".join([*told, f"{record['step_seconds'] * 1e3:.1f} ms a step"])
