"""Writes a run's metrics to a JSONL file, which is authoritative, and to optional viewers.

A run that is stopped and resumed remains one run of the viewers.
"""

import json
import os
import uuid
from pathlib import Path
from typing import Any

from experiments.support.checkpoint import finite, write_text
from experiments.support.errors import writing
from experiments.support.results import read_metrics as read_metrics

WANDB_ID = "wandb_id.txt"


class MetricsLog:
    """Appends one JSON object per record to `metrics.jsonl`; each has a `step`. lines: those
    written so far, which a checkpoint keeps, so that no record is missing or repeated after it.
    config: of the run, shown by the viewers."""

    def __init__(
        self, directory: Path, lines: list[str], viewers: tuple[str, ...], config: dict[str, Any]
    ) -> None:
        self.path, self.lines = directory / "metrics.jsonl", [*lines]
        write_text(self.path, "".join(self.lines))
        self._file = self.path.open("ab", buffering=0)
        self._tensorboard = _tensorboard(directory, config) if "tensorboard" in viewers else None
        self._wandb = _wandb(directory, config) if "wandb" in viewers else None
        if self._tensorboard is not None:
            for line in self.lines:
                self._draw(json.loads(line))

    def write(self, record: dict[str, Any]) -> None:
        self.lines.append(json.dumps(finite(record)) + "\n")
        with writing(self.path):
            left = self.lines[-1].encode()
            while left:  # a disk that fills up accepts only a part of the line
                left = left[self._file.write(left) :]
        self._draw(record)
        if self._wandb is not None:
            self._wandb.log(_numbers(record), step=record["step"])

    def _draw(self, record: dict[str, Any]) -> None:
        if self._tensorboard is not None:
            for name, value in _numbers(record).items():
                self._tensorboard.add_scalar(name, value, record["step"])

    def sync(self) -> None:
        """Make the records survive a power failure."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self.sync()
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def _numbers(record: dict[str, Any]) -> dict[str, float]:
    return {k: v for k, v in record.items() if isinstance(v, int | float) and k != "step"}


def _tensorboard(directory: Path, config: dict[str, Any]) -> Any:
    """The writer of a new event file that replaces the old; the caller writes all records again."""
    from torch.utils.tensorboard import SummaryWriter

    for old in directory.glob("events.out.tfevents.*"):
        old.unlink()
    writer = SummaryWriter(str(directory))
    writer.add_text("config", f"```\n{json.dumps(config, indent=2)}\n```")
    return writer


def _wandb(directory: Path, config: dict[str, Any]) -> Any:
    """The Weights & Biases run of this directory; a file in it keeps the run's id. A directory that
    was removed and made again is a new run, because the old one would reject its records."""
    import wandb

    path = directory / WANDB_ID
    if not path.exists():
        write_text(path, uuid.uuid4().hex[:16])
    return wandb.init(
        project="sparse24",
        id=path.read_text(encoding="utf-8"),
        name="-".join(directory.resolve().parts[-3:]),
        config=config,
        allow_val_change=True,  # `impl` may change from one start to the next
        resume="allow",
        dir=str(directory),
    )
