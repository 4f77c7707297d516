"""Atomic checkpoints with checksums: if the process is killed, the previous one stays intact.

A checkpoint is a folder `step-<step>`:

    state.pt                the state as tensors and plain values
    rank-<r>.safetensors    with sharded weights: the rows of rank r of every sharded tensor, for
                            which state.pt has a placeholder
    index.json              SHA-256 of the other files

It is written as a hidden folder, synced, and renamed once it is complete; the two newest are kept.
`state.pt` is read with `weights_only=True`, so nothing is unpickled. Nothing is gathered, so no
rank needs memory for more than its part. Any number of ranks, also a single process without FSDP2,
can read a checkpoint from a folder that all of them see. torch.distributed.checkpoint is not used
because its format contains pickles.

`Saver.save` copies the state to the host's memory and returns; a thread writes the copy while
training continues, with sharded weights every rank its rows. The thread does not communicate:
between steps the ranks exchange whether their files are written; then rank 0 completes the folder.
"""

import copy
import json
import shutil
import time
from collections.abc import Callable
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from experiments.support import checkpoint
from experiments.support.errors import UserError
from experiments.training.distributed import World
from methods.nn import sharding

KEPT = 2
STATE, INDEX = "state.pt", "index.json"
PATIENCE = 60.0  # seconds for which NFS may cache a folder's content
_NOTE = "sharded tensor"  # the key of a placeholder


