"""Where a run's figures go: a JSONL file, which is the truth, and optional viewers."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from experiments.checkpoint import finite, write_atomic
from experiments.errors import UserError


class MetricsLog:
    """Appends one JSON object per record to `metrics.jsonl`; each has a `step`.

    A resumed run drops the records from its first step on, since it makes them again.
    """

    def __init__(self, directory: Path, first_step: int, viewers: tuple[str, ...]) -> None:
        self.path = directory / "metrics.jsonl"
        kept = [r for r in read_metrics(self.path) if r["step"] < first_step]
        lines = "".join(json.dumps(r) + "\n" for r in kept)
        write_atomic(self.path, lambda p: p.write_text(lines, encoding="utf-8"))
        self._file = self.path.open("a", encoding="utf-8")
        self._tensorboard = _tensorboard(directory) if "tensorboard" in viewers else None
        self._wandb = _wandb(directory) if "wandb" in viewers else None

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(finite(record)) + "\n")
        self._file.flush()
        numbers = {k: v for k, v in record.items() if isinstance(v, int | float) and k != "step"}
        if self._tensorboard is not None:
            for name, value in numbers.items():
                self._tensorboard.add_scalar(name, value, record["step"])
        if self._wandb is not None:
            self._wandb.log(numbers, step=record["step"])

    def close(self) -> None:
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole records of a metrics file; a last line cut by a kill is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


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
