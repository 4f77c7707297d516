"""Draws the figure of a table: training curves, steps, or our values and the paper's.

The data of a figure is written as CSV into the same folder.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from experiments.runs import curves
from experiments.runs.curves import COLOURS, MARKERS, SPREAD, Point, look
from experiments.runs.stats import mean, std
from experiments.support.checkpoint import csv_text, write_atomic, write_text
from reproduce.execute.jobs import PlacedRun
from reproduce.render.cells import Numbers
from reproduce.render.table import Rendered
from reproduce.specs.table import Figure, Table

SOURCES = ("paper", "paper (second-hand)", "ours")
STARTS = ("random weights", "a trained model")
INTERVAL = "whisker: 95 % interval of our mean"
NAMES = curves.NAMES | {
    "predicted_change": "predicted change (nats)",
    "actual_change": "actual change (nats)",
    "old_masks_change": "change, old masks (nats)",
}
OF_LAYER = "flip_rate."  # of the entries of metrics.jsonl of runs with method.flips_by_layer
INNER = (0.02, 0.98)  # the quantiles that a scatter shows, because single steps lie far outside


@dataclass(frozen=True)
class Value:
    """One bar, or one point of a line. source: one of `SOURCES`. low, high: the interval of the
    mean, if there is one."""

    quantity: str
    method: str
    source: str
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Pair:
    """The two quantities, x and y, of one step of one run. quantity: the title of its panel."""

    quantity: str
    method: str
    seed: int
    step: int
    x: float
    y: float


@dataclass(frozen=True)
class Drawing:
    """The content of a figure. data: a line of its CSV file each. suffix: the end of that file's
    name. panels: functions that draw on axes, by the label of their y axis. width, height: of a
    panel."""

    data: Sequence[Any]
    suffix: str
    panels: Mapping[str, Callable[[Any], None]]
    note: str = ""
    width: float = 3.6
    height: float = 3.4


def draw(table: Table, tier: str, runs: list[PlacedRun], rendered: Rendered, path: Path) -> bool:
    """Write the figure to `path` (.png) and its data into the same folder (-curves.csv, -pairs.csv
    or -values.csv); return True if the table has a figure."""
    figure = table.figure
    if figure.kind == "none":
        return False
    if figure.kind == "curves":
        drawing = of_curves([run for run in runs if run.log], figure.quantities)
    elif figure.kind == "blocks":
        drawing = of_blocks(runs)
    elif figure.kind == "scatter":
        drawing = of_steps(runs, figure.quantities)
    else:
        drawing = of_values(figure, values(table, rendered.summary), rendered.units)
    if not drawing.data:
        return False
    csv = path.with_name(f"{path.stem}-{drawing.suffix}.csv")
    write_text(csv, csv_text([dataclasses.asdict(entry) for entry in drawing.data]))
    title = f"{table.title} ({tier}){drawing.note and chr(10)}{drawing.note}"
    size = drawing.width, drawing.height
    write_atomic(path, lambda p: curves.figure(drawing.panels, title, p, *size))
    return True


def _labels(runs: list[PlacedRun]) -> list[str]:
    """The label of each run in a figure."""
    several = len({run.place.variant for run in runs}) > 1
    return [", ".join(filter(None, [run.place.variant * several, run.place.row])) for run in runs]


# --- curves --------------------------------------------------------------------------------------


def of_curves(runs: list[PlacedRun], quantities: Iterable[str]) -> Drawing:
    """Quantities of the log against the step. Runs that started from another run's weights have
    panels of their own, because they cannot be compared with the others step by step."""
    labels = _labels(runs)
    logs = [
        (label, [*map(_with_perplexity, run.log)], run.result)
        for label, run in zip(labels, runs, strict=True)
    ]
    data = curves.points(logs, quantities)
    retrained = {label for label, run in zip(labels, runs, strict=True) if run.result.get("init")}
    kinds = {"": {*labels}}
    if retrained and retrained < {*labels}:
        apart = ({*labels} - retrained, retrained)
        kinds = {f", from {start}": own for start, own in zip(STARTS, apart, strict=True)}
    panels = {
        f"{NAMES.get(quantity, quantity)}{start}": partial(
            curves.draw, quantity=quantity, data=data, labels=own
        )
        for quantity in dict.fromkeys(point.quantity for point in data)
        for start, own in kinds.items()
    }
    return Drawing(data, "curves", panels, SPREAD)


def _with_perplexity(record: dict[str, Any]) -> dict[str, Any]:
    loss = record.get("val_loss")
    return record if loss is None else {**record, "perplexity": math.exp(loss)}


def of_blocks(runs: list[PlacedRun]) -> Drawing:
    """The flip rate of each transformer block, the mean over its layers, a panel for each row."""
    by_point: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for run in runs:
        panel = "flip rate, " + ", ".join(filter(None, [run.place.variant, run.place.row]))
        for record in run.log:
            blocks: dict[str, list[float]] = defaultdict(list)
            for key, rate in record.items():
                if key.startswith(OF_LAYER) and record["step"] > 0:
                    blocks[block_of(key.removeprefix(OF_LAYER))].append(rate)
            for block, rates in blocks.items():
                by_point[panel, block, record["step"]].append(mean(rates))
    data = [
        Point(*key, mean(rates), std(rates) if len(rates) > 1 else None, len(rates))
        for key, rates in by_point.items()
    ]

    def draw_panel(axes: Any, panel: str) -> None:
        curves.draw(axes, panel, data)
        axes.set_yscale("log", nonpositive="mask")

    names = dict.fromkeys(point.quantity for point in data)
    return Drawing(data, "curves", {p: partial(draw_panel, panel=p) for p in names}, SPREAD)


def block_of(name: str) -> str:
    """The name of a layer's block: the layer's name up to the first number, or all of it if it has
    none."""
    match = re.match(r"(?:[^.\d]\w*\.)*\d+(?=\.|$)", name)
    return match[0] if match else name


# --- steps ---------------------------------------------------------------------------------------


def of_steps(runs: list[PlacedRun], quantities: Sequence[str]) -> Drawing:
    """Two quantities of every step against each other, a panel for each row, and the cumulative
    distribution of the second; step 0 is left out."""
    x, y = quantities
    data = [
        Pair(f"{NAMES.get(y, y)}, {label}", label, run.place.seed, r["step"], r[x], r[y])
        for label, run in zip(_labels(runs), runs, strict=True)
        for r in run.log
        if r["step"] > 0 and r.get(x) is not None and r.get(y) is not None
    ]
    methods = list(dict.fromkeys(pair.method for pair in data))
    panels: dict[str, Callable[[Any], None]] = {}
    for number, method in enumerate(methods):
        own = [pair for pair in data if pair.method == method]
        panels[own[0].quantity] = partial(_scatter, own=own, data=data, number=number, x=x)
    if data:
        panels["share of steps with less"] = partial(_distribution, data=data, y=y)
    return Drawing(data, "pairs", panels)


def _scatter(axes: Any, own: list[Pair], data: list[Pair], number: int, x: str) -> None:
    """Draw the steps of one row, and the diagonal on which both quantities are equal."""
    xs, ys = [p.x for p in own], [p.y for p in own]
    colour, _ = look(number)
    axes.scatter(xs, ys, s=8, alpha=0.5, color=colour, linewidths=0, label=own[0].method)
    # The same limits in all panels, so that they can be compared.
    low, high = inner([v for pair in data for v in (pair.x, pair.y)])
    axes.axline((low, low), (high, high), color="black", linewidth=0.6, linestyle=":")
    for line in (axes.axhline, axes.axvline):
        line(0.0, color="black", linewidth=0.6)
    axes.set(xlim=(low, high), ylim=(low, high))
    axes.locator_params(nbins=5)
    axes.set_xlabel(NAMES.get(x, x), fontsize=9)


def _distribution(axes: Any, data: list[Pair], y: str) -> None:
    """Draw the cumulative distribution of y, a line for each row."""
    for number, method in enumerate(dict.fromkeys(pair.method for pair in data)):
        found = sorted(pair.y for pair in data if pair.method == method)
        shares = [(rank + 1) / len(found) for rank in range(len(found))]
        colour, style = look(number)
        axes.step(found, shares, where="post", color=colour, ls=style)
    axes.axvline(0.0, color="black", linewidth=0.6)
    axes.set_xlim(*inner([pair.y for pair in data]))
    axes.set_xlabel(NAMES.get(y, y), fontsize=9)


def inner(found: list[float]) -> tuple[float, float]:
    """The limits of an axis for most of the values (`INNER`), with 0 and a margin."""
    found = sorted(found)
    low, high = (found[round(share * (len(found) - 1))] for share in INNER)
    low, high = min(low, 0.0), max(high, 0.0)
    margin = 0.05 * (high - low) or 1.0
    return low - margin, high + margin


# --- values of a table ---------------------------------------------------------------------------


def values(table: Table, summary: list[Numbers]) -> list[Value]:
    """The paper's values and ours in the figure's columns, row by row. summary: as in
    `Rendered`."""
    wanted = table.figure.columns or [c.label for c in table.columns if c.published]
    bars = []
    for quantity in wanted:
        for line in summary:
            label = ", ".join(str(line[part]) for part in ("of", "method") if part in line)
            start = f"{quantity}: "
            own = {
                key.removeprefix(start): float(entry)
                for key, entry in line.items()
                if key.startswith(start) and isinstance(entry, float | int)
            }
            if "paper" in own:
                second_hand = line[f"{start}evidence"] == "second-hand"
                bars.append(Value(quantity, label, SOURCES[second_hand], own["paper"]))
            for name in own.keys() & {"mean", "sum"}:
                ends = own.get("low"), own.get("high")
                bars.append(Value(quantity, label, "ours", own[name], *ends))
    return bars


def of_values(figure: Figure, data: list[Value], units: dict[str, str]) -> Drawing:
    """The paper's values and ours, as bars or as lines; a panel for each column.

    units: of the table's columns, by label.
    """
    own: dict[str, list[Value]] = {}
    for entry in data:
        own.setdefault(entry.quantity, []).append(entry)
    panels = {
        axis(quantity, units[quantity]): partial(draw_values, data=of, lines=figure.kind == "lines")
        for quantity, of in own.items()
    }
    note = INTERVAL if any(entry.low is not None for entry in data) else ""
    # Wide enough that no label covers another, and high enough for the longest one.
    labels = {entry.method for entry in data}
    longest = max(map(len, labels), default=0)
    size = max(3.6, 0.17 * len(labels)), 3.4 + 0.05 * max(0, longest - 16)
    return Drawing(data, "values", panels, note, *size)


def axis(label: str, unit: str) -> str:
    """The title of an axis: a column's label with its unit."""
    words = "x dense" if unit == "x" else unit
    return f"{label} ({words})" if words else label


