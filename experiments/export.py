"""Export a finished run for plain transformers: `python -m experiments.export run=DIR`.

The folder (`to=FOLDER`; by default `export` in the run directory, with the form behind it where it
is another: `export-bf16-compressed`) holds

    config.json, model.safetensors   the model; pruned weights are real zeros, all of them +0
    tokenizer.json, ...              the tokenizer of the run, where it has one
    preprocessor_config.json         of a ViT: size, mean and standard deviation of its images
    README.md                        the model card: data, loss, method, licence, how to load it
    .eval_results/                   what `experiments.evaluate` measured of these weights on data
                                     of the hub, in its form
    sparse24.json                    of each sparse tensor pattern, axis, density, illegal groups
                                     and SHA-256; the SHA-256 of every file
    sparse24/masks.safetensors       the masks as bits

No config of sparsity or quantisation is written, which loaders refuse. The groups of a pattern run
along a linear's inputs. `nn.Linear` stores [out, in]; GPT-2 of transformers keeps its linears as
`Conv1D`, stored [in, out], so there they run along axis 0.

With `compressed=true` the weights are in sparse24.safetensors instead: 2:4 ones as values and 2-bit
positions, 9/16 of the bytes of bf16 (`dtype=bf16`). `models.sparse.load(FOLDER)` reads both.

What transformers has no place for becomes dense: low-rank terms are merged into the weights. The
Cramming form of BERT (`glu`, no biases, ...) has no architecture there and is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from experiments.config.compose import plain, typed
from experiments.config.driver import driver
from experiments.exporting.export import Form, export
from experiments.runs.finished import FinishedRun
from experiments.support.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Form):
    """Settings of an export: those of `Form`. run: directory of a finished run. to: the folder to
    write; null = in the run directory."""

    run: str
    to: str | None = None


def freeze_export(composed: Any) -> ExportConfig:
    """The `ExportConfig` of a composed `DictConfig`."""
    values = plain(composed)
    if values.get("run") is None:
        raise UserError("run=DIR is missing: the directory of a finished run")
    return typed(ExportConfig, "the config", values)


@driver("export", freeze_export, "begins it anew")
def main(config: ExportConfig) -> None:
    to = None if config.to is None else Path(config.to)
    form = Form(**{field.name: getattr(config, field.name) for field in fields(Form)})
    export(FinishedRun.open(Path(config.run)), form, to)


if __name__ == "__main__":
    main()
