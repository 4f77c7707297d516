"""Retrain a trained model with a method: `python -m experiments.distill model.path=FOLDER`.

The model is a causal language model of transformers, with `method=ast` (a 2:4 mask that adapts, and
distillation from the dense model) unless another method is named. Or it is one of our own: then
`model=gpt2_nano init=RUN` starts from the weights of a finished run.

The run itself is that of `experiments.pretrain`, with the same files in the same place; in addition
`export/` is what plain transformers loads with `from_pretrained`, tokenizer included if the model
came with one. Low-rank terms (SLoRB) are merged there into dense weights.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from experiments import checkpoint, pretrain
from experiments.config import RunConfig, driver
from experiments.errors import UserError
from experiments.initial import WEIGHTS, HFConfig, load_weights
from methods import slorb
from models.gpt2 import GPT, to_hf
from models.hf import CausalLM

EXPORT = "export"  # in the run directory


def run(config: RunConfig, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Train as `pretrain.run` does, then export; returns the content of `result.json`.

    Raises:
        UserError: as there, or the method leaves something that transformers has no place for.
    """
    if find_spec("transformers") is None:
        raise UserError("the export needs the transformers library: pip install 'sparse24[hf]'")
    result = pretrain.run(config, report)
    if int(os.environ.get("RANK", "0")) == 0:
        export(config, report)
    return result


def export(config: RunConfig, report: Callable[[str], None]) -> None:
    """Write `export/` from the weights of a finished run, unless it is there."""
    directory = config.directory()
    folder, building = directory / EXPORT, directory / f".{EXPORT}"
    with checkpoint.exclusive(directory):
        if folder.exists() and folder.stat().st_mtime >= (directory / WEIGHTS).stat().st_mtime:
            return
        model = dataclasses.replace(config, init=None).build_model()
        load_weights(model, directory)
        slorb.merge(model)
        for old in (building, folder):
            shutil.rmtree(old, ignore_errors=True)
        _save(config, model, building)
        building.rename(folder)
    report(f"exported: {folder}")


def _save(config: RunConfig, model: GPT | CausalLM, folder: Path) -> None:
    plain: Any = to_hf(model) if isinstance(model, GPT) else model
    plain.save_pretrained(folder)
    if isinstance(config.model, HFConfig) and config.model.has_tokenizer:
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(config.model.folder).save_pretrained(folder)


@driver("distill")
def main(config: RunConfig) -> None:
    run(config)


if __name__ == "__main__":
    main()
