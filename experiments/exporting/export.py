"""Writes a finished run as a folder that transformers loads, with its masks in a file beside."""

from __future__ import annotations

import copy
import importlib
import json
import math
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from experiments.config.initial import weight_files
from experiments.config.run import digest
from experiments.exporting.tokenizer import tokenizer_of
from experiments.images.dataset import ImageConfig
from experiments.runs.finished import FinishedRun
from experiments.support import checkpoint
from experiments.support.errors import UserError, writing
from experiments.support.progress import say
from experiments.training import legality
from methods.nn import slorb
from methods.nn.compressed import SparsePlusLowRank
from models.gpt2 import GPT
from models.hf import CausalLM

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FOLDER = "export"  # in the run directory
MASKS, RECORD = "masks.safetensors", "export.json"


def export(
    run: FinishedRun,
    weights: str = "sparse",
    to: Path | None = None,
    report: Callable[[str], None] = say,
) -> Path:
    """Write the export of a run and return its folder; an intact export of these weights is kept.

    Raises:
        UserError: transformers has no such architecture, the method keeps no dense weights, or
            `to` holds something else.
    """
    if find_spec("transformers") is None:
        raise UserError("the export needs the transformers library: pip install 'sparse24[hf]'")
    own = run.directory / (FOLDER if weights == "sparse" else f"{FOLDER}-{weights}")
    folder = own if to is None else to
    marks = {"config_hash": run.config_hash, "weights": weights}
    with checkpoint.exclusive(run.directory):
        source, found = weight_files(run.directory, weights), _record(folder)
        ours = marks.items() <= found.items()
        whole = all((folder / name).is_file() for name in found.get("files", [MASKS]))
        if ours and whole and found.get("source") == source:
            report(f"exported already: {folder}")
            return folder
        made = found or (folder / MASKS).is_file()
        if folder.exists() and not ours and (folder != own or not made):
            kind = found["weights"] if found.get("config_hash") == run.config_hash else None
            holds = "is no export of this run" if kind is None else f"is its {kind} export"
            raise UserError(f"{folder} exists and {holds}; give another, to=FOLDER")
        model = run.model(weights)
        patterns = {name: run.pattern(name) for name in run.converted}
        rows = legality.measure(model, patterns)  # before merging, which ends the N:M pattern
        merged = merge_low_rank(model)
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Names of this run alone, which is locked: what is there was left by a killed process.
        tag = digest({"run": str(run.directory.resolve())})[:8]
        building, old = (folder.with_name(f".export-{tag}-{name}") for name in ("new", "old"))
        for left in (building, old):
            shutil.rmtree(left, ignore_errors=True)
        try:
            with writing(folder):
                write(model, building, tokenizer_of(run, model))
                if isinstance(run.data, ImageConfig):
                    _image_processor(run.data).save_pretrained(building)
                _write_masks(model, building, patterns)
                card = _card(run, weights, to, rows, merged)
                (building / "README.md").write_text(card, encoding="utf-8")
                files = sorted(path.name for path in building.iterdir())
                checkpoint.write_json(
                    building / RECORD, {**marks, "source": source, "files": files}
                )
            if folder.exists():
                folder.rename(old)
            building.rename(folder)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    report(f"exported: {folder}")
    return folder


def to_transformers(model: nn.Module) -> Any:
    """The transformers model with the same weights as a plain model of ours; a `CausalLM` holds one
    already.

    Raises:
        UserError: transformers has no such architecture.
    """
    if isinstance(model, CausalLM):
        return model.model
    convert = getattr(importlib.import_module(type(model).__module__), "to_hf", None)
    if convert is None:
        raise UserError(
            f"transformers has no form of a {type(model).__name__}; nothing is exported"
        )
    try:
        return convert(model)
    except ValueError as error:
        raise UserError(f"this model cannot be exported: {error}") from error


