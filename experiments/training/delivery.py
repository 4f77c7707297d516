"""What a finished run delivers: plain models, the state that `finalize` discards, the tokenizer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from experiments.support import checkpoint, tensor_files
from experiments.training import averages
from experiments.training.sharding import Shards
from experiments.training.trainer import Trainer
from methods import Method
from models.dino import DINO


def deliverable(model: nn.Module, names: tuple[str, ...]) -> tuple[nn.Module, dict[str, str]]:
    """The plain model that a run delivers, and its converted linears as a dict from the name there
    to the name in `model`. For DINO it is the teacher's backbone, otherwise the model itself.
    """
    plain = model.backbone() if isinstance(model, DINO) else model
    inside = {id(module): name for name, module in plain.named_modules()}
    modules = {name: model.get_submodule(name) for name in names}
    return plain, {inside[id(m)]: name for name, m in modules.items() if id(m) in inside}


def finalized_averages(trainer: Trainer, shards: Shards | None) -> nn.Module | None:
    """A plain copy of the model with the averaged weights, finalized like the model itself; if it
    is sharded, only on rank 0."""
    if not trainer.averages:
        return None
    with averages.applied(trainer.model, trainer.averages):
        if shards is None:
            copied: Any = copy.deepcopy((trainer.model, trainer.method))
        else:
            copied = shards.whole()
    if copied is None:
        return None
    model, method = copied
    method.finalize(model)
    return deliverable(model, ())[0]


def latent_state(method: Method) -> dict[str, dict[str, Tensor]]:
    """The layers' state that `finalize` discards, by layer: dense weights, masks, scales."""
    return {
        name: {key: value.detach().cpu().clone() for key, value in layer.state_dict().items()}
        for name, layer in method.sparse_layers.items()
    }


def keep_tokenizer(corpus: dict[str, Any], source: Path, directory: Path) -> list[str]:
    """Copy the tokenizer's file, if there is one, from the folder `source` into the run's, because
    the corpus may later be prepared again from another text; return the names of copied files.
    corpus: its manifest.
    """
    name = corpus.get("tokenizer", {}).get("file")
    if name is None:
        return []
    content = (source / name).read_bytes()
    checkpoint.write_atomic(directory / name, lambda path: path.write_bytes(content))
    return [name]


def save_model(model: nn.Module, path: Path) -> list[str]:
    """Write all parameters as safetensors, tied ones under their first name, and return the names
    of the files (support/tensor_files.py)."""
    return tensor_files.save(dict(model.named_parameters()), path)
