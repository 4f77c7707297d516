"""Runs the trainings and measurements of a table as processes of their own."""

from __future__ import annotations

import queue
import shlex
import time
from dataclasses import dataclass
from typing import Any

from experiments.support.errors import UserError
from reproduce.engine import Report
from reproduce.jobs import Job
from reproduce.processes import Process, terminate, visible_gpus

POLL = 0.2  # seconds


@dataclass(eq=False)
class Launch:
    """How the jobs of a table are started.

    words: the beginning of a training's command, such as torchrun and its options; [] = Python.
    per_gpu: so many jobs run at once on each GPU; None = one after the other, which see all GPUs.
    stopped: True once `stop` was called.
    """

    words: list[str]
    per_gpu: int | None
    stopped: bool = False

    def __post_init__(self) -> None:
        self.places: queue.Queue[str | None] = queue.Queue()
        gpus: list[str | None] = [None]
        if self.per_gpu is not None:
            gpus = (visible_gpus() or gpus) * self.per_gpu
        for gpu in gpus:
            self.places.put(gpu)
        self.at_once = len(gpus)

    def run(self, job: Job, report: Report) -> Any:
        """Run a job in a process of its own, on a free GPU.

        Raises:
            UserError: it did not finish; with the last line of its output.
        """
        command = job.command(self.words)
        assert command is not None  # its source is finished
        gpu = self.places.get()
        process = Process(command, job.config.directory() / "output.txt", gpu, self.at_once)
        try:
            while not (process.ended() or self.stopped):
                time.sleep(POLL)
        finally:
            terminate([process])
            self.places.put(gpu)
        if (result := job.result()) is None:
            raise UserError(process.reason())
        return result

    def stop(self) -> None:
        """Let all jobs that run, or are about to, save a checkpoint and end."""
        self.stopped = True


def commands(jobs: list[Job], words: list[str]) -> list[str]:
    """The lines that run the jobs which are not finished, in a shell."""
    lines = []
    for job in jobs:
        if job.result() is None:
            command = job.command(words)
            lines.append(f"# {job}")
            lines.append(
                shlex.join(command)
                if command is not None
                else f"# its command follows from the finished run of {job.source}: ask again then"
            )
    return lines
