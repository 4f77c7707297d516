"""Writes a finished run as a folder for other libraries, with a model card."""

import dataclasses
import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, StrictUndefined
from torch import Tensor, nn

from experiments.config.initial import weight_files
from experiments.exporting import files
from experiments.exporting.files import Form, tokenizer_of
from experiments.images.dataset import ImageConfig
from experiments.runs.finished import FinishedRun, drop_low_rank_terms
from experiments.support import checkpoint
from experiments.support.errors import UserError, check_installed, writing
from experiments.support.names import digest
from experiments.support.progress import say
from experiments.training import legality
from experiments.training.optimization import DTYPES
from methods.nn import lowrank
from models.sparse import FORMAT, RECORD, VERSIONS, WEIGHTS, read_record


def export(
    run: FinishedRun,
    form: Form | None = None,
    to: Path | None = None,
    report: Callable[[str], None] = say,
) -> Path:
    """Write the export of a run, atomically, and return its folder; an intact one of it is kept."""
    form = form or Form()
    check_installed("transformers", "the export needs the transformers library", "hf")
    folder = run.directory / form.folder if to is None else to
    marks = {"config_hash": run.config_hash, **dataclasses.asdict(form)}
    with checkpoint.exclusive(run.directory):
        source = {"source": weight_files(run.directory, form.weights)}
        found: dict[str, Any] = {"quantize": None, "files": {}}  # entries of some records only
        with suppress(ValueError):  # it is no export, or damaged
            found |= read_record(folder)
        ours = marks.items() <= found.items()
        if ours and source.items() <= found.items():
            hashes = {folder / name: sha256 for name, sha256 in found["files"].items()}
            if all(p.is_file() and checkpoint.sha256(p) == sha256 for p, sha256 in hashes.items()):
                report(f"exported already: {folder}")
                return folder
        there = (p.relative_to(folder) for p in sorted(folder.rglob("*")) if p.is_file())
        others = [p.as_posix() for p in there if p.as_posix() not in {*found["files"], RECORD}]
        if folder.exists() and (others or not ours):
            holds = others[0] if ours else "no such export of this run"
            raise UserError(
                f"{folder} must be written anew, and holds {holds}; move it away, or give another "
                "folder, to=FOLDER"
            )
        folder.parent.mkdir(parents=True, exist_ok=True)
        # The names are unique to this run, which is locked; existing folders are from killed runs.
        tag = digest({"run": str(run.directory.resolve())})[:8]
        building, old = (folder.with_name(f".export-{tag}-{name}") for name in ("new", "old"))
        for left in (building, old):
            shutil.rmtree(left, ignore_errors=True)
        try:
            with writing(folder):
                _build(run, form, building, {**marks, **source})
            if folder.exists():
                folder.rename(old)
            checkpoint.publish(building, folder)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    report(f"exported: {folder}")
    return folder


def _build(run: FinishedRun, form: Form, folder: Path, marks: dict[str, Any]) -> None:
    """Write all files of an export, the record last."""
    model = run.model(form.weights)
    patterns = {name: run.pattern(name) for name in run.converted}
    rows = legality.measure(model, patterns)  # before merging, which destroys the N:M pattern
    terms = split_low_rank(model) if form.compressed else {}
    merged = any(isinstance(layer, lowrank.LowRankLinear) for layer in model.modules())
    lowrank.merge(model)
    dtype = DTYPES[form.dtype] or torch.float32
    files.round_weights(model, list(patterns), dtype)
    kind = files.write(model, folder, tokenizer_of(run, model), dtype)
    places = files.where_stored(model, list(patterns), folder)
    if isinstance(run.data, ImageConfig):
        from transformers import CLIPImageProcessor  # with the validation transform

        side = run.data.image_size
        CLIPImageProcessor(
            size={"shortest_edge": math.floor(side / run.data.crop_pct)},
            crop_size={"height": side, "width": side},
            resample=3,  # bicubic
            image_mean=list(run.data.mean),
            image_std=list(run.data.std),
        ).save_pretrained(folder)
    divided = files.divisions(folder, places) if form.bits or form.compressed else {}
    if form.bits:
        files.quantize(folder, divided, form.bits)
    described, sizes = files.describe(folder, places, patterns), None
    if form.compressed:
        factors = {}
        for name, (linear, _, own) in places.items():
            if linear in terms:
                module, (left, right) = name.rpartition(".")[0], terms[linear]
                described[name] |= {"low_rank": len(right), "left": left is not None}
                factors[f"{module}.right"] = right[:, own].to(dtype).contiguous()
                if left is not None:
                    factors[f"{module}.left"] = left.to(dtype, copy=True)
        sizes = files.compress(folder, divided, factors, form.bits)
    beside = any(len(own.dense) for own in divided.values())
    text = card(run, form, kind, rows, merged, bool(terms), beside, sizes)
    (folder / "README.md").write_text(text, encoding="utf-8")
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    hashes = {path.relative_to(folder).as_posix(): checkpoint.sha256(path) for path in paths}
    usual = (folder / "README.md").stat().st_mode
    for path in paths:
        path.chmod(usual)  # safetensors creates files that only their owner can read
    version = VERSIONS[form.compressed and beside]
    record = {"format": FORMAT, "version": version, **marks}
    record |= {} if sizes is None else {"bytes": sizes}
    record |= {"tensors": described, "files": hashes}
    checkpoint.write_json(folder / RECORD, record)


