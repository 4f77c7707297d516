"""Checkpoints of sharded models: each rank writes the rows that it holds, and reads those it needs.

A checkpoint is a folder `step-<step>`:

    rank-<r>.safetensors    the rows of rank r of every sharded tensor
    state.pt                all else, with a note in the place of each sharded tensor
    index.json              how many ranks wrote it; size and SHA-256 of the other files

It is written as a hidden folder, and renamed when all of it is on the disk. Nothing is gathered, so
that no rank needs memory for more than its part; any number of ranks can read it, one without FSDP2
included, from a folder that all of them see. The format of torch.distributed.checkpoint holds
pickles, and none is loaded here.
"""

from __future__ import annotations

import shutil
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
_NOTE = "sharded tensor"  # the key of a note


class Rows(NamedTuple):
    """A tensor that lies in the files of a checkpoint, split along dim 0 as FSDP2 does."""

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
            if start < stop or number == 0:  # without any row, the first file tells the dtype
                with safe_open(path, "pt") as file:
                    parts.append(file.get_slice(self.name)[start : max(start, stop)])
        return torch.cat(parts)


def is_sharded(state: Any) -> bool:
    """True if there is a sharded tensor in this tree of dicts."""
    if isinstance(state, dict):
        return any(map(is_sharded, state.values()))
    return sharding.is_sharded(state)


def save(directory: Path, step: int, state: dict[str, Any], world: World) -> None:
    """Write the state before optimizer step `step` as `directory/step-<step>`. Every rank must call
    it, with its rows of what is sharded; all else is taken from rank 0.

    Raises:
        UserError: on every rank, if one of them cannot write.
    """
    path = directory / f"step-{step:09d}"
    hidden = directory / f".{path.name}.0"
    hidden.mkdir(parents=True, exist_ok=True)
    rows: dict[str, Tensor] = {}
    plain = _without_rows(state, "", rows, {})
    name = f"rank-{world.rank}.safetensors"
    files: dict[str, Any] = {}
    problem = None
    try:
        checkpoint.write_atomic(hidden / name, lambda p: save_file(rows, p))
        files[name] = checkpoint.record_of(hidden / name)
    except UserError as error:
        problem = str(error)
    for record, other in world.all((files, problem)):
        if other is not None:
            raise UserError(other)
        files |= record
    if not world.is_main:
        return
    checkpoint.write_atomic(hidden / STATE, lambda p: checkpoint.write(plain, p))
    files[STATE] = checkpoint.record_of(hidden / STATE)
    checkpoint.write_json(hidden / INDEX, {"ranks": world.size, "files": files})
    if path.exists():  # damaged, or the same state
        shutil.rmtree(path)
    hidden.rename(path)
    checkpoint.sync_directory(directory)
    checkpoint.remove_others(path)


def _without_rows(state: Any, name: str, rows: dict[str, Tensor], names: dict[int, str]) -> Any:
    """`state` with a note for each sharded tensor, whose rows of this rank go into `rows`: those of
    tied ones once. names: of what is there already, by its address."""
    if isinstance(state, dict):
        return {k: _without_rows(x, f"{name}/{k}", rows, names) for k, x in state.items()}
    if not sharding.is_sharded(state):
        return state
    own = state.to_local().detach()
    if own.numel():  # else the address says nothing
        name = names.setdefault(own.data_ptr(), name)
    if name not in rows:
        rows[name] = own.cpu().contiguous()
    return {_NOTE: name, "shape": tuple(state.shape)}


def load(path: Path, world: World) -> dict[str, Any]:
    """The checkpoint in `path`, a file or a folder, with `Rows` for what is sharded there. Every
    rank must call it: each checks some of the files.

    Raises:
        Damaged: on every rank.
    """
    state: dict[str, Any] = {}
    problem = None
    try:
        state = _load_folder(path, world) if path.is_dir() else checkpoint.load_file(path)
    except Damaged as error:
        problem = str(error)
    for found in world.all(problem):
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
    """`state` with every tensor placed as the one of its shape in `like` at the same place: in rows
    on all ranks, or whole. A tensor in `like` stands for all in a dict."""
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
    return DTensor.from_local(
        own.to(mesh.device_type),
        mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
