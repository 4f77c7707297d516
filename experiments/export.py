"""Export a finished run for plain transformers: `python -m experiments.export run=DIR`.

The folder (`to=FOLDER`; by default `export` in the run directory, or for other forms a name such as
`export-bf16-compressed`) contains

    config.json, model.safetensors   the model; pruned weights are true zeros, all of them +0
    tokenizer.json, ...              the tokenizer of the run, if it has one
    preprocessor_config.json         for a ViT: size, mean and standard deviation of its images
    README.md                        the model card: data, loss, method, licence, how to load it
    sparse24.json                    pattern, axis, density, illegal groups and SHA-256 of each
                                     sparse tensor; the SHA-256 of every file

No sparsity or quantisation config is written, because loaders refuse these. The groups of a pattern
run along a linear's inputs. `nn.Linear` stores [out, in]; transformers' GPT-2 stores its `Conv1D`
layers as [in, out], so there they run along axis 0.

With `compressed=true` the weights are in sparse24.safetensors instead. 2:4 weights are stored as
values and 2-bit positions, 9/16 of the bytes of bf16 (`dtype=bf16`), and dense columns beside them.
`models.sparse.load(FOLDER)` reads both forms. With `quantize=int4` (or int8) 2:4 weights, not their
dense columns, are rounded to the nearest multiple of a scale for each 128 inputs; compressed they
take 3.1 (5.1) bits of each weight, pruned ones included.

Low-rank terms have no place in transformers and are merged into the weights, which become dense.
The Cramming form of BERT (`glu`, no biases, ...) does not exist there and is refused.
"""

from pathlib import Path
from typing import Any

from experiments.config.compose import plain
from experiments.config.driver import driver
from experiments.exporting.export import export
from experiments.exporting.files import Form
from experiments.runs.finished import FinishedRun
from experiments.support.errors import UserError
from experiments.support.typed import typed

Export = tuple[str, Form, Path | None]  # run directory, form, folder or None = in that directory


def freeze_export(composed: Any) -> Export:
    """The settings in a composed `DictConfig`."""
    values = plain(composed)
    run, to = values.pop("run", None), values.pop("to", None)
    if run is None:
        raise UserError("run=DIR is missing: the directory of a finished run")
    return str(run), typed(Form, "", values), None if to is None else Path(str(to))


@driver("export", freeze_export, "begins it anew")
def main(config: Export) -> None:
    run, form, to = config
    export(FinishedRun.open(run), form, to)


if __name__ == "__main__":
    main()
