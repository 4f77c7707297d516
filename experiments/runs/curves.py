"""Averages training curves over seeds, and draws them with their spread."""

import math
import textwrap
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.runs.stats import mean, std

NAMES = {
    "val_loss": "validation loss, nats",
    "flip_rate": "flip rate, share of the mask per step",
    "loss": "training loss, nats",
    "perplexity": "validation perplexity",
}
EVALUATED = ("val_loss", "perplexity")  # measured rarely, so each point has a marker
SPREAD = "mean over seeds, band: ± standard deviation"

# Okabe and Ito's colours, which colour-blind readers can distinguish; the baseline is black.
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#0072B2")
MARKERS = ("o", "s", "^", "v", "D", "P", "X")
STYLES = ("-", "--", ":", "-.")
WIDEST = 16.0  # width of a row of panels, in inches
LABEL = 28  # characters of a y axis's label that fit beside a panel


@dataclass(frozen=True)
class Point:
    """One step of one curve, averaged over seeds; std is None with a single seed."""

    quantity: str
    method: str
    step: int
    mean: float
    std: float | None
    n: int


def points(
    runs: Iterable[tuple[str, list[dict[str, Any]], dict[str, Any]]], quantities: Iterable[str]
) -> list[Point]:
    """The points of the curves of all quantities, quantity by quantity, of runs (label, records of
    `metrics.jsonl`, content of `result.json`), of which those of one label make a curve. Step 0 is
    left out; the last validation loss is the finalized model's, at the step after the last."""
    order = list(quantities)
    found: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for label, log, result in runs:
        last = {"step": result["steps"], "val_loss": result["metrics"].get("val_loss")}
        own = {
            (quantity, label, record["step"]): record[quantity]
            for record in [*log, last]  # newer runs also have the last one in their log
            for quantity in order
            if record["step"] > 0 and record.get(quantity) is not None
        }
        for key, value in own.items():
            found[key].append(value)
    in_order = sorted(found.items(), key=lambda item: order.index(item[0][0]))
    return [
        Point(*key, mean(own), std(own) if len(own) > 1 else None, len(own))
        for key, own in in_order
    ]


def look(number: int) -> tuple[str, str]:
    """The (colour, line style) of the method at a place in the order; the baseline is at 0."""
    if number == 0:
        return COLOURS[0], "--"
    again, place = divmod(number - 1, len(COLOURS) - 1)
    return COLOURS[1 + place], STYLES[again % len(STYLES)]


def draw(
    axes: Any, quantity: str, data: list[Point], labels: Collection[str] | None = None
) -> None:
    """Draw the curves of one quantity, one line for each label, or for those in `labels`. A label
    looks the same in every panel, even if some panels lack it."""
    for number, label in enumerate(dict.fromkeys(point.method for point in data)):
        shown = [p for p in data if (p.quantity, p.method) == (quantity, label)]
        if not shown or (labels is not None and label not in labels):
            continue
        steps, means = [p.step for p in shown], [p.mean for p in shown]
        colour, style = look(number)
        # Later lines are thinner, so that a curve below another one remains visible.
        width = max(1.0, 2.6 - 0.4 * number)
        marker = MARKERS[number % len(MARKERS)] if quantity in EVALUATED else None
        line = {"linestyle": style, "linewidth": width, "marker": marker, "markersize": 4}
        axes.plot(steps, means, label=label, color=colour, **line)
        low = [p.mean - (p.std or 0.0) for p in shown]
        high = [p.mean + (p.std or 0.0) for p in shown]
        axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    positive = any(value > 0 for line in axes.lines for value in line.get_ydata())
    if positive and quantity in ("flip_rate", "perplexity"):
        axes.set_yscale("log", nonpositive="mask")
    axes.set_xlabel("optimizer step", fontsize=9)


def figure(
    panels: Mapping[str, Callable[[Any], None]],
    title: str,
    path: Path,
    width: float = 3.6,
    height: float = 3.4,
) -> None:
    """Write a figure with a panel for each entry of `panels` and one legend. A key is the y axis's
    label, its value a function that draws on given axes. Many panels are put in several rows.
    width, height: of a panel, in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = math.ceil(len(panels) * width / WIDEST) if len(panels) > 1 else 1
    columns = math.ceil(len(panels) / rows)
    size = max(width * columns, 5.0), height * rows
    canvas = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(canvas)
    legend: dict[str, Any] = {}
    several = canvas.subplots(rows, columns, squeeze=False).ravel()
    for axes, (label, fill) in zip(several, panels.items(), strict=False):
        fill(axes)
        axes.set_ylabel(textwrap.fill(label, LABEL), fontsize=9)
        axes.tick_params(labelsize=8, which="both")
        axes.grid(alpha=0.25, linewidth=0.5)
        axes.spines[["top", "right"]].set_visible(False)
        for handle, labelled in zip(*axes.get_legend_handles_labels(), strict=True):
            # If only some panels draw markers, use a handle with a marker.
            if labelled not in legend or getattr(handle, "get_marker", str)() in MARKERS:
                legend[labelled] = handle
    for axes in several[len(panels) :]:
        axes.set_axis_off()
    labels = canvas.legend(
        list(legend.values()),
        list(legend),
        loc="outside lower center",
        # At font size 8, in inches a character and a line sample.
        ncols=max(1, min(3, int(size[0] / (0.06 * max(map(len, legend), default=0) + 0.55)))),
        fontsize=8,
        frameon=False,
    )
    for text in labels.get_texts():
        text.set_parse_math(False)  # a name may have dollar signs
    canvas.suptitle(title, fontsize=9)
    canvas.savefig(path, dpi=200, format="png")
