"""Draws two quantities of every step against each other, a panel for each method, and the
distribution of the second one.

The quantities are entries of `metrics.jsonl`, for example those of `train.descent_every`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experiments.runs.curves import look
from reproduce.engine import PlacedRun

NAMES = {
    "predicted_change": "predicted change (nats)",
    "actual_change": "actual change (nats)",
    "old_masks_change": "change, old masks (nats)",
}
DISTRIBUTION = "share of steps with less"
INNER = (0.02, 0.98)  # the quantiles that panels show, because single steps lie far outside


@dataclass(frozen=True)
class Pair:
    """The two quantities, x and y, of one step of one run. quantity: the title of its panel."""

    quantity: str
    method: str
    seed: int
    step: int
    x: float
    y: float


def pairs(runs: list[PlacedRun], quantities: Sequence[str]) -> list[Pair]:
    """The steps of all runs that have both quantities; step 0 is left out."""
    x, y = quantities
    several = len({run.place.variant for run in runs}) > 1
    steps = []
    for run in runs:
        label = ", ".join(filter(None, [run.place.variant * several, run.place.row]))
        panel = f"{NAMES.get(y, y)}, {label}"
        steps += [
            Pair(panel, label, run.place.seed, record["step"], record[x], record[y])
            for record in run.log
            if record["step"] > 0 and record.get(x) is not None and record.get(y) is not None
        ]
    return steps


def draw(axes: Any, panel: str, data: list[Pair], quantities: Sequence[str]) -> None:
    """Draw the steps of one method, and the diagonal on which both quantities are equal."""
    methods = list(dict.fromkeys(pair.method for pair in data))
    shown = [pair for pair in data if pair.quantity == panel]
    colour, _ = look(methods.index(shown[0].method))
    xs, ys = [p.x for p in shown], [p.y for p in shown]
    axes.scatter(xs, ys, s=8, alpha=0.5, color=colour, linewidths=0, label=shown[0].method)
    # The same limits in all panels, so that they can be compared.
    low, high = inner([v for pair in data for v in (pair.x, pair.y)])
    axes.axline((low, low), (high, high), color="black", linewidth=0.6, linestyle=":")
    for line in (axes.axhline, axes.axvline):
        line(0.0, color="black", linewidth=0.6)
    axes.set(xlim=(low, high), ylim=(low, high))
    axes.locator_params(nbins=5)
    axes.set_xlabel(NAMES.get(quantities[0], quantities[0]), fontsize=9)


def distribution(axes: Any, data: list[Pair], quantity: str) -> None:
    """Draw the cumulative distribution of y, a line for each method."""
    methods = list(dict.fromkeys(pair.method for pair in data))
    for number, method in enumerate(methods):
        values = sorted(pair.y for pair in data if pair.method == method)
        shares = [(rank + 1) / len(values) for rank in range(len(values))]
        colour, style = look(number)
        axes.step(values, shares, where="post", color=colour, ls=style)
    axes.axvline(0.0, color="black", linewidth=0.6)
    axes.set_xlim(*inner([pair.y for pair in data]))
    axes.set_xlabel(NAMES.get(quantity, quantity), fontsize=9)


def inner(values: list[float]) -> tuple[float, float]:
    """The limits of an axis for most of the values (`INNER`), with 0 and a margin."""
    values = sorted(values)
    low, high = (values[round(share * (len(values) - 1))] for share in INNER)
    low, high = min(low, 0.0), max(high, 0.0)
    margin = 0.05 * (high - low) or 1.0
    return low - margin, high + margin
