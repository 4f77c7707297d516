"""Prints messages, and progress as a live bar on a terminal, else as a line every ten seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import rich.progress

from experiments.support.errors import printable

_SECONDS_PER_LINE = 10.0


def say(message: str) -> None:
    """Print a message, with control characters escaped."""
    print(printable(message))


def silent(message: str) -> None:
    """Print nothing; ranks other than 0 use it instead of `say`."""


@contextmanager
def progress(
    steps: int, first: int, unit: str, enabled: bool
) -> Iterator[Callable[[int, int, float], None]]:
    """A context that shows the progress of a training: step, loss, time left, and `unit` (tokens or
    images) per second. It gives a function to call with the number of steps that are done, the
    units that this process has processed so far, and the loss. Prints nothing unless `enabled`."""
    start, next_line = time.perf_counter(), _SECONDS_PER_LINE
    bar = rich.progress.Progress(
        rich.progress.TextColumn("step {task.completed}/{task.total}"),
        rich.progress.BarColumn(bar_width=None),
        rich.progress.TextColumn("{task.description}"),
        rich.progress.TimeRemainingColumn(),
        console=rich.console.Console(stderr=True),
        expand=True,
    )
    task, live = bar.add_task("", total=steps, completed=first), enabled and sys.stderr.isatty()

    def update(done: int, count: int, loss: float) -> None:
        nonlocal next_line
        seconds = time.perf_counter() - start
        text = f"loss {loss:.4f}, {count / seconds:,.0f} {unit}/s"
        if live:
            bar.update(task, completed=done, description=text)
        elif enabled and (seconds >= next_line or done == steps):
            next_line = seconds + _SECONDS_PER_LINE
            left = seconds / (done - first) * (steps - done)
            print(f"step {done}/{steps}: {text}, {left:.0f} s left", flush=True)

    with bar if live else nullcontext():
        yield update
