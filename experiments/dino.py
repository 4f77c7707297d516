"""Train a ViT without labels: `python -m experiments.dino model=vit_nano method=semi_sparse`.

Trains by self-distillation (DINO, models/dino.py) on the images of `data`. Training and files are
those of `experiments.pretrain`. The resulting model is the teacher's ViT. Its frozen features are
then evaluated (experiments/evaluation/probes.py): `knn_top1` and `linear_top1` of `result.json`.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from experiments.config import run as configuration
from experiments.config.driver import driver
from experiments.config.run import RunConfig
from experiments.evaluation.probes import probe
from experiments.images.dataset import ImageConfig
from experiments.runs.comparison import of_sweep
from experiments.runs.finished import FinishedRun
from experiments.support.errors import UserError
from experiments.support.progress import say
from experiments.training import pretraining, routine
from models.vit import ViT

load = partial(configuration.load, config_name="dino")


def finished(config: RunConfig) -> dict[str, Any] | None:
    """The result of this config, if it was trained and probed."""
    result = pretraining.finished(config)
    return result if result is not None and "linear_top1" in result["metrics"] else None


def run(config: RunConfig, report: Callable[[str], None] = say) -> FinishedRun:
    """Train as `pretraining.run` does, then probe."""
    if config.dino is None:
        raise UserError(
            "this model and train= have classes and no `dino` settings; choose model=vit_nano or "
            "another model=vit_*, or train it with `python -m experiments.pretrain`"
        )
    done = pretraining.run(config, report)
    if int(os.environ.get("RANK", "0")) or "linear_top1" in done.result["metrics"]:
        return done
    model = done.model()
    assert isinstance(model, ViT) and isinstance(config.data, ImageConfig)
    gpu = config.impl.device != "cpu" and torch.cuda.is_available()
    with routine.process_settings(config.impl):
        found = probe(model, config.data, "cuda" if gpu else "cpu", config.impl.workers)
    done.extend(found)
    report(f"k-NN {found['knn_top1']:.2f} %, linear {found['linear_top1']:.2f} % top-1")
    return done


main = driver("dino", after_sweep=lambda runs: print(of_sweep(runs, "metrics.linear_top1")))(run)


if __name__ == "__main__":
    main()