class Rows(NamedTuple):
    """A tensor in the files of a checkpoint, split along dim 0 as FSDP2 does."""

    files: tuple[Path, ...]
    name: str
    shape: tuple[int, ...]

    def read(self, first: int = 0, end: int | None = None) -> Tensor:
        """Rows `first` to `end`, on the CPU."""
        end = self.shape[0] if end is None else end
        chunk = -(-self.shape[0] // len(self.files))  # the last files may have fewer, or none
        parts = []
        for number, path in enumerate(self.files):
            before = number * chunk
            start, stop = max(first - before, 0), min(end - before, chunk)
            if start < stop or number == 0:  # the first file gives the dtype even without rows
                with safe_open(path, "pt") as file:
                    parts.append(file.get_slice(self.name)[start : max(start, stop)])
        return torch.cat(parts)


# ------------------------------------------------------------------ writing


def on_host(
    value: Any, main: bool, rows: dict[str, Tensor], copies: dict[Any, Any], name: str = ""
) -> Any:
    """A copy of a tree of dicts, lists, tensors and plain values in the host's memory, with a
    placeholder for each sharded tensor, whose rows of this rank `rows` gets.

    main: copy unsharded tensors; other ranks than 0 do not write them.
    copies: earlier copies and names, so that tied tensors stay tied.
    """
    if sharding.is_sharded(value):
        own = value.to_local().detach()
        if own.numel():  # empty tensors have no distinct address
            name = copies.setdefault(own.data_ptr(), name)
        if name not in rows:
            rows[name] = own.contiguous().to("cpu", copy=True)
        return {_NOTE: name, "shape": tuple(value.shape)}
    if isinstance(value, Tensor):
        value = value.detach()
        key = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if main and key not in copies:
            copies[key] = value.to("cpu", copy=True)
        return copies.get(key)
    if isinstance(value, dict):
        copied = copy.copy(value)  # of the same class, with the attributes of a state dict
        for key, part in value.items():
            copied[key] = on_host(part, main, rows, copies, f"{name}/{key}")
        return copied
    if isinstance(value, list | tuple):
        return type(value)(on_host(part, main, rows, copies, name) for part in value)
    return value


def _places(directory: Path, step: int) -> tuple[Path, Path]:
    """The final and the temporary folder of the checkpoint before `step`."""
    path = directory / f"step-{step:09d}"
    return path, directory / f".{path.name}.0"


def write(
    directory: Path, step: int, rank: int, rows: dict[str, Tensor], state: dict[str, Any]
) -> dict[str, Any]:
    """Write a rank's rows, if any, and on rank 0 the state; return the files' index entries."""
    hidden = _places(directory, step)[1]
    writers: dict[str, Callable[[Path], Any]] = {}
    if rank == 0:
        writers[STATE] = partial(_save, state)
    if rows:
        writers[f"rank-{rank}.safetensors"] = partial(save_file, rows)
    for name, to in writers.items():
        checkpoint.write_atomic(hidden / name, to)
    return {name: {"sha256": checkpoint.sha256(hidden / name)} for name in writers}


def _save(state: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:  # given a path, torch.save does not say why it failed
        torch.save(state, file)


def finish(directory: Path, step: int, files: dict[str, Any]) -> None:
    """Complete a checkpoint from the files of all ranks, the results of `write`."""
    path, hidden = _places(directory, step)
    if missing := _not_visible(hidden, list(files)):
        raise UserError(
            f"{directory}: {', '.join(missing)} of step {step}, which other ranks wrote there, "
            "cannot be seen by rank 0; runs= must lie on storage that all nodes share"
        )
    checkpoint.write_json(hidden / INDEX, {"files": files})
    if path.exists() and _checked(path)[1] is None:  # the same state, from which this run resumed
        shutil.rmtree(hidden)
    else:
        shutil.rmtree(path, ignore_errors=True)
        checkpoint.publish(hidden, path)
    there = found(directory)
    before = [other for other in there if other.name < path.name]
    for other in there:
        # Later checkpoints must be damaged, or this run would have resumed from them.
        if other not in (path, *before[1 - KEPT :]):
            shutil.rmtree(other)


def _not_visible(directory: Path, names: list[str]) -> list[str]:
    """The `names` that do not appear in `directory` in the time of a network file system."""
    deadline = time.monotonic() + PATIENCE
    while True:
        # List the folder: a network file system may cache that a name is missing, but not listings.
        there = {path.name for path in directory.iterdir()} if directory.is_dir() else set()
        missing = [name for name in names if name not in there]
        if not missing or time.monotonic() >= deadline:
            return missing
        time.sleep(min(0.5, PATIENCE))


# ------------------------------------------------------------------ reading


def found(directory: Path) -> list[Path]:
    """The checkpoints in `directory`, the oldest first; files are those of earlier versions."""
    return sorted(path for path in directory.glob("step-*") if path.is_dir())


def load_latest(
    directory: Path, warn: Callable[[str], None], world: World
) -> dict[str, Any] | None:
    """The newest intact checkpoint that rank 0 sees, on the CPU, with `Rows` for sharded tensors,
    or None; `warn` is told of damaged ones. Every rank must call it. Raises a `UserError` on every
    rank if one of them does not see what rank 0 sees."""
    names = world.all_gather([path.name for path in found(directory)])[0]
    for rank, missing in enumerate(world.all_gather(_not_visible(directory, names))):
        if missing:
            raise UserError(
                f"{directory}: rank {rank} does not see {', '.join(missing)}, which rank 0 sees; "
                "runs= must lie on storage that all nodes share"
            )
    damaged: dict[str, str] = {}
    state, instead = None, "none is whole, so the run begins anew"
    for name in reversed(names):
        path = directory / name
        parts, problem = _checked(path, world.rank, world.size)  # before any rank reads a file
        if problems := [one for one in world.all_gather(problem) if one is not None]:
            damaged[name] = problems[0]
            continue
        content = torch.load(path / STATE, map_location="cpu", weights_only=True)
        state, instead = _with_rows(content, parts), f"{name}, the one before it, is used"
        break
    for name, damage in damaged.items():
        warn(f"checkpoint {directory / name} is damaged ({damage}); {instead}")
    return state


def _checked(path: Path, rank: int = 0, ranks: int = 1) -> tuple[tuple[Path, ...], str | None]:
    """(the files of sharded tensors of a checkpoint, in order; why it cannot be used: its index
    cannot be read, or a file is not as it says). Each rank checks some of the files."""
    try:
        records = json.loads((path / INDEX).read_text(encoding="utf-8"))["files"]
        hashes = {name: own["sha256"] for name, own in records.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return (), f"{INDEX} is missing or damaged"
    parts = sorted(hashes.keys() - {STATE}, key=lambda name: (len(name), name))
    for name in (STATE, *parts)[rank::ranks]:
        if not (path / name).is_file():
            return (), f"{name} is missing"
        if checkpoint.sha256(path / name) != hashes.get(name):
            return (), f"the SHA-256 of {name} does not match"
    return tuple(path / name for name in parts), None


def _with_rows(state: Any, files: tuple[Path, ...]) -> Any:
    """The state with `Rows` in the place of placeholders."""
    if not isinstance(state, dict):
        return state
    if _NOTE in state:
        return Rows(files, state[_NOTE], tuple(state["shape"]))
    for key, value in state.items():
        state[key] = _with_rows(value, files)
    return state


def placed(state: Any, like: Any) -> Any:
    """`state` with every tensor placed like the tensor at the same place in `like`, sharded or
    whole, if their shapes agree. A tensor in `like` may stand for a whole dict."""
    if isinstance(state, dict):
        return {
            key: placed(value, like.get(key) if isinstance(like, dict) else like)
            for key, value in state.items()
        }
    if not isinstance(state, Rows | Tensor):
        return state
    if not sharding.is_sharded(like) or tuple(state.shape) != tuple(like.shape):
        return state.read() if isinstance(state, Rows) else state
    before = like.device_mesh.get_coordinate()[sharding.shard_dim(like)]
    first = min(before * sharding.chunk_of(like), len(like))
    end = first + len(sharding.rows_of(like))
    own = state.read(first, end) if isinstance(state, Rows) else state[first:end]
    there = torch.empty_like(like, dtype=own.dtype)
    sharding.rows_of(there).copy_(own)
    return there


# ------------------------------------------------------------------ in the background


Work = Callable[[], Any]  # done in the thread; returns what other ranks must know, if anything


class Saver:
    """Writes a training's checkpoints into `directory` one by one; only `close` is a rank's own."""

    def __init__(self, directory: Path, world: World) -> None:
        self.directory, self.world = directory, world
        self.thread = futures.ThreadPoolExecutor(1, "checkpoint")
        self.pending: futures.Future[Any] | None = None
        self.place = directory, -1  # of the checkpoint that is written, with its step
        self.sharded = False  # all ranks write it, and rank 0 has yet to complete it

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Wait until the previous checkpoint is written (errors as `poll`), then begin to write the
        state before optimizer step `step`. The state may change as soon as this returns."""
        self.wait()
        self.place = place = self.directory, step
        rows: dict[str, Tensor] = {}
        copied = on_host(state, self.world.is_main, rows, {})
        begin = partial(write, *place, self.world.rank, rows, copied)
        work: Work = begin
        self.sharded = bool(rows)
        if not rows:  # rank 0 alone writes
            work = (lambda: finish(*place, begin())) if self.world.is_main else dict
        self.pending = self.thread.submit(work)

    def poll(self) -> None:
        """Check whether the files are written, and complete the checkpoint; call it between steps.
        Raises a `UserError` on every rank if one of them could not write."""
        if self.pending is None:
            return
        found: Any = None
        done, problem = self.pending.done(), None
        try:
            found = self.pending.result() if done else None
        except UserError as error:
            problem = str(error)
        except OSError as error:  # for example a folder that was removed or cannot be written
            problem = (
                f"{error.filename or self.directory} cannot be written: {error.strerror or error}; "
                "fix that, and run the same command again"
            )
        results = self.world.all_gather((done, found, problem))
        for *_, message in results:
            if message is not None:
                futures.wait([self.pending])
                self.world.all_gather(None)  # no rank writes any more
                shutil.rmtree(_places(*self.place)[1], ignore_errors=True)
                raise UserError(message)
        if not all(written for written, *_ in results):
            return
        self.pending = None
        if self.sharded:
            self.sharded = False
            files = {name: record for _, own, _ in results for name, record in own.items()}
            work: Work = partial(finish, *self.place, files) if self.world.is_main else dict
            self.pending = self.thread.submit(work)

    def wait(self) -> None:
        """Return when the last checkpoint is written. Raises the errors of `poll`."""
        while self.pending is not None:
            futures.wait([self.pending])
            self.poll()

    def close(self) -> None:
        """Let the thread finish writing, and end it."""
        self.thread.shutdown()
