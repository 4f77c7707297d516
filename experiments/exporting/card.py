"""Writes the model card of an export."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from experiments.exporting.files import Form
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
    from huggingface_hub import ModelCardData

    source = _on_hub(run.config["data"]["source"])
    base = _on_hub(run.config["model"].get("path", "").partition("@")[0])
    data = source or run.config["data"].get("name", "unnamed")
    metrics = run.result.get("metrics", {})
    if form.weights == "dense" and not run.trained_with.capabilities.ends_dense:
        metrics = {}  # those of other weights
    summed = legality.total(rows)
    facts = {
        "method": run.method,
        "weights": ", ".join(filter(None, (form.weights, form.dtype, form.quantize))),
        "data": f"{data}, fingerprint {run.result.get('corpus_hash', 'unknown')[:16]}",
        **{
            name.replace("val_", "held-out "): f"{metrics[name]:.4f}, before any rounding"
            for name in ("val_loss", "val_top1")
            if isinstance(metrics.get(name), float)
        },
        "density of the converted linears": f"{summed['density']:.4f}",
        "illegal groups": f"{summed['illegal_groups']} of {summed['groups']}",
        "licence": form.license or "not stated; ask whoever trained it",
        "config hash": run.config_hash,
        "seed": run.result["seed"],
        "tier": run.result["tier"],
    }
    if sizes is not None:
        share = sizes["compressed"] / sizes["dense"]
        facts["bytes of the 2:4 weights"] = (
            f"{sizes['compressed']:,}, {share:.4f} of {sizes['dense']:,} as dense tensors"
        )
        if "integers" in sizes:
            facts["bytes as dense integers with scales"] = f"{sizes['integers']:,}"
    head = ModelCardData(
        library_name="transformers",
        tags=["sparse24", run.method, "2:4 sparsity"],
        license=form.license or "unknown",
        pipeline_tag=next((tag for end, tag in PIPELINES.items() if kind.endswith(end)), None),
        datasets=source,
        base_model=base,
    )
    options = {k: v for k, v in run.config["method"].items() if k != "name"}
    command = ["python -m experiments.export run=RUN", f"weights={form.weights}"]
    command += [f"dtype={form.dtype}"] * (form.dtype != "fp32")
    command += [f"quantize={form.quantize}"] * bool(form.quantize)
    command += ["compressed=true"] * form.compressed
    template = Environment(undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    return template.from_string(_CARD.read_text(encoding="utf-8")).render(
        head=head.to_yaml(),
        name=run.model_name if "path" not in run.config["model"] else base or kind,
        kind=kind,
        method=run.method,
        facts=facts,
        compressed=form.compressed,
        quantize=form.quantize,
        command=" ".join(command),
        options=json.dumps(options, indent=2),
        merged=merged,
        split=split,
        linears=legality.table(rows),
        record=RECORD,
        weights_file=WEIGHTS,
    )


def _on_hub(source: str) -> str | None:
    """`source` if it is an id on the hub; None for a local folder or embedded data."""
    return source if HUB_ID.fullmatch(source) and not Path(source).exists() else None