def write(model: nn.Module, folder: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
    """Write config and weights of a plain model as `save_pretrained` of transformers does, and its
    tokenizer, whose end-of-text token then ends what a GPT-2 generates."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    whole: Any = model if isinstance(model, CausalLM) else to_transformers(model)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        if isinstance(model, GPT):
            for settings in (whole.config, whole.generation_config):
                settings.bos_token_id = settings.eos_token_id = tokenizer.eos_token_id
    whole.save_pretrained(folder)


def _image_processor(data: ImageConfig) -> Any:
    """The validation transform as an image processor of transformers."""
    from transformers import CLIPImageProcessor

    side = data.image_size
    return CLIPImageProcessor(
        size={"shortest_edge": math.floor(side / data.crop_pct)},
        crop_size={"height": side, "width": side},
        resample=3,  # bicubic
        image_mean=list(data.mean),
        image_std=list(data.std),
    )


@torch.no_grad()
def merge_low_rank(model: nn.Module) -> bool:
    """Add the low-rank terms of SLoRB and SLoPe to the weights, in place; True if there were any.

    The function stays, the N:M pattern does not.
    """
    boosted = any(isinstance(m, slorb.BoostedLinear) for m in model.modules())
    slorb.merge(model)
    adapted = [m for m in model.modules() if isinstance(m, SparsePlusLowRank)]
    for layer in adapted:
        layer.weight += layer.right.t() @ layer.left / len(layer.left)
        del layer.left, layer.right
        layer.__class__ = nn.Linear  # type: ignore[assignment]
    return boosted or bool(adapted)


# ---------------------------------------------------------------- masks


@dataclass(frozen=True)
class Stored:
    """The place of a linear's weight in the exported files: tensor `name`, with the inputs along
    `dim`."""

    linear: str
    name: str
    dim: int


def where_stored(model: nn.Module, linears: list[str], scratch: Path) -> list[Stored]:
    """The tensors that hold the weights of `linears` once `model` is written.

    Nothing here knows the names, transpositions and splits (of a fused QKV, say) of transformers:
    a copy of the model is written whose weights carry the number of their linear, and are found
    again. The first input is told from the others by one half more.
    """
    probe = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in probe.parameters():
            parameter.zero_()
        for number, linear in enumerate(linears, 2):  # 0 and 1 may stand for anything
            weight = probe.get_parameter(f"{linear}.weight")
            weight.fill_(number)
            weight[:, 0] += 0.5
    write(probe, scratch)
    found = []
    for name, tensor in _tensors(scratch):
        numbers = tensor.floor()
        if tensor.ndim != 2 or numbers[0, 0] < 2 or (numbers != numbers[0, 0]).any():
            continue
        dim = 1 if bool((tensor[:, 0] > numbers[:, 0]).all()) else 0
        found.append(Stored(linears[int(numbers[0, 0]) - 2], name, dim))
    return found


def _write_masks(model: nn.Module, folder: Path, patterns: Mapping[str, tuple[int, int]]) -> None:
    scratch = folder / ".probe"
    stored = {s.name: s for s in where_stored(model, list(patterns), scratch)}
    shutil.rmtree(scratch)
    masks = {name: tensor != 0 for name, tensor in _tensors(folder) if name in stored}
    layout = {
        name: dict(zip(("n", "m", "dim"), (*patterns[s.linear], s.dim), strict=True))
        for name, s in sorted(stored.items())
    }
    save_file(masks, folder / MASKS, {"format": "pt", "patterns": json.dumps(layout)})


def read_patterns(folder: Path) -> dict[str, dict[str, int]]:
    """The N:M patterns of an exported folder by tensor name, each as `n`, `m` and `dim`; {} if it
    has no masks of ours.

    Raises:
        UserError: the file of masks is damaged.
    """
    path = folder / MASKS
    if not path.is_file():
        return {}
    try:
        with safe_open(path, "pt") as file:
            return json.loads((file.metadata() or {}).get("patterns", "{}"))
    except (SafetensorError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}); export the run again") from error


def _record(folder: Path) -> dict[str, Any]:
    """The export's own record (export.json) in a folder; {} if there is none."""
    try:
        found = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields name and content of each tensor of the model in a folder, one at a time."""
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                yield name, file.get_tensor(name)


# ---------------------------------------------------------------- the card


def _card(
    run: FinishedRun,
    weights: str,
    to: Path | None,
    rows: list[legality.LinearSparsity],
    merged: bool,
) -> str:
    config, summed = run.config, legality.total(rows)
    command = ["python -m experiments.export", shlex.quote(f"run={run.directory}")]
    command += [f"weights={weights}", *([] if to is None else [shlex.quote(f"to={to}")])]
    options = {k: v for k, v in config["method"].items() if k != "name"}
    merging = (
        "\nLow-rank terms were merged into these weights here, which are dense therefore; the "
        "table shows them before.\n"
        if merged
        else ""
    )
    return f"""---
library_name: transformers
tags: [sparse24, "{run.method}", "2:4 sparsity"]
---
# {run.model_name}, trained with {run.method}

| | |
|---|---|
| method | {run.method} |
| weights | {weights} |
| density of the converted linears | {summed["density"]:.4f} |
| illegal groups | {summed["illegal_groups"]} of {summed["groups"]} |
| config hash | {run.config_hash} |
| seed | {run.result["seed"]} |
| tier | {run.result["tier"]} |

Made by

    {" ".join(command)}

Options of the method:

```json
{json.dumps(options, indent=2)}
```

## Converted linears
{merging}
{legality.table(rows)}

Pruned weights are zeros in the file. `{MASKS}` holds for each of these tensors, by its
name there, a bool tensor that is True where the weight is not zero; its metadata give n, m and the
dim along which the groups of m run (the inputs of the linear).
"""
