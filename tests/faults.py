"""Lets the n-th file operation of this process fail, or cuts the power there, and compares what is
left once the same work was done again.

An operation is a call that changes something below a folder: opening for writing, one write to the
system (after buffering), fsync, rename, unlink, mkdir, rmdir, chmod. Nothing is really synced;
instead it is recorded what a power cut would leave.
"""

import builtins
import contextlib
import errno
import io
import json
import os
import random
import shutil
from pathlib import Path

import safetensors.torch

from experiments.support.checkpoint import LOCK
from experiments.support.errors import UserError

EVERY = bool(os.environ.get("SPARSE24_EVERY_FAULT"))  # try all faults instead of a sample
# full: the operation and all later ones that need space fail. lost: the power is cut before the
# operation, and content that was not synced is gone. cut: so are changes of names in a folder that
# was not synced since, except new folders.
KINDS = ("full", "lost", "cut")
FREEING = ("unlink", "remove", "rmdir", "chmod")
# Entries of JSON files that differ from run to run, or hash what does.
VOLATILE = {"started", "ended", "train_seconds", "step_seconds", "acceleration", "environment"}
VOLATILE |= {"sha256"}


class PowerCut(BaseException):
    """Ends the program, whose last acts have no effect."""


class _File(io.FileIO):
    def __init__(self, disk, path, mode):
        super().__init__(path, mode)
        self.disk = disk

    def write(self, content):
        self.disk.act("write", self.name)
        return super().write(content)


class Disk(contextlib.ExitStack):
    """`with Disk(root, kind, number) as disk: ...` and then `disk.restore()`, which makes `root`
    what a power cut left. `done`: the names of the operations so far. `left`: once the power is
    cut, the files with their content, and the folders with None."""

    def __init__(self, root, kind=None, number=None):
        super().__init__()
        self.root, self.kind, self.number = root, kind, number
        self.done, self.left = [], None
        # By inode, which an open file keeps from being used again: the content of files and the
        # names in folders that a power cut leaves.
        self.content, self.names, self.kept = {}, {}, set()
        self.real_open = os.open

    def __enter__(self):
        self._sync(self.root)
        for path in self.root.rglob("*"):
            self._sync(path)
        for name in (*FREEING, "mkdir", "rename", "replace"):
            self._patch(os, name, self._changing(name, getattr(os, name)))
        self._patch(os, "fsync", self._fsync(os.fsync))
        self._patch(os, "open", self._os_open(os.open))
        opened = self._open(io.open)
        self._patch(io, "open", opened)
        self._patch(builtins, "open", opened)
        self._patch(safetensors.torch, "serialize_file", self._serialize)
        return self

    def _patch(self, module, name, new):
        self.callback(setattr, module, name, getattr(module, name))
        setattr(module, name, new)

    def act(self, name, path):
        """Count an operation, and let it fail if it is its turn."""
        number = len(self.done)
        self.done.append(name)
        if self.number is None or number < self.number or self.left is not None:
            return
        if self.kind != "full":
            self.left = self._after_cut()
            raise PowerCut
        if number == self.number or name not in FREEING:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    # ------------------------------------------------------------------ what a power cut leaves

    def _inode(self, path):
        number = path.stat().st_ino
        if number not in self.kept and self.left is None:
            self.kept.add(number)
            self.callback(os.close, self.real_open(path, os.O_RDONLY))
        return number

    def _sync(self, path):
        if path.is_dir():
            self.names[self._inode(path)] = {p.name: self._inode(p) for p in path.iterdir()}
        else:
            self.content[self._inode(path)] = path.read_bytes()

    def _after_cut(self):
        if self.kind == "lost":
            for path in [self.root, *self.root.rglob("*")]:
                if path.is_dir():
                    self._sync(path)
        found = {}

        def follow(number, path):
            names = self.names.get(number)
            found[path] = self.content.get(number, b"") if names is None else None
            for name, inner in (names or {}).items():
                follow(inner, path / name)

        follow(self._inode(self.root), self.root)
        return found

    def restore(self):
        if self.left is not None:
            shutil.rmtree(self.root)
            for path, content in self.left.items():
                path.mkdir() if content is None else path.write_bytes(content)

    # ------------------------------------------------------------------ operations

    def _inside(self, path, dir_fd=None):
        """The absolute path, if it is below the root, or None."""
        if isinstance(path, int):
            path = Path(f"/proc/self/fd/{path}").readlink()
        if dir_fd is not None:
            path = Path(f"/proc/self/fd/{dir_fd}").readlink() / path
        path = Path(path).absolute()
        return path if path.is_relative_to(self.root) else None

    def _changing(self, name, real):
        def change(path, *rest, **options):
            inside = self._inside(path, options.get("dir_fd"))
            if inside is not None:
                self.act(name, inside)
            real(path, *rest, **options)
            if inside is not None and name == "mkdir" and self.left is None:
                # Otherwise all that a run has would be lost with its folder, every time.
                parent = self.names.setdefault(self._inode(inside.parent), {})
                parent[inside.name] = self._inode(inside)
                self.names[self._inode(inside)] = {}

        return change

    def _fsync(self, real):
        def fsync(file):
            if (path := self._inside(file)) is None:
                return real(file)
            self.act("fsync", path)
            return self._sync(path) if self.left is None else None

        return fsync

    def _os_open(self, real):
        def opened(path, flags, *rest, **options):
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                inside = self._inside(path, options.get("dir_fd"))
                if inside is not None:
                    self.act("open", inside)
            return real(path, flags, *rest, **options)

        return opened

    def _open(self, real):
        def opened(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, **more):
            path = None if isinstance(file, int) or not {*mode} & {*"wax+"} else self._inside(file)
            if path is None:
                return real(file, mode, buffering, encoding, errors, newline, **more)
            self.act("open", path)
            raw = _File(self, path, mode.replace("t", "").replace("b", ""))
            if buffering == 0:
                return raw
            buffered = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)
            return (
                buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)
            )

        return opened

    def _serialize(self, tensors, path, metadata=None):
        """The calls of safetensors itself are not Python's."""
        with Path(path).open("wb") as file:
            file.write(safetensors.serialize(tensors, metadata))


