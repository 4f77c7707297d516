"""Files that are written atomically or hashed, JSON in them, and the lock of a run's directory."""

import csv
import fcntl
import functools
import hashlib
import io
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from experiments.support.errors import UserError, writing

LOCK = ".lock"


def write_atomic(path: Path, write: Callable[[Path], Any]) -> None:
    """Call `write` on a temporary path beside `path`, sync, and rename it into place. Raises a
    `UserError` if the disk is full; nothing half-written is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with writing(path):
            temporary.touch()
            usual = temporary.stat().st_mode
            write(temporary)
            temporary.chmod(usual)  # safetensors creates files that only their owner can read
            _sync(temporary)
            temporary.replace(path)
            _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def publish(building: Path, path: Path) -> None:
    """Give a complete folder its name, once all that is in it survives a power cut."""
    with writing(path):
        for folder, _, names in os.walk(building):
            for name in (*names, ""):
                _sync(Path(folder, name))
        building.rename(path)
        _sync(path.parent)


def _sync(path: Path) -> None:
    """Make the content of a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    write_text(path, json.dumps(finite(value), indent=2) + "\n")


def write_sealed(path: Path, value: dict[str, Any]) -> None:
    """Write `value` as `write_json` does, with the hash that `read_sealed` checks as `sha256`."""
    write_json(path, sealed(value))


def sealed(value: dict[str, Any]) -> dict[str, Any]:
    """Entries as plain values, and before them `sha256`, their hash."""
    value = json.loads(json.dumps(finite(value)))
    return {"sha256": _seal(value), **value}


def read_sealed(path: Path) -> Any:
    """The content of a JSON file, without its entry `sha256`, which earlier versions did not write.
    Raises a `ValueError` if it is not JSON, or changed since `write_sealed`."""
    return unsealed(json.loads(path.read_text(encoding="utf-8")))


def unsealed(value: Any) -> Any:
    """The entries of `sealed` without the hash. Raises a `ValueError` if they were changed."""
    seal = value.pop("sha256", None) if isinstance(value, dict) else None
    if seal not in (None, _seal(value)):
        raise ValueError("its content does not fit its sha256")
    return value


def _seal(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def write_text(path: Path, text: str) -> None:
    """Write `text` in UTF-8, atomically."""
    write_atomic(path, lambda p: p.write_text(text, encoding="utf-8"))


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV; the header is the union of their keys in order of appearance. A text that a
    spreadsheet would take for a formula gets an apostrophe."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    file = io.StringIO()
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {k: f"'{v}" if isinstance(v, str) and v[:1] in {*"=+@"} else v for k, v in row.items()}
        )
    return file.getvalue()


def finite(value: Any) -> Any:
    """`value` with NaN and infinities replaced by None: JSON has no such numbers."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def exclusive(directory: Path, wait: Callable[[str], None] | None = None) -> Iterator[None]:
    """Lock `directory` against other processes, and remove what a killed one left half-written.
    wait: is told of another process there, which is waited for; None = an error."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the file is closed
        except BlockingIOError as error:
            if wait is None:
                message = f"another process is running in {directory}; wait for it"
                raise UserError(message) from error
            wait(f"another process is running in {directory}; this one waits for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        for folder in (directory, directory / "checkpoints"):
            for debris in folder.glob(".*.[0-9]*"):
                if debris.is_dir():
                    shutil.rmtree(debris)
                else:
                    debris.unlink(missing_ok=True)
        yield


def sha256(path: Path) -> str:
    """SHA-256 of a file's content, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


LIMIT = 256 * 2**20  # bytes; a data set up to this size is hashed whole
SAMPLED, END = 512, 2**16  # of a larger data set: number of files, and bytes at each end of a file
_SETTLED = 2 * 10**9  # nanoseconds; a younger file may change without a new modification time


def file_hash(path: Path) -> str:
    """SHA-256 of a file, 64 hex digits; cached in the process while the file is unchanged."""
    status = path.stat()
    if time.time_ns() - status.st_ctime_ns < _SETTLED:
        return sha256(path)
    return _remembered(path.absolute(), status.st_ino, status.st_size, status.st_ctime_ns)


@functools.cache
def _remembered(path: Path, inode: int, size: int, changed: int) -> str:
    return sha256(path)


def content_hash(paths: Iterable[Path]) -> str:
    """Hash of the content of files, 16 hex digits."""
    hashes = b"".join(bytes.fromhex(file_hash(path)) for path in paths)
    return hashlib.sha256(hashes).hexdigest()[:16]


def fingerprint(root: Path, files: Sequence[tuple[str, int]]) -> str:
    """A hash of `files` below `root` (relative path and bytes of each, in order), 64 hex digits. It
    covers names and sizes and, up to 256 MiB in total, every byte. Beyond that it covers the first
    and last 64 KiB of up to 512 evenly spaced files, so a few files replaced by others of the same
    name and size may go unnoticed."""
    digest = hashlib.sha256()
    for name, size in files:
        digest.update(os.fsencode(f"{name} {size}\n"))
    whole = sum(size for _, size in files) <= LIMIT
    count = len(files) if whole else min(SAMPLED, len(files))
    for number in range(count):
        path = root / files[number * len(files) // count][0]
        if whole:
            digest.update(bytes.fromhex(file_hash(path)))
            continue
        with path.open("rb") as file:
            digest.update(file.read(END))
            file.seek(max(END, path.stat().st_size - END))
            digest.update(file.read(END))
    return digest.hexdigest()
