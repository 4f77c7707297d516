"""Hashes of files, by which data and weights are recognised."""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.support.checkpoint import sha256

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
    """A hash of files below `root`, 64 hex digits. files: (relative path, bytes) of each, in order;
    the name of `root` does not count.

    It covers the names and sizes of all files and, up to 256 MiB in total, every byte. Beyond that
    it covers the first and last 64 KiB of up to 512 evenly spaced files, so a few files replaced by
    others of the same name and size may go unnoticed.
    """
    digest = hashlib.sha256()
    for name, size in files:
        digest.update(os.fsencode(f"{name} {size}\n"))
    whole = sum(size for _, size in files) <= LIMIT
    count = len(files) if whole else min(SAMPLED, len(files))
    for number in range(count):
        path = root / files[number * len(files) // count][0]
        digest.update(bytes.fromhex(file_hash(path)) if whole else _ends(path))
    return digest.hexdigest()


def _ends(path: Path) -> bytes:
    with path.open("rb") as file:
        first = file.read(END)
        file.seek(max(END, path.stat().st_size - END))
        return first + file.read(END)
