"""Reads and writes `result.json`: a finished run's config, environment and figures."""

import functools
import importlib.metadata
import json
import math
import platform
import resource
import subprocess
from pathlib import Path
from typing import Any

import torch

from experiments.support.checkpoint import read_sealed, write_sealed
from experiments.support.errors import UserError

SCHEMA = 1
FILE = "result.json"


def write_result(directory: Path, result: dict[str, Any]) -> dict[str, Any]:
    """Write `result` with schema and environment added, atomically, and return it."""
    result = {"schema": SCHEMA, **result, "environment": environment()}
    write_sealed(directory / FILE, result)
    return result


class NoResult(UserError):
    """There is no usable result. why: `missing`, `unfinished` (begun but not ended), `diverged`,
    `other` (of another config, schema or kind of run) or `damaged`."""

    def __init__(self, why: str, message: str) -> None:
        super().__init__(message)
        self.why = why


def read(
    directory: Path, config_hash: str | None = None, *, diverged: bool = False
) -> dict[str, Any]:
    """The content of `result.json` in `directory`; that of a training that diverged only if asked.
    Raises a `NoResult` if there is none, or it is damaged or of another config."""
    path = directory / FILE
    try:
        result = read_sealed(path)
        if not isinstance(result, dict) or not {"schema", "config_hash"} <= result.keys():
            raise ValueError("no result in it")
    except (FileNotFoundError, NotADirectoryError) as error:
        begun = any((directory / name).exists() for name in ("metrics.jsonl", "checkpoints"))
        missing = f"{FILE} is missing" if directory.is_dir() else "there is no such folder"
        found = "it was begun and has not ended" if begun else missing
        runs = ", ".join(sorted(path.parent.name for path in directory.glob(f"*/{FILE}")))
        advice = f"choose one in it: {runs}" if runs else "run it to its end first"
        message = f"{directory} holds no finished run ({found}); {advice}"
        raise NoResult("unfinished" if begun else "missing", message) from error
    except (OSError, ValueError) as error:
        message = f"{path} is damaged ({error}); remove it and run again"
        raise NoResult("damaged", message) from error
    if result["schema"] != SCHEMA:
        raise NoResult(
            "other",
            f"{path} has schema {result['schema']}, this version of the code reads {SCHEMA}; read "
            f"it with the version that wrote it, or move {directory} away to run again",
        )
    if config_hash not in (None, result["config_hash"]):
        raise NoResult("other", f"{path} is of another config; move {directory} away to run again")
    if (why := divergence(result)) and not diverged:
        raise NoResult(
            "diverged", f"{directory} diverged ({why}); train with a lower train.learning_rate"
        )
    return result


def divergence(result: dict[str, Any]) -> str | None:
    """Why the training of a result diverged, so that it has no loss; None if it did not."""
    lost = result.get("metrics", {}).get("val_loss", 0.0) is None
    return str(result.get("diverged", "its val_loss is not finite")) if lost else None


def read_finished(directory: Path, config_hash: str) -> dict[str, Any] | None:
    """`read` for a run that may not have been made yet: None if it has no result or diverged.
    Raises a `NoResult` if it is damaged, or of another config or schema, and must not be lost."""
    try:
        return read(directory, config_hash)
    except NoResult as reason:
        if reason.why in ("damaged", "other"):
            raise
        return None


def read_training(directory: Path, *, diverged: bool = False) -> dict[str, Any]:
    """`read` for the result of a training. Raises a `NoResult` if it is not one, too."""
    result = read(directory, diverged=diverged)
    if not {"model", "data", "method"} <= result.get("config", {}).keys():
        path = directory / FILE
        raise NoResult("other", f"{path} is not the result of a training, whose config it lacks")
    return result


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete records of a metrics file; a last line cut off by a kill is left out."""
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


def number(record: Any, path: str) -> float:
    """The number at a dotted path of a record; nan without one, as after divergence."""
    for key in path.split("."):
        record = record.get(key) if isinstance(record, dict) else None
    return float(record) if isinstance(record, int | float) else math.nan


def environment() -> dict[str, Any]:
    """Versions, device, code revision and peak memory of this process."""
    names = ("torch", "triton", "numpy", "tiktoken", "tokenizers", "hydra-core")
    return {
        **git_state(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: version_of(name) for name in names},
        "device": device_name(),
        "threads": torch.get_num_threads(),
        "peak_memory_bytes": torch.cuda.max_memory_allocated()
        if torch.cuda.is_available()
        else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def revision() -> str:
    """The revision of the code that runs, with `-dirty` if it was changed since."""
    state = git_state()
    return f"{state['git_revision'] or 'unknown'}{'-dirty' if state['git_dirty'] else ''}"


@functools.cache  # what was imported stays, whatever happens to the files
def git_state() -> dict[str, Any]:
    """Revision of the code and whether it was changed since; None outside a git checkout."""

    def git(*args: str) -> str | None:
        root = Path(__file__).resolve().parent
        try:
            done = subprocess.run(
                ["git", *args], cwd=root, capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    status = git("status", "--porcelain")
    return {
        "git_revision": git("rev-parse", "HEAD"),
        "git_dirty": None if status is None else bool(status),
    }


def version_of(name: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def device_name() -> str:
    """The name of the GPU, or of the processor if there is no GPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()


def cpu_name() -> str:
    """The CPU's model name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
