"""Writes the model card of an export."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from experiments.exporting.form import Form
from experiments.images.dataset import ImageConfig
from experiments.runs.finished import FinishedRun
from experiments.training import legality
from models.sparse import RECORD, WEIGHTS

# The hub's name of the task of each kind of model.
PIPELINES = {
    "LMHeadModel": "text-generation",
    "ForCausalLM": "text-generation",
    "ForMaskedLM": "fill-mask",
    "ForImageClassification": "image-classification",
}
_CARD = Path(__file__).with_name("card.md")  # a template of Jinja
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def card(
    run: FinishedRun,
    form: Form,
    kind: str,
    rows: list[legality.LinearSparsity],
    merged: bool,
    split: bool,
    sizes: Mapping[str, int] | None,
) -> str:
    """The text of README.md, from the template `card.md`.

    Args:
        kind: the model's class in transformers.
        rows: its converted linears before low-rank terms were merged.
        merged, split: it had low-rank terms, which were merged into its weights, or are kept.
        sizes: the result of `files.compress`; None if the export is not compressed.
    """
    summed = legality.total(rows)
    facts = {
        "method": run.method,
        "weights": f"{form.weights}, {form.dtype}",
        "data": _data(run),
        **_losses(run, form),
        "density of the converted linears": f"{summed['density']:.4f}",
        "illegal groups": f"{summed['illegal_groups']} of {summed['groups']}",
        "licence": form.license or "not stated; ask whoever trained it",
        "config hash": run.config_hash,
        "seed": run.result["seed"],
    }
    if run.result["tier"] != "none":  # not made by reproduce/
        facts["tier"] = run.result["tier"]
    if sizes is not None:
        share = sizes["compressed"] / sizes["dense"]
        facts["bytes of the 2:4 weights"] = (
            f"{sizes['compressed']:,}, {share:.4f} of {sizes['dense']:,} as dense tensors"
        )
    options = {k: v for k, v in run.config["method"].items() if k != "name"}
    command = ["python -m experiments.export run=RUN", f"weights={form.weights}"]
    command += [f"dtype={form.dtype}"] * (form.dtype != "fp32")
    command += ["compressed=true"] * form.compressed
    template = Environment(undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    return template.from_string(_CARD.read_text(encoding="utf-8")).render(
        head=_head(run, form, kind),
        name=_name(run, kind),
        kind=kind,
        method=run.method,
        facts=facts,
        compressed=form.compressed,
        command=" ".join(command),
        options=json.dumps(options, indent=2),
        merged=merged,
        split=split,
        linears=legality.table(rows),
        record=RECORD,
        weights_file=WEIGHTS,
    )


def _name(run: FinishedRun, kind: str) -> str:
    """The model's name; for a transformers model, its checkpoint's id on the hub or its class."""
    if "path" not in run.config["model"]:
        return run.model_name
    return _on_hub(run.config["model"]["path"].partition("@")[0]) or kind


def _head(run: FinishedRun, form: Form, kind: str) -> str:
    """The card's fields for the hub."""
    import yaml

    fields: dict[str, Any] = {
        "library_name": "transformers",
        "tags": ["sparse24", run.method, "2:4 sparsity"],
        "license": form.license or "unknown",
    }
    pipelines = [name for end, name in PIPELINES.items() if kind.endswith(end)]
    if pipelines:
        fields["pipeline_tag"] = pipelines[0]
    if source := _on_hub(run.config["data"]["source"]):
        fields["datasets"] = [source]
    if base := _on_hub(run.config["model"].get("path", "").partition("@")[0]):
        fields["base_model"] = base
    return yaml.safe_dump(fields, sort_keys=False, default_flow_style=None).rstrip()


def _on_hub(source: str) -> str | None:
    """`source` if it is an id on the hub; None for a local folder or embedded data."""
    return source if HUB_ID.fullmatch(source) and not Path(source).exists() else None


def _data(run: FinishedRun) -> str:
    name = _on_hub(run.config["data"]["source"]) or run.config["data"].get("name", "unnamed")
    found = run.result.get("corpus_hash")
    return name if found is None else f"{name}, fingerprint {found[:16]}"


def _losses(run: FinishedRun, form: Form) -> dict[str, str]:
    """The run's held-out loss, if it is that of the exported weights."""
    found: dict[str, str] = {}
    metrics = run.result.get("metrics", {})
    if form.weights == "sparse" or run.trained_with.ends_dense:
        if isinstance(loss := metrics.get("val_loss"), float):
            found["held-out loss"] = f"{loss:.4f} nats"
            if not isinstance(run.data, ImageConfig) and loss < 100:
                found["held-out perplexity"] = f"{math.exp(loss):.2f}"
        if isinstance(top1 := metrics.get("val_top1"), float):
            found["held-out top-1"] = f"{top1:.2f} %"
    if found and form.dtype != "fp32":
        found["measured"] = f"before the weights were rounded to {form.dtype}"
    return found
