"""The end of a run: plain models, the state that `finalize` discards, the tokenizer."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from common_kernels import backend
from experiments.support import checkpoint, tensor_files
from experiments.training import averages, legality
from experiments.training.sharding import Shards
from experiments.training.trainer import Trainer
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
            copied = shards.unsharded()
    if copied is None:
        return None
    model, method = copied
    method.finalize(model)
    return deliverable(model, ())[0]


class Finalized(NamedTuple):
    """A finalized training.

    model: plain, with all weights; on ranks other than 0 of a sharded one, their part of it.
    metrics: those of the finalized weights.
    latent: the layers' state before that, by layer: dense weights, masks, scales.
    """

    model: nn.Module
    metrics: dict[str, float]
    latent: dict[str, dict[str, Tensor]]


def finalize(
    trainer: Trainer, shards: Shards | None, measure: Callable[[], dict[str, float]]
) -> Finalized:
    """Finalize a trained model, and record what `measure` then returns as the last evaluation."""
    # Files are written from the full weights, which only rank 0 has if they are sharded.
    full = (trainer.model, trainer.method) if shards is None else shards.unsharded()
    layers = {} if full is None else full[1].sparse_layers
    latent = {
        name: {key: value.detach().cpu().clone() for key, value in layer.state_dict().items()}
        for name, layer in layers.items()
    }
    if shards is None:
        trainer.method.finalize(trainer.model)
    else:
        shards.finalize()
    metrics = measure()
    trainer.log_last(metrics)
    if shards is not None and full is not None:
        full[1].finalize(full[0])
    return Finalized(trainer.model if full is None else full[0], metrics, latent)


def sparsity(
    trainer: Trainer, model: nn.Module, patterns: Mapping[str, tuple[int, int]]
) -> dict[str, Any]:
    """Density and illegal groups of the linears in `patterns` of rank 0's finalized model."""
    return trainer.world.of_main(lambda: legality.total(legality.measure(model, patterns)))


def process_record(trainer: Trainer, started: float) -> dict[str, Any]:
    """The entries of every training's result about how and when it ran."""
    return {
        "backend": backend.resolve(trainer.world.device),
        "cuda_graphs": trainer.graphed,
        "world_size": trainer.world.size,
        "revisions": trainer.revisions,
        "started": started,
        "ended": time.time(),
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
