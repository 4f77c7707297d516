"""Prints messages and the progress of a training: a live bar on a terminal, otherwise a line every
ten seconds."""

from __future__ import annotations

import sys
import time

import rich.progress

from experiments.support.errors import printable

_SECONDS_PER_LINE = 10.0


def say(message: str) -> None:
    """Print a message, with control characters escaped."""
    print(printable(message))


def silent(message: str) -> None:
    """Print nothing; ranks other than 0 use it instead of `say`."""


class Progress:
    """Progress of a training: step, loss, time left, and `unit` (tokens or images) per second.
    Prints nothing unless `enabled`."""

    def __init__(self, steps: int, first: int, unit: str, enabled: bool) -> None:
        self.steps, self.first, self.unit = steps, first, unit
        self.start = time.perf_counter()
        self.next_line = _SECONDS_PER_LINE
        self.bar: rich.progress.Progress | None = None
        self.enabled = enabled
        if enabled and sys.stderr.isatty():
            self.bar = rich.progress.Progress(
                rich.progress.TextColumn("step {task.completed}/{task.total}"),
                rich.progress.BarColumn(bar_width=None),
                rich.progress.TextColumn("{task.description}"),
                rich.progress.TimeRemainingColumn(),
                console=rich.console.Console(stderr=True),
                expand=True,
            )
            self.task = self.bar.add_task("", total=steps, completed=first)

    def __enter__(self) -> Progress:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def update(self, done: int, count: int, loss: float) -> None:
        """Show that `done` steps are complete and `count` units were processed by this process so
        far."""
        if not self.enabled:
            return
        seconds = time.perf_counter() - self.start
        text = f"loss {loss:.4f}, {count / seconds:,.0f} {self.unit}/s"
        if self.bar is not None:
            self.bar.update(self.task, completed=done, description=text)
        elif seconds >= self.next_line or done == self.steps:
            self.next_line = seconds + _SECONDS_PER_LINE
            left = seconds / (done - self.first) * (self.steps - done)
            print(f"step {done}/{self.steps}: {text}, {left:.0f} s left", flush=True)