def check(root, work, count):
    """Let `work` fail at its n-th file operation below `root`, and do it again: it must end with
    what is there without a fault. `count`: so many n are tried for each kind of fault."""
    begun = root.with_name("begun")
    shutil.copytree(root, begun)
    with Disk(root) as disk:
        work()
    expected, operations = content(root), disk.done
    choose, wrong = random.Random(0), []
    for kind in KINDS:
        numbers = range(len(operations))
        if not EVERY:
            numbers = sorted(choose.sample(numbers, min(count, len(numbers))))
        for number in numbers:
            shutil.rmtree(root)
            shutil.copytree(begun, root)
            with Disk(root, kind, number) as disk:
                try:
                    work()
                except (Exception, PowerCut) as error:
                    if not isinstance(error, UserError | OSError) and disk.left is None:
                        raise
            disk.restore()
            try:
                work()
                found = content(root)
                differ = [n for n in found | expected if found.get(n) != expected.get(n)]
            except (UserError, OSError) as error:
                differ = error
            if differ:
                wrong.append(f"{kind} at {number} ({operations[number]}): {differ}")
    shutil.rmtree(begun)
    assert not wrong, "\n".join(wrong)


def content(root):
    """The files below a folder but locks and logs, with their content but times."""
    found = {}
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.name not in (LOCK, "output.txt"):
            found[path.relative_to(root).as_posix()] = path.read_bytes()
            if path.suffix in (".json", ".jsonl"):
                text = path.read_text()
                lines = text.splitlines() if path.suffix == ".jsonl" else [text]
                found[path.relative_to(root).as_posix()] = [_lasting(json.loads(x)) for x in lines]
    return found


def _lasting(value):
    if isinstance(value, dict):
        return {key: _lasting(part) for key, part in value.items() if key not in VOLATILE}
    return value
