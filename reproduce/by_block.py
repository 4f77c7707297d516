"""Draws the flip rate of each transformer block over the steps, a panel for each method.

The runs have `method.flips_by_layer=true`; the rate of a block is the mean over its layers.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from experiments.runs.curves import Point
from experiments.runs.curves import draw as draw_curves
from experiments.runs.stats import mean, std
from reproduce.engine import PlacedRun

PREFIX = "flip_rate."  # of the entries of metrics.jsonl
PANEL = "flip rate, "


def block_of(name: str) -> str:
    """The name of a layer's block: the layer's name up to the first number, or all of it if it has
    none."""
    match = re.match(r"(?:[^.\d]\w*\.)*\d+(?=\.|$)", name)
    return match[0] if match else name


def points(runs: list[PlacedRun]) -> list[Point]:
    """The curves of all blocks, panel by panel; step 0 is left out."""
    by_point: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for run in runs:
        panel = PANEL + ", ".join(filter(None, [run.place.variant, run.place.row]))
        for record in run.log:
            blocks: dict[str, list[float]] = defaultdict(list)
            for key, rate in record.items():
                if key.startswith(PREFIX) and record["step"] > 0:
                    blocks[block_of(key.removeprefix(PREFIX))].append(rate)
            for block, rates in blocks.items():
                by_point[panel, block, record["step"]].append(mean(rates))
    return [
        Point(*key, mean(rates), std(rates) if len(rates) > 1 else None, len(rates))
        for key, rates in by_point.items()
    ]


def draw(axes: Any, panel: str, data: list[Point]) -> None:
    """Draw a panel: a line for each block."""
    draw_curves(axes, panel, data)
    axes.set_yscale("log", nonpositive="mask")
