"""Retrain a trained model with a method: `python -m experiments.distill model.path=FOLDER`.

The model is a causal language model of transformers, or with `model=gpt2_nano init=RUN` the model
of a finished run. The default is `method=ast`: an adaptive 2:4 mask and distillation from the dense
model.

Training and files are those of `experiments.pretrain`. In addition, `export/` contains the model
and its tokenizer, if it has one, for `from_pretrained` of transformers (`experiments.export`).
Low-rank terms (SLoRB) are merged there into dense weights.
"""

import os
from collections.abc import Callable

from experiments.config.driver import driver
from experiments.config.run import RunConfig
from experiments.exporting import export, files
from experiments.runs.comparison import of_sweep
from experiments.runs.finished import FinishedRun
from experiments.support.errors import check_installed
from experiments.support.progress import say
from experiments.training import pretraining

EXPORT = files.FOLDER


def run(config: RunConfig, report: Callable[[str], None] = say) -> FinishedRun:
    """Train as `pretraining.run` does, then export."""
    check_installed("transformers", "the export needs the transformers library", "hf")
    done = pretraining.run(config, report)
    if int(os.environ.get("RANK", "0")) == 0:
        export.export(done, report=report)
    return done


main = driver("distill", after_sweep=lambda runs: print(of_sweep(runs)))(run)


if __name__ == "__main__":
    main()
