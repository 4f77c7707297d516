"""Writes checkpoints in the background while training continues.

`Saver.save` copies the state to the host's memory and returns. A thread writes the copy
(training/checkpoints.py); with sharded weights every rank adds its rows. The thread does not
communicate: between steps the ranks exchange whether their files are written, and once all are,
rank 0 turns the folder into a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from experiments.support.errors import UserError
from experiments.training import checkpoints
from experiments.training.distributed import World

Work = Callable[[], Any]  # done in the thread; returns what other ranks must know, if anything


class Saver:
    """Writes the checkpoints of a training into `directory`, one at a time. All ranks must make the
    same calls, except `close`."""

    def __init__(self, directory: Path, world: World) -> None:
        self.directory, self.world = directory, world
        self.thread = futures.ThreadPoolExecutor(1, "checkpoint")
        self.pending: futures.Future[Any] | None = None
        self.finish: Callable[[dict[str, Any]], Any] | None = None  # with the files of all ranks
        self.abandon: Callable[[], None] | None = None  # what all ranks have written

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Wait until the previous checkpoint is written, then begin to write the state before
        optimizer step `step`. The state may change as soon as this returns.

        Raises:
            UserError: see `poll`.
        """
        self.wait()
        place, rank = (self.directory, step), self.world.rank
        rows: dict[str, Tensor] = {}
        copied = checkpoints.on_host(state, self.world.is_main, rows, {})
        self.abandon = partial(checkpoints.abandon, *place)
        write = partial(checkpoints.write, *place, rank, rows, copied)
        if rows:
            self.finish = partial(checkpoints.finish, *place)
            self.pending = self.thread.submit(write)
        else:  # rank 0 alone writes
            work: Work = (lambda: checkpoints.finish(*place, write())) if rank == 0 else dict
            self.pending = self.thread.submit(work)

    def poll(self) -> None:
        """Check whether the files are written, and complete the checkpoint; call it between steps.

        Raises:
            UserError: on every rank, if one of them could not write.
        """
        if self.pending is None:
            return
        found: Any = None
        done, problem = self.pending.done(), None
        try:
            found = self.pending.result() if done else None
        except UserError as error:
            problem = str(error)
        results = self.world.all_gather((done, found, problem))
        for *_, message in results:
            if message is not None:
                futures.wait([self.pending])
                self.world.all_gather(None)  # no rank writes any more
                if self.abandon is not None:
                    self.abandon()
                raise UserError(message)
        if not all(written for written, *_ in results):
            return
        self.pending, finish, self.finish = None, self.finish, None
        if finish is not None:
            files = {name: record for _, own, _ in results for name, record in own.items()}
            work: Work = partial(finish, files) if self.world.is_main else dict  # nothing to do
            self.pending = self.thread.submit(work)

    def wait(self) -> None:
        """Return when the last checkpoint is written. Raises the errors of `poll`."""
        while self.pending is not None:
            futures.wait([self.pending])
            self.poll()

    def close(self) -> None:
        """Let the thread finish writing, and end it."""
        self.thread.shutdown()