def read_patterns(folder: Path) -> dict[str, tuple[int, int]]:
    """The pattern (n, m) of each sparse tensor of an exported folder; {} for any other folder."""
    if not (folder / RECORD).is_file():
        return {}
    try:
        told = read_record(folder)["tensors"]
    except ValueError as error:
        raise UserError(str(error)) from error
    patterns = {name: entry["pattern"].split(":") for name, entry in told.items()}
    return {name: (int(n), int(m)) for name, (n, m) in patterns.items()}


@torch.no_grad()
def split_low_rank(model: nn.Module) -> dict[str, tuple[Tensor | None, Tensor]]:
    """Take the low-rank terms of SLoRB and SLoPe off a model's linears, in place, and return their
    factors by linear, as `models.sparse.add_low_rank` takes them."""
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, lowrank.LowRankLinear):
            left, right, scale = layer.low_rank()
            found[name] = None if left is None else left.detach(), scale * right.detach()
            drop_low_rank_terms(layer)
    return found


# ---- the model card


# The hub's name of the task of each kind of model.
PIPELINES = {
    "LMHeadModel": "text-generation",
    "ForCausalLM": "text-generation",
    "ForMaskedLM": "fill-mask",
    "ForImageClassification": "image-classification",
}
HELD_OUT = ("val_loss", "val_top1")  # metrics in a card
_CARD = Path(__file__).with_name("card.md")  # a template of Jinja
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def card(
    run: FinishedRun,
    form: Form,
    kind: str,
    rows: list[legality.Row],
    merged: bool,
    split: bool,
    beside: bool,
    sizes: Mapping[str, int] | None,
) -> str:
    """The text of README.md, from the template `card.md`. kind: the class in transformers. rows:
    the converted linears before low-rank terms were merged (`merged`) or kept apart (`split`).
    beside: whether some have dense columns, in a form that treats these on their own. sizes: the
    result of `files.compress`; None if not compressed."""
    from huggingface_hub import ModelCardData

    source = _on_hub(run.config["data"]["source"])
    base = _on_hub(run.config["model"].get("path", "").partition("@")[0])
    metrics = run.result.get("metrics", {})
    if form.weights == "dense" and not run.trained_with.capabilities.ends_dense:
        metrics = {}  # those of other weights
    total = legality.total(rows)
    sparse = total["density"] < 0.99 and not merged  # a dense model has some zeros, too
    head = ModelCardData(
        library_name="transformers",
        tags=["sparse24", run.method, *["2:4 sparsity"] * sparse],
        license=form.license or "unknown",
        pipeline_tag=next((tag for end, tag in PIPELINES.items() if kind.endswith(end)), None),
        datasets=source,
        base_model=base,
    )
    options = {k: v for k, v in run.config["method"].items() if k != "name"}
    template = Environment(undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    return template.from_string(_CARD.read_text(encoding="utf-8")).render(
        head=head.to_yaml(),
        name=run.model_name if "path" not in run.config["model"] else base or kind,
        data=source or run.config["data"].get("name", "unnamed"),
        kind=kind,
        run=run,
        form=form,
        held_out={k: v for k, v in metrics.items() if k in HELD_OUT and isinstance(v, float)},
        total=total,
        sparse=sparse,
        sizes=sizes,
        options=json.dumps(options, indent=2),
        merged=merged,
        split=split,
        beside=beside,
        linears=legality.table(rows),
        record=RECORD,
        weights_file=WEIGHTS,
    )


def _on_hub(source: str) -> str | None:
    """`source` if it is an id on the hub; None for a local folder or embedded data."""
    return source if HUB_ID.fullmatch(source) and not Path(source).exists() else None
