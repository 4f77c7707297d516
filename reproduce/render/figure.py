"""Draws the figure of a table: training curves, steps, or our values and the paper's.

The data of a figure is written as CSV into the same folder.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
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
INTERVAL = "whisker: 95 % interval of our mean"
NAMES = curves.NAMES | {
    "predicted_change": "predicted change (nats)",
    "actual_change": "actual change (nats)",
    "old_masks_change": "change, old masks (nats)",
}
# The entries of metrics.jsonl of runs with method.flips_by_layer, and in them the layer's block:
# its name up to the first number, or all of it if it has none.
OF_LAYER = re.compile(r"flip_rate\.((?:[^.\d]\w*\.)*\d+(?=\.|$)|.*)")
INNER = (0.02, 0.98)  # the quantiles that a scatter shows, because single steps lie far outside
Panels = Mapping[str, Callable[[Any], None]]  # functions that draw on axes, by the y axis' label


@dataclass(frozen=True)
class Value:
    """One bar, or one point of a line."""

    quantity: str
    method: str
    source: str  # one of `SOURCES`
    value: float
    low: float | None = None  # the interval of the mean, if there is one
    high: float | None = None


def draw(table: Table, tier: str, runs: list[PlacedRun], rendered: Rendered, path: Path) -> bool:
    """Write the figure to `path` (.png) and its data into the same folder (-curves.csv, -pairs.csv
    or -values.csv); return True if the table has a figure."""
    figure, suffix, note, size = table.figure, "curves", SPREAD, (3.6, 3.4)
    data: Sequence[Any] = []
    panels: Panels = {}
    if figure.kind == "curves":
        data, panels = of_curves([run for run in runs if run.log], figure.quantities)
    elif figure.kind == "blocks":
        data, panels = of_blocks(runs)
    elif figure.kind == "scatter":
        (data, panels), suffix, note = of_steps(runs, figure.quantities), "pairs", ""
    elif figure.kind != "none":
        own = values(table, rendered.summary)
        data, panels = own, of_values(figure, own, rendered.units)
        suffix, note = "values", INTERVAL if any(one.low is not None for one in own) else ""
        # Wide enough that no label covers another, and high enough for the longest one.
        labels = {one.method for one in own}
        longest = max(map(len, labels), default=0)
        size = max(3.6, 0.17 * len(labels)), 3.4 + 0.05 * max(0, longest - 16)
    if not data:
        return False
    csv = path.with_name(f"{path.stem}-{suffix}.csv")
    write_text(csv, csv_text([one if isinstance(one, dict) else vars(one) for one in data]))
    title = "\n".join(filter(None, [f"{table.title} ({tier})", note]))
    write_atomic(path, lambda p: curves.figure(panels, title, p, *size))
    return True


def _labels(runs: list[PlacedRun]) -> list[str]:
    """The label of each run in a figure."""
    several = len({run.place.variant for run in runs}) > 1
    return [", ".join(filter(None, [run.place.variant * several, run.place.row])) for run in runs]


def of_curves(runs: list[PlacedRun], quantities: Iterable[str]) -> tuple[list[Point], Panels]:
    """Quantities of the log against the step. Runs that started from another run's weights have
    panels of their own, because they cannot be compared with the others step by step."""
    labels = _labels(runs)
    logs = []
    for label, run in zip(labels, runs, strict=True):
        losses = ((record, record.get("val_loss")) for record in run.log)
        log = [r if v is None else r | {"perplexity": math.exp(v)} for r, v in losses]
        logs.append((label, log, run.result))
    data = curves.points(logs, quantities)
    retrained, every = {label for label, _, result in logs if result.get("init")}, {*labels}
    kinds = {"": every}
    if retrained and retrained < every:
        kinds = {", from random weights": every - retrained, ", from a trained model": retrained}
    panels: dict[str, Callable[[Any], None]] = {}
    for quantity in dict.fromkeys(point.quantity for point in data):
        for start, own in kinds.items():
            draw = partial(curves.draw, quantity=quantity, data=data, labels=own)
            panels[f"{NAMES.get(quantity, quantity)}{start}"] = draw
    return data, panels


def of_blocks(runs: list[PlacedRun]) -> tuple[list[Point], Panels]:
    """The flip rate of each transformer block, the mean over its layers, a panel for each row."""
    by_point: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for run in runs:
        panel = "flip rate, " + ", ".join(filter(None, [run.place.variant, run.place.row]))
        for record in (record for record in run.log if record["step"] > 0):
            blocks: dict[str, list[float]] = defaultdict(list)
            for of_layer in filter(None, map(OF_LAYER.match, record)):
                blocks[of_layer[1]].append(record[of_layer.string])
            for block, rates in blocks.items():
                by_point[panel, block, record["step"]].append(mean(rates))
    of_rates = {key: (mean(own), std(own), len(own)) for key, own in by_point.items()}
    data = [Point(*key, mid, s if n > 1 else None, n) for key, (mid, s, n) in of_rates.items()]

    def draw_panel(axes: Any, panel: str) -> None:
        curves.draw(axes, panel, data)
        axes.set_yscale("log", nonpositive="mask")

    names = dict.fromkeys(point.quantity for point in data)
    return data, {panel: partial(draw_panel, panel=panel) for panel in names}


def of_steps(
    runs: list[PlacedRun], quantities: Sequence[str]
) -> tuple[list[dict[str, Any]], Panels]:
    """Two quantities, x and y, of every step against each other, a panel for each row, and the
    cumulative distribution of the second; step 0 is left out."""
    x, y = quantities
    rows: dict[str, list[dict[str, Any]]] = {}
    for label, run in zip(_labels(runs), runs, strict=True):
        panel = f"{NAMES.get(y, y)}, {label}"
        for r in run.log:
            if r["step"] > 0 and r.get(x) is not None and r.get(y) is not None:
                own = {"quantity": panel, "method": label, "seed": run.place.seed}
                rows.setdefault(panel, []).append(own | {"step": r["step"], "x": r[x], "y": r[y]})
    data = [pair for own in rows.values() for pair in own]

    def scatter(axes: Any, panel: str) -> None:
        """Draw the steps of a row, and the diagonal on which both quantities are equal."""
        xs, ys = ([pair[key] for pair in rows[panel]] for key in "xy")
        colour, _ = look([*rows].index(panel))
        label = rows[panel][0]["method"]
        axes.scatter(xs, ys, s=8, alpha=0.5, color=colour, linewidths=0, label=label)
        # The same limits in all panels, so that they can be compared.
        low, high = inner([pair[key] for pair in data for key in "xy"])
        axes.axline((low, low), (high, high), color="black", linewidth=0.6, linestyle=":")
        for line in (axes.axhline, axes.axvline):
            line(0.0, color="black", linewidth=0.6)
        axes.set(xlim=(low, high), ylim=(low, high))
        axes.locator_params(nbins=5)
        axes.set_xlabel(NAMES.get(x, x), fontsize=9)

    def distribution(axes: Any) -> None:
        """Draw the cumulative distribution of y, a line for each row."""
        for number, own in enumerate(rows.values()):
            colour, style = look(number)
            axes.ecdf([pair["y"] for pair in own], color=colour, ls=style)
        axes.axvline(0.0, color="black", linewidth=0.6)
        axes.set_xlim(*inner([pair["y"] for pair in data]))
        axes.set_xlabel(NAMES.get(y, y), fontsize=9)

    of_rows: Panels = {panel: partial(scatter, panel=panel) for panel in rows}
    return data, {**of_rows, "share of steps with less": distribution}


def inner(found: list[float]) -> tuple[float, float]:
    """The limits of an axis for most of the values (`INNER`), with 0 and a margin."""
    found = sorted(found)
    low, high = (found[round(share * (len(found) - 1))] for share in INNER)
    low, high = min(low, 0.0), max(high, 0.0)
    margin = 0.05 * (high - low) or 1.0
    return low - margin, high + margin


def values(table: Table, summary: list[Numbers]) -> list[Value]:
    """The paper's values and ours in the figure's columns, of the rows of a summary."""
    wanted = table.figure.columns or [c.label for c in table.columns if c.published]
    bars = []
    for quantity, line in product(wanted, summary):
        label = ", ".join(str(line[part]) for part in ("of", "method") if part in line)
        names = ("paper", "evidence", "mean", "sum", "low", "high")
        own: dict[str, Any] = {name: line.get(f"{quantity}: {name}") for name in names}
        if own["paper"] is not None:
            source = SOURCES[own["evidence"] == "second-hand"]
            bars.append(Value(quantity, label, source, own["paper"]))
        for ours in (own[name] for name in ("mean", "sum") if own[name] is not None):
            bars.append(Value(quantity, label, "ours", ours, own["low"], own["high"]))
    return bars


def of_values(figure: Figure, data: list[Value], units: dict[str, str]) -> Panels:
    """The paper's values and ours, a panel for each column. units: by the column's label."""
    panels: dict[str, Callable[[Any], None]] = {}
    for quantity in dict.fromkeys(entry.quantity for entry in data):
        unit = "x dense" if units[quantity] == "x" else units[quantity]
        own = [entry for entry in data if entry.quantity == quantity]
        draw = partial(draw_values, data=own, lines=figure.kind == "lines")
        panels[f"{quantity} ({unit})" if unit else quantity] = draw
    return panels


def draw_values(axes: Any, data: list[Value], lines: bool) -> None:
    """Draw the values of one quantity; second-hand values are hatched or hollow."""
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
