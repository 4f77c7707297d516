"""Reads and writes `result.json`: a finished run's config, environment and figures."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from experiments.support.checkpoint import lacks, write_json
from experiments.support.errors import UserError

SCHEMA = 1
FILE = "result.json"

# Entries of a training's result that fine-tuning, evaluation and export need (checkpoint.lacks).
TRAINING: dict[str, Any] = {
    "config_hash": str,
    "config": {"model": {"name": str}, "data": {"source": str}, "method": {"name": str}},
    "converted": list,
}


def write_result(directory: Path, result: dict[str, Any]) -> dict[str, Any]:
    """Write `result` with schema and environment added, atomically, and return it."""
    result = {"schema": SCHEMA, **result, "environment": environment()}
    write_json(directory / FILE, result)
    return result


def read_finished(
    directory: Path, config_hash: str, shape: dict[str, Any]
) -> dict[str, Any] | None:
    """The `result.json` in `directory` if it has this config hash and today's schema, else None.

    shape: what it must hold (`checkpoint.lacks`).

    Raises:
        UserError: it cannot be read, or lacks something.
    """
    path = directory / FILE
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); remove it and run again") from error
    found = lacks(result, {"schema": int, "config_hash": str})
    if found is None:
        if (result["schema"], result["config_hash"]) != (SCHEMA, config_hash):
            return None
        found = lacks(result, shape)
    if found is not None:
        what = f"no {found}" if found else "no result"
        raise UserError(f"{path} is damaged ({what} in it); remove it and run again")
    return result


def number(record: Any, path: str) -> float:
    """The number at a dotted path of a record; nan if there is none, as where a training
    diverged."""
    for key in path.split("."):
        record = record.get(key) if isinstance(record, dict) else None
    return float(record) if isinstance(record, int | float) else math.nan


def environment() -> dict[str, Any]:
    """Versions, device, code revision and peak memory of this process."""
    names = ("torch", "triton", "numpy", "tiktoken", "tokenizers", "hydra-core")
    cuda = torch.cuda.is_available()
    return {
        **git_state(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in names},
        "device": torch.cuda.get_device_name() if cuda else cpu_name(),
        "threads": torch.get_num_threads(),
        # Linux counts in KiB, macOS in bytes.
        "peak_memory_bytes": torch.cuda.max_memory_allocated()
        if cuda
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * (1 if sys.platform == "darwin" else 1024),
    }


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


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The CPU's model name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
