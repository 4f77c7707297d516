"""Predicts the speed of a training from the measured step of the most similar model."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

MEASURED = Path(__file__).parents[1] / "bench_results" / "h200.json"
# How all rows of whole models were measured (experiments/bench/train.py).
CONDITIONS = "measured compiled, bf16, feed-forward linears"
# For each family, the shapes of its measured models, and a model's weights in millions; None if the
# shape contains the number.
_MODELS = {
    "causal": (re.compile(r"GPT-2 (\d+)M, \d+ x \d+"), None),
    "images": (re.compile(r"ViT-L/16, \d+ images"), 304),
}
TAUGHT = 3 / 4  # relative speed with a teacher, whose forward pass adds a third of the work


@dataclass(frozen=True)
class Speed:
    """The predicted samples or tokens per second on one GPU.

    row: the measured row on which it is based.
    factor: the measured model's number of weights over that of this model, and over the work of a
        sample. The measured speed is multiplied by it.
    as_dense: the method itself was not measured, so the dense row is used.
    taught: the speed is multiplied by 3/4 for a teacher's forward pass.
    unlike: a sentence on what distinguishes this training from the measured one; "" if nothing
        does.
    """

    per_second: float
    unit: str
    row: str
    factor: float
    as_dense: bool
    taught: bool
    unlike: str


def nearest(
    family: str,
    method: str,
    parameters: int,
    taught: bool = False,
    work: float = 1.0,
    unlike: str = "",
) -> Speed:
    """The speed predicted from the measured model nearest in size, with this method or, if that was
    never measured, dense.

    Args:
        family: `causal` for language models and translation, `images` for ViTs.
        method: the method's name in the rows, for example `s_ste, fp8`.
        taught: the method has a teacher.
        work: of a sample, in samples of the measured model.
        unlike: as in `Speed`.
    """
    pattern, millions = _MODELS[family]
    found = {}
    for row in json.loads(MEASURED.read_text(encoding="utf-8"))["benchmarks"]["train"]["rows"]:
        if match := pattern.fullmatch(row["shape"]):
            # If there are rows with several optimizers, the last has that of `impl=gpu`.
            found[row["shape"], row["name"]] = 1e6 * (millions or int(match[1])), row
    rows = [pair for pair in found.values() if pair[1]["name"] == method]
    as_dense = not rows
    size, row = min(
        rows or [pair for pair in found.values() if pair[1]["name"] == "dense"],
        key=lambda pair: abs(math.log(pair[0] / parameters)),
    )
    figure = next(key for key in row["figures"] if key.endswith("/s"))
    taught = taught and as_dense  # the row of the method itself has its teacher
    factor = size / parameters / work
    return Speed(
        per_second=row["figures"][figure] * factor * (TAUGHT if taught else 1),
        unit=figure.removesuffix("/s"),
        row=f"{row['shape']}, {row['name']}",
        factor=factor,
        as_dense=as_dense,
        taught=taught,
        unlike=unlike,
    )
