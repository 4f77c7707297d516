"""Export a finished run for plain transformers: `python -m experiments.export run=DIR`.

The folder (`to=FOLDER`; by default `export` in the run directory, `export-dense` for the dense
master weights) holds

    config.json, model.safetensors   the model; pruned weights are real zeros
    tokenizer.json, ...              the tokenizer of the run, where it has one
    masks.safetensors                for each converted linear, by its name in model.safetensors, a
                                     bool tensor of the same shape: True where the weight is not 0
    preprocessor_config.json         of a ViT: size, mean and standard deviation of its images
    README.md                        method, options, hash of the config, density, legality
    export.json                      the hash of the run's weights, and the names of these files

The groups of a pattern run along a linear's inputs. `nn.Linear` stores [out, in]; GPT-2 of
transformers keeps its linears as `Conv1D`, stored [in, out], so there they run along dim 0. The
metadata of masks.safetensors say for each tensor which n, m and dim.

What transformers has no place for becomes dense: low-rank terms are merged into the weights. The
Cramming form of BERT (`glu`, no biases, ...) has no architecture there and is refused.
`experiments/exporting/semi_structured.py` gives a model for inference with torch's 2:4 products
instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.config.compose import plain, typed
from experiments.config.driver import driver
from experiments.exporting.export import export
from experiments.runs.finished import WEIGHTS_OF, FinishedRun
from experiments.support.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Settings of an export. run: directory of a finished run. weights: `sparse` as the method
    ended, or the `dense` master weights. to: the folder to write; null = in the run directory."""

    run: str
    weights: str = "sparse"
    to: str | None = None

    def __post_init__(self) -> None:
        if self.weights not in WEIGHTS_OF:
            raise ValueError(f"weights={self.weights}; choose one of {', '.join(WEIGHTS_OF)}")


def freeze_export(composed: Any) -> ExportConfig:
    """The `ExportConfig` of a composed `DictConfig`."""
    values = plain(composed)
    if values.get("run") is None:
        raise UserError("run=DIR is missing: the directory of a finished run")
    return typed(ExportConfig, "the config", values)


@driver("export", freeze_export, "begins it anew")
def main(config: ExportConfig) -> None:
    to = None if config.to is None else Path(config.to)
    export(FinishedRun.open(Path(config.run)), config.weights, to)


if __name__ == "__main__":
    main()
