"""Hashes of files, by which data and weights are recognised."""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from experiments.support.checkpoint import sha256

LIMIT = 256 * 2**20  # bytes; a data set up to this size is hashed whole
SAMPLED, END = 512, 2**16  # of a larger one: number of files, bytes at either end of each
_SETTLED = 2 * 10**9  # nanoseconds; a later write within a clock's tick would not show


def file_hash(path: Path) -> str:
    """SHA-256 of a file, 64 hex digits; kept for the process as long as the file is unchanged."""
    status = path.stat()
    if time.time_ns() - status.st_ctime_ns < _SETTLED:
        return sha256(path)
    return _remembered(path.absolute(), status.st_ino, status.st_size, status.st_ctime_ns)


@functools.cache
def _remembered(path: Path, inode: int, size: int, changed: int) -> str:
    return sha256(path)


def fingerprint(root: Path, files: Sequence[tuple[str, int]]) -> str:
    """Hash of files below `root`, 64 hex digits. `files`: (relative path, bytes) of each, in order;
    the name of `root` itself does not count.

    Names and sizes of all count, and up to 256 MiB in all, every byte. Of more, the first and the
    last 64 KiB do, of up to 512 files at equal distances: an exchange of a few other files by ones
    of the same names and sizes goes unseen.
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
