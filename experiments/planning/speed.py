"""Predicts the speed of a training by the measured step of the model that is most like its own."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

MEASURED = Path(__file__).parents[1] / "bench_results" / "h200.json"
# Shapes of the measured models of a family, and the weights of one in millions: None where the
# shape says how many.
_MODELS = {
    "causal": (re.compile(r"GPT-2 (\d+)M, \d+ x \d+"), None),
    "images": (re.compile(r"ViT-L/16, \d+ images"), 304),
}
TAUGHT = 3 / 4  # of the speed, with a teacher's forward pass beside forward and backward pass


@dataclass(frozen=True)
class Speed:
    """Samples or tokens a second on one GPU.

    row: the measured one that it follows from. conditions: under which all rows of whole models
    were measured (experiments/bench/train.py). factor: on its speed, how many times as many weights
    it has. as_dense: the method itself was not measured. taught: the speed is 3/4 of that, for a
    teacher's forward pass beside forward and backward pass.
    """

    per_second: float
    unit: str
    row: str
    factor: float
    as_dense: bool
    taught: bool = False
    conditions: str = "measured compiled, bf16, feed-forward linears"


def nearest(family: str, method: str, parameters: int, taught: bool = False) -> Speed | None:
    """The speed of the measured model that is nearest in size, with this method or, if it was never
    measured, dense. None: no model of this family was measured.

    Args:
        family: `causal` for language models whose tokens see those before them, `images` for ViTs.
        method: as the rows name it, `s_ste, fp8` say.
        taught: it has a teacher.
    """
    if family not in _MODELS:
        return None
    pattern, millions = _MODELS[family]
    found = {}
    for row in json.loads(MEASURED.read_text(encoding="utf-8"))["benchmarks"]["train"]["rows"]:
        if match := pattern.fullmatch(row["shape"]):
            # Of rows with several optimizers the last one, with that of `impl=gpu`.
            found[row["shape"], row["name"]] = 1e6 * (millions or int(match[1])), row
    for name in (method, "dense"):
        own = [(size, row) for size, row in found.values() if row["name"] == name]
        if not own:
            continue
        size, row = min(own, key=lambda pair: abs(math.log(pair[0] / parameters)))
        figure = next(key for key in row["figures"] if key.endswith("/s"))
        as_dense = name != method
        counted = taught and as_dense
        return Speed(
            per_second=row["figures"][figure] * size / parameters * (TAUGHT if counted else 1),
            unit=figure.removesuffix("/s"),
            row=f"{row['shape']}, {row['name']}",
            factor=size / parameters,
            as_dense=as_dense,
            taught=counted,
        )
    return None
