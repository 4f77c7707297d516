"""Files of named tensors: one safetensors file, or several with an index, as transformers writes.

Tensors saved as `model.safetensors` are in that file or, if they take more than `LARGEST` bytes, in

    model-00001-of-00002.safetensors, ...    some of the tensors each
    model.safetensors.index.json             the file of each tensor
"""

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from experiments.support import checkpoint
from experiments.support.errors import UserError

LARGEST = 5 * 10**9  # bytes per file, the limit of transformers up to version 4
_INDEX = ".index.json"


def save(tensors: Mapping[str, Tensor], path: Path) -> list[str]:
    """Write tensors as `path`, each file atomically, the index last; return the files' names.
    Raises a `UserError` if the disk is full; none of these files is left."""
    from huggingface_hub import split_torch_state_dict_into_shards

    pattern = f"{path.stem}{{suffix}}{path.suffix}"
    split = split_torch_state_dict_into_shards(
        dict(tensors), filename_pattern=pattern, max_shard_size=LARGEST
    )
    # transformers requires this metadata in a shard.
    metadata = {"format": "pt"} if split.is_sharded else None
    names = list(split.filename_to_tensors)
    with ExitStack() as undo:
        for name, part in split.filename_to_tensors.items():
            own = {key: tensors[key].detach().cpu().contiguous() for key in part}
            write = partial(save_file, own, metadata=metadata)
            checkpoint.write_atomic(path.with_name(name), write)
            undo.callback(path.with_name(name).unlink)
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            names.insert(0, path.name + _INDEX)
            checkpoint.write_json(path.with_name(names[0]), index)
        undo.pop_all()
    for old in among(path.name, [other.name for other in path.parent.iterdir()]):
        if old not in names:  # left from an earlier training of this run
            path.with_name(old).unlink()
    return names


def files(path: Path) -> list[Path]:
    """The files of the tensors saved as `path`; `path` itself if there are none."""
    index = path.with_name(path.name + _INDEX)
    if path.is_file() or not index.is_file():
        return [path]
    try:
        where = json.loads(index.read_bytes())["weight_map"]
        names = sorted({str(name) for name in where.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is damaged; run it again") from error
    return [index, *(index.with_name(Path(name).name) for name in names)]


def among(name: str, names: Iterable[str]) -> list[str]:
    """The file names among `names` that hold the tensors saved as `name`."""
    path = Path(name)
    shard = re.compile(rf"{re.escape(path.stem)}-\d+-of-\d+{re.escape(path.suffix)}")
    return [n for n in names if n in (name, name + _INDEX) or shard.fullmatch(n)]


def load(path: Path, device: torch.device) -> dict[str, Tensor]:
    """The tensors saved as `path`, by name. Raises a `SafetensorError` if a file is damaged."""
    tensors: dict[str, Tensor] = {}
    read_on = "cpu" if device.type == "meta" else str(device)
    for part in files(path):
        if part.suffix != ".json":
            with safe_open(part, "pt", read_on) as file:
                names = list(file.keys())
                tensors |= {name: file.get_tensor(name).to(device) for name in names}
    return tensors
