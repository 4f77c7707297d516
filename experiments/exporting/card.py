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
HELD_OUT = ("val_loss", "val_top1")  # metrics in a card
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
    metrics = run.result.get("metrics", {})
    if form.weights == "dense" and not run.trained_with.capabilities.ends_dense:
        metrics = {}  # those of other weights
    head = ModelCardData(
        library_name="transformers",
        tags=["sparse24", run.method, "2:4 sparsity"],
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
        total=legality.total(rows),
        sizes=sizes,
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
