"""Progress of a training run: a live bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import sys
import time

import rich.progress

_SECONDS_PER_LINE = 10.0


class Progress:
    """Shows step, loss, speed and the time left; silent unless `enabled`.

    unit: what the speed is told in, `tokens` or `images` per second.
    """

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
        """`done` steps are complete; `count` units were seen since the first of this process."""
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
