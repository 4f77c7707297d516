"""Checkpoints of sharded models: each rank writes its own rows, and reads the rows that it needs.

A checkpoint is a folder `step-<step>`:

    rank-<r>.safetensors    the rows of rank r of every sharded tensor
    state.pt                everything else, with a placeholder for each sharded tensor
    index.json              the number of ranks that wrote it; size and SHA-256 of the other files

It is written as a hidden folder and renamed once it is complete. Nothing is gathered, so no rank
needs memory for more than its part. Any number of ranks, also a single process without FSDP2, can
read it from a folder that all of them see. torch.distributed.checkpoint is not used because its
format contains pickles.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from experiments.support import checkpoint
from experiments.support.checkpoint import Damaged
from experiments.support.errors import UserError
from experiments.training.distributed import World
from methods.nn import sharding

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


def is_sharded(state: Any) -> bool:
    """True if there is a sharded tensor in this tree of dicts."""
    if isinstance(state, dict):
        return any(map(is_sharded, state.values()))
    return sharding.is_sharded(state)


def split(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(`state` with a placeholder for each sharded tensor, CPU copies of this rank's rows)."""
    rows: dict[str, Tensor] = {}
    return _without_rows(state, "", rows, {}), rows


def _places(directory: Path, step: int) -> tuple[Path, Path]:
    """The final and the temporary folder of the checkpoint before `step`."""
    path = directory / f"step-{step:09d}"
    return path, directory / f".{path.name}.0"


def write(
    directory: Path, step: int, rank: int, rows: dict[str, Tensor], plain: dict[str, Any] | None
) -> dict[str, Any]:
    """Write the rows of a rank, and the rest of the state if given; return the entries of the files
    for `index.json`.

    Raises:
        UserError: the disk is full.
    """
    _, hidden = _places(directory, step)
    hidden.mkdir(parents=True, exist_ok=True)
    own = f"rank-{rank}.safetensors"
    checkpoint.write_atomic(hidden / own, lambda p: save_file(rows, p))
    files = {own: checkpoint.record_of(hidden / own)}
    if plain is not None:
        checkpoint.write_atomic(hidden / STATE, lambda p: checkpoint.write(plain, p))
        files[STATE] = checkpoint.record_of(hidden / STATE)
    return files


def finish(directory: Path, step: int, ranks: int, files: dict[str, Any]) -> None:
    """Complete a checkpoint from the files of all `ranks` ranks. files: the results of `write`.

    Raises:
        UserError: the files of other ranks are not visible here.
    """
    path, hidden = _places(directory, step)
    if missing := _not_visible(hidden, list(files)):
        raise UserError(
            f"{directory}: {', '.join(missing)} of step {step}, which other ranks wrote there, "
            "cannot be seen by rank 0; runs= must lie on storage that all nodes share"
        )
    checkpoint.write_json(hidden / INDEX, {"ranks": ranks, "files": files})
    if path.exists():  # damaged, or the same state
        shutil.rmtree(path)
    checkpoint.publish(hidden, path)
    checkpoint.remove_others(path)


def abandon(directory: Path, step: int) -> None:
    """Remove the files of a checkpoint that cannot be completed."""
    shutil.rmtree(_places(directory, step)[1], ignore_errors=True)


def _not_visible(directory: Path, names: list[str]) -> list[str]:
    """The `names` that do not appear in `directory` within the time that a network file system may
    need to show another node's files."""
    deadline = time.monotonic() + PATIENCE
    while True:
        # List the folder: a network file system may cache that a name is missing, but not listings.
        there = {path.name for path in directory.iterdir()} if directory.is_dir() else set()
        missing = [name for name in names if name not in there]
        if not missing or time.monotonic() >= deadline:
            return missing
        time.sleep(min(0.5, PATIENCE))


def _without_rows(state: Any, name: str, rows: dict[str, Tensor], names: dict[int, str]) -> Any:
    """`state` with a placeholder for each sharded tensor. This rank's rows of it are added to
    `rows`, those of tied tensors once. names: the names of rows already added, by address."""
    if isinstance(state, dict):
        return {k: _without_rows(x, f"{name}/{k}", rows, names) for k, x in state.items()}
    if not sharding.is_sharded(state):
        return state
    own = state.to_local().detach()
    if own.numel():  # empty tensors have no distinct address
        name = names.setdefault(own.data_ptr(), name)
    if name not in rows:
        rows[name] = own.contiguous().to("cpu", copy=True)
    return {_NOTE: name, "shape": tuple(state.shape)}


def load_latest(
    directory: Path, warn: Callable[[str], None], world: World
) -> dict[str, Any] | None:
    """The newest intact checkpoint that rank 0 sees, or None, as by `checkpoint.load_latest`. Every
    rank must call it, and all get the same step.

    Raises:
        UserError: on every rank, if one of them does not see what rank 0 sees.
    """
    names = world.all_gather([path.name for path in checkpoint.found(directory)])[0]
    for rank, missing in enumerate(world.all_gather(_not_visible(directory, names))):
        if missing:
            raise UserError(
                f"{directory}: rank {rank} does not see {', '.join(missing)}, which rank 0 sees; "
                "runs= must lie on storage that all nodes share"
            )
    paths = [directory / name for name in names]
    return checkpoint.load_latest(paths, warn, lambda path: load(path, world))


def load(path: Path, world: World) -> dict[str, Any]:
    """The checkpoint in `path`, a file or a folder, with `Rows` for sharded tensors. Every rank
    must call it; each checks some of the files.

    Raises:
        Damaged: on every rank.
    """
    state: dict[str, Any] = {}
    problem = None
    try:
        state = _load_folder(path, world) if path.is_dir() else checkpoint.load_file(path)
    except Damaged as error:
        problem = str(error)
    for found in world.all_gather(problem):
        if found is not None:
            raise Damaged(found)
    return state


def _load_folder(path: Path, world: World) -> dict[str, Any]:
    index = checkpoint.read_record(path / INDEX)
    try:
        ranks, records = int(index["ranks"]), dict(index["files"])
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged("its checksum file is damaged") from error
    files = tuple(path / f"rank-{rank}.safetensors" for rank in range(ranks))
    for number, file in enumerate((path / STATE, *files)):
        if number % world.size == world.rank:
            checkpoint.check(file, records.get(file.name))
    return _with_rows(checkpoint.read(path / STATE), files)


def _with_rows(state: Any, files: tuple[Path, ...]) -> Any:
    if not isinstance(state, dict):
        return state
    if _NOTE in state:
        return Rows(files, state[_NOTE], tuple(state["shape"]))
    return {key: _with_rows(value, files) for key, value in state.items()}


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
    from torch.distributed.tensor import DTensor

    mesh, chunk = like.device_mesh, sharding.chunk_of(like)
    first = mesh.get_coordinate()[sharding.shard_dim(like)] * chunk
    first, end = min(first, len(like)), min(first + chunk, len(like))
    own = state.read(first, end) if isinstance(state, Rows) else state[first:end].clone()
    there = DTensor.from_local(
        own.to(mesh.device_type),
        mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return there.to(like.device)  # the CPU, with CPU offload
