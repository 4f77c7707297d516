"""Where a run's figures go: a JSONL file, which is the truth, and optional viewers."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from experiments.checkpoint import finite, write_atomic
from experiments.errors import UserError, writing


class MetricsLog:
    """Appends one JSON object per record to `metrics.jsonl`; each has a `step`.

    lines: of the records so far. A checkpoint keeps them, and a resumed run begins with those of
        its checkpoint: whatever became of the file, none is missing and none is there twice.
    """

    def __init__(self, directory: Path, lines: list[str], viewers: tuple[str, ...]) -> None:
        self.path, self.lines = directory / "metrics.jsonl", [*lines]
        text = "".join(self.lines)
        write_atomic(self.path, lambda p: p.write_text(text, encoding="utf-8"))
        self._file = self.path.open("ab", buffering=0)
        self._tensorboard = _tensorboard(directory) if "tensorboard" in viewers else None
        self._wandb = _wandb(directory) if "wandb" in viewers else None

    def write(self, record: dict[str, Any]) -> None:
        self.lines.append(json.dumps(finite(record)) + "\n")
        with writing(self.path):
            left = self.lines[-1].encode()
            while left:  # of a disk that fills up it takes a part first
                left = left[self._file.write(left) :]
        numbers = {k: v for k, v in record.items() if isinstance(v, int | float) and k != "step"}
        if self._tensorboard is not None:
            for name, value in numbers.items():
                self._tensorboard.add_scalar(name, value, record["step"])
        if self._wandb is not None:
            self._wandb.log(numbers, step=record["step"])

    def sync(self) -> None:
        """Make the records survive a power cut."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self.sync()
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole records of a metrics file; a last line cut by a kill is left out.

    Raises:
        UserError: another line is damaged.
    """
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise UserError(
                f"line {number} of {path} is damaged; remove {path.parent} and run it again"
            ) from error
    return records


def check_viewers(viewers: tuple[str, ...]) -> None:
    """A UserError for a viewer that is not installed."""
    for name in viewers:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"impl.loggers has {name}: run `pip install sparse24[logging]`")


def _tensorboard(directory: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(directory))


def _wandb(directory: Path) -> Any:
    import wandb

    path = directory.resolve()
    # A function of the directory, so a resumed run goes on in its own chart, and no other one does.
    id = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    name = "-".join(path.parts[-3:])
    return wandb.init(project="sparse24", id=id, name=name, resume="allow", dir=str(directory))
