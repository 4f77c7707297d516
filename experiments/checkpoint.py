"""Atomic, checked checkpoints: a killed process leaves the previous one whole.

A checkpoint is one `torch.save` file of tensors and plain values, read back with
`weights_only=True` (nothing is unpickled), and a sidecar with its size and SHA-256. The file is
written beside its place, synced, and renamed; the sidecar follows. The two newest are kept.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from experiments.errors import UserError

KEPT = 2


def write_atomic(path: Path, write: Callable[[Path], Any]) -> None:
    """Call `write` on a temporary path beside `path`, sync, and rename it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.touch()
        usual = temporary.stat().st_mode
        write(temporary)
        temporary.chmod(usual)  # safetensors makes files for their owner alone
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync_directory(directory: Path) -> None:
    """Make renames in `directory` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """`value` as indented JSON, atomically."""
    text = json.dumps(finite(value), indent=2) + "\n"
    write_atomic(path, lambda p: p.write_text(text, encoding="utf-8"))


def finite(value: Any) -> Any:
    """`value` with None for NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def save(directory: Path, step: int, state: dict[str, Any]) -> Path:
    """Write the state before optimizer step `step` as `directory/step-<step>.pt`."""
    path = directory / f"step-{step:09d}.pt"
    write_atomic(path, lambda p: torch.save(state, p))
    write_json(_sidecar(path), {"bytes": path.stat().st_size, "sha256": sha256(path)})
    whole = [p for p in sorted(directory.glob("step-*.pt")) if p <= path]
    for other in directory.glob("step-*.pt"):
        # Later ones were damaged, or this run would have begun there.
        if other not in whole[-KEPT:]:
            _sidecar(other).unlink(missing_ok=True)
            other.unlink()
    return path


def load_latest(directory: Path, warn: Callable[[str], None]) -> dict[str, Any] | None:
    """The newest whole checkpoint, on the CPU, or None; `warn` hears of each damaged one."""
    for path in sorted(directory.glob("step-*.pt"), reverse=True):
        damage = _damage(path)
        if damage is None:
            return torch.load(path, map_location="cpu", weights_only=True)
        warn(f"checkpoint {path} is damaged ({damage}); the one before it is used")
    return None


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Hold `directory` against other processes, and remove what a killed one left half-written.

    Raises:
        UserError: another process holds it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"another process is running in {directory}; wait for it") from error
        for folder in (directory, directory / "checkpoints"):
            for debris in folder.glob(".*.[0-9]*"):
                debris.unlink()
        yield


def _sidecar(path: Path) -> Path:
    return path.with_suffix(".json")


def sha256(path: Path) -> str:
    """Hash of a file's content, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _damage(path: Path) -> str | None:
    try:
        expected = json.loads(_sidecar(path).read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        # The process ended between the two writes: the file itself was renamed when complete,
        # but nothing vouches for it.
        return "its checksum file is missing"
    size = path.stat().st_size
    if size != expected["bytes"]:
        return f"{size} bytes instead of {expected['bytes']}"
    if sha256(path) != expected["sha256"]:
        return "its SHA-256 does not match"
    return None