def draw_values(axes: Any, data: list[Value], lines: bool) -> None:
    """Draw the values of one quantity, as bars or as lines; second-hand values are hatched or
    hollow."""
    labels = list(dict.fromkeys(entry.method for entry in data))
    both = len({entry.source == "ours" for entry in data}) > 1
    for source in SOURCES:
        shown = [entry for entry in data if entry.source == source]
        mine, second_hand = source == "ours", source == SOURCES[1]
        at = [float(labels.index(entry.method)) for entry in shown]
        heights, colour = [entry.value for entry in shown], COLOURS[1 + mine]
        if lines and shown:
            axes.plot(
                at, heights, label=source, color=colour, linestyle="--" if second_hand else "-",
                marker=MARKERS[mine], markersize=4,
                markerfacecolor="white" if second_hand else colour,
            )  # fmt: skip
        elif shown:
            at = [x + (0.2 if mine else -0.2) * both for x in at]
            hatch: Any = {"hatch": "///", "edgecolor": "white"} if second_hand else {}
            axes.bar(at, heights, width=0.4, label=source, color=colour, linewidth=0, **hatch)
        for x, entry in zip(at, shown, strict=True):
            if entry.low is not None:
                axes.plot([x, x], [entry.low, entry.high], color="black", linewidth=1.0)
    style: Any = {"rotation": 60, "ha": "right", "fontsize": 7}
    if len(labels) > 12:
        style = {"rotation": 90, "ha": "right", "va": "center", "fontsize": 6}
    axes.set_xticks(range(len(labels)), labels, rotation_mode="anchor", **style)
    axes.set_xlim(-0.75, len(labels) - 0.25)
    axes.ticklabel_format(axis="y", useOffset=False)
