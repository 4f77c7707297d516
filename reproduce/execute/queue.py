"""Runs the jobs of tables and blocks that are not finished: in this process, or as processes of
their own, several on each GPU, because one small model does not fill a GPU.

The failure of a job is reported in one line, and the others are run. An interrupt, the end of the
time budget or (on Linux) the death of this process lets running jobs save a checkpoint, from which
the next call goes on.
"""

import shlex
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch

from experiments.support.checkpoint import write_text
from experiments.support.errors import Stop, UserError, deferred_stop, one_line
from reproduce.execute.jobs import OUTPUT, Job, Report
from reproduce.execute.processes import Launch, Process, terminate

POLL = 0.2  # seconds
SCORES = ("val_top1", "knn_top1", "linear_top1")  # percent, for runs on images


def execute(jobs: list[Job], report: Report, launch: Launch | None = None) -> int:
    """Run the jobs of a table that are not finished, in order; return how many they were. launch:
    as processes, instead of in this one."""
    left = [job for job in jobs if job.result() is None]
    report(f"{len(jobs)} runs: {len(jobs) - len(left)} done already, {len(left)} to do")
    if left and (why := lacking(job.config for job in left)):
        report(f"nothing is run: {why}; tier=smoke runs anywhere")
    else:
        Queue(left, report, launch).work()
    return len(left)


class Queue:
    """The jobs that wait, and those that are running.

    waiting: in the order of their start, a source before what starts from it. todo: all that are
    not done. working: (job, process, start) by place. result: of a job that is finished and kept.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        report: Report,
        launch: Launch | None = None,
        result: Callable[[Any], dict[str, Any] | None] = Job.result,
    ) -> None:
        self.waiting, self.report, self.launch, self.result = [*jobs], report, launch, result
        self.todo = {*jobs}
        self.places = [None] if launch is None else launch.places()
        self.working: dict[int, tuple[Job, Process, float]] = {}
        self.total, self.done, self.failed = len(jobs), 0, 0

    @property
    def left(self) -> int:
        """The number of runs that are neither done nor failed."""
        return self.total - self.done - self.failed

    def work(self, minutes: float | None = None) -> None:
        """Run until nothing waits; after so many minutes stop what is running."""
        self.begun = time.monotonic()
        deadline = self.begun + (minutes * 60 if minutes is not None else float("inf"))
        try:
            # An exception in the midst of `Popen.poll` would leave its lock taken, and no later
            # wait for that process would end. A job in this process handles signals itself.
            with nullcontext(Stop()) if self.launch is None else deferred_stop(again=False) as stop:
                while stop.number is None and time.monotonic() < deadline:
                    if not self._fill() and not self.working:
                        break
                    if self.working:
                        time.sleep(POLL)
                    for place, (job, own, started) in [*self.working.items()]:
                        if own.process.poll() is not None:
                            del self.working[place]
                            self._ended(job, own.reason(), started)
            if stop.number is not None and stop.kind is not None:
                signal.raise_signal(stop.number)  # its handler defers a second one
                raise stop.kind
        finally:
            terminate([process for _, process, _ in self.working.values()])
            for job, _, _ in self.working.values():  # a stopped one may have finished
                self.done += self.result(job) is not None

    def _fill(self) -> bool:
        """Start a job at every free place; return True if one was started."""
        ready = [job for job in self.waiting if job.source not in self.todo]
        free = [place for place in range(len(self.places)) if place not in self.working]
        for place, job in zip(free, ready, strict=False):
            self.waiting.remove(job)
            self._start(job, place)
        return bool(free and ready)

    def _start(self, job: Job, place: int) -> None:
        started = time.monotonic()
        try:
            if self.launch is None:
                self.report(f"{job} ...")
                run_here(job, self.report)
            else:
                command = job.command(self.launch.words)
                assert command is not None  # its source is finished
                log = job.config.directory() / OUTPUT
                process = Process(command, log, self.places[place], len(self.places))
                self.working[place] = job, process, started
                return
            reason = "it has no result"
        except (UserError, OSError) as error:  # a command that the system refuses
            reason = one_line(error)
        self._ended(job, reason, started)

    def _ended(self, job: Job, reason: str, started: float) -> None:
        """Report the result of a job, or why it has none. What starts from it is left out if it
        has no weights, also because it diverged, which is a result."""
        result, now = self.result(job), time.monotonic()
        left_out = self._leave_out(job) if job.result() is None else 0
        if result is None:
            self.failed += 1
            self.report(f"failed: {job}: {reason}")
        else:
            self.todo.discard(job)
            self.done += 1
            elapsed = now - self.begun
            remaining = elapsed / self.done * self.left
            spent, ahead = (str(timedelta(seconds=round(s))) for s in (elapsed, remaining))
            told = ", ".join([*_figures(result), f"{now - started:.0f} s"])
            place, of_time = f"[{self.done}/{self.total}]", f"{spent} elapsed, about {ahead} left"
            self.report(f"{place} {job}: {told} ({of_time})")
        if left_out:
            self.report(f"left out: {left_out} runs that start there")

    def _leave_out(self, job: Job) -> int:
        """Give up the jobs that need the weights of a job; return their number."""
        lost, before = {job}, self.failed
        for one in [*self.waiting]:
            if one.source in lost:
                lost.add(one)
                self.waiting.remove(one)
                self.failed += 1
        return self.failed - before


def run_here(job: Job, report: Report) -> None:
    """Run a job by its driver, in this process."""

    def indented(message: str) -> None:
        """Report a driver's message without its tables, which the run's own files have."""
        for line in message.splitlines():
            if line.strip() and not line.startswith("|"):
                report(f"  {line}")

    try:
        job.run(indented)
    except UserError:
        raise
    except Exception as error:
        log = job.config.directory() / OUTPUT
        write_text(log, traceback.format_exc())
        raise UserError(f"{type(error).__name__}: {one_line(error)} (see {log})") from error


def lacking(configs: Iterable[Any]) -> str:
    """The needs of a config that this machine lacks, in words; "" if there is everything. A config
    may be None, that of a job whose source is not finished."""
    settings = [getattr(config, "impl", config) for config in configs]  # a benchmark has no impl
    on_gpu = [one for one in settings if getattr(one, "device", None) == "cuda"]
    if on_gpu and not torch.cuda.is_available():
        return "a GPU is needed, and torch sees none here"
    return next((why for one in on_gpu if (why := getattr(one, "no_products", ""))), "")


def commands(jobs: list[Job], words: Sequence[str]) -> list[str]:
    """The lines that run the jobs which are not finished, in a shell."""
    lines = []
    for job in (job for job in jobs if job.result() is None):
        command = job.command(words)
        later = f"# its command follows from the finished run of {job.source}: ask again then"
        lines += [f"# {job}", later if command is None else shlex.join(command)]
    return lines


def _figures(result: dict[str, Any]) -> list[str]:
    metrics = result["metrics"]
    told = [f"{name} {metrics[name]:.2f}" for name in SCORES if name in metrics]
    if "val_loss" in metrics:
        loss = metrics["val_loss"]
        told.insert(0, "val_loss is not finite" if loss is None else f"val_loss {loss:.4f}")
    if "step_seconds" in result:
        told.append(f"{result['step_seconds'] * 1e3:.1f} ms a step")
    return told
