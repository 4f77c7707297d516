"""Draws the figure of a table: training curves, or our values and the paper's.

The data of a figure is written as CSV into the same folder.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from experiments.runs.curves import COLOURS, MARKERS, NAMES, SPREAD, Point, points
from experiments.runs.curves import draw as draw_curves
from experiments.runs.curves import figure as draw_figure
from experiments.support.checkpoint import csv_text, write_atomic, write_text
from reproduce import by_block, scatter
from reproduce.cells import Numbers
from reproduce.engine import PlacedRun
from reproduce.render import Rendered
from reproduce.scatter import Pair
from reproduce.spec import Figure, Table

SOURCES = ("paper", "paper (second-hand)", "ours")
STARTS = ("random weights", "a trained model")
INTERVAL = "whisker: 95 % interval of our mean"


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


def draw(table: Table, tier: str, runs: list[PlacedRun], rendered: Rendered, path: Path) -> bool:
    """Write the figure to `path` (.png) and its data into the same folder (-curves.csv, -pairs.csv
    or -values.csv), unless they show these runs already; return True if the table has a figure."""
    figure, title = table.figure, f"{table.title} ({tier})"
    data: list[Point] | list[Value] | list[Pair]
    retrained: set[str] = set()
    if figure.kind == "curves":
        data, suffix = curves(runs, figure.quantities), "curves"
        retrained = of_trained_models(runs)
    elif figure.kind == "blocks":
        data, suffix = by_block.points(runs), "curves"
    elif figure.kind == "scatter":
        data, suffix = scatter.pairs(runs, figure.quantities), "pairs"
    else:
        data, suffix = values(table, rendered.summary), "values"
    if figure.kind == "none" or not data:
        return False
    rows = [dataclasses.asdict(entry) for entry in data]
    if retrained:
        rows = [row | {"starts_from": STARTS[row["method"] in retrained]} for row in rows]
    text = csv_text(rows)
    csv = path.with_name(f"{path.stem}-{suffix}.csv")
    if path.exists() and csv.exists() and csv.read_text(encoding="utf-8") == text:
        return True
    csv.unlink(missing_ok=True)  # it is written last, so that it never describes an older picture
    write_atomic(path, lambda p: plot(figure, data, title, rendered.units, p, retrained))
    write_text(csv, text)
    return True


def curves(runs: list[PlacedRun], quantities: Iterable[str]) -> list[Point]:
    """The points of the curves of all quantities."""
    logs = [
        (label, [*map(_with_perplexity, run.log)], run.result)
        for label, run in zip(_labels(runs), runs, strict=True)
    ]
    return points(logs, quantities)


def of_trained_models(runs: list[PlacedRun]) -> set[str]:
    """The labels of the curves of runs that started from another run's weights; empty if all did.

    The two kinds of runs cannot be compared step by step, so they have separate panels.
    """
    labels = _labels(runs)
    found = {label for label, run in zip(labels, runs, strict=True) if run.result.get("init")}
    return found if found < {*labels} else set()


def _labels(runs: list[PlacedRun]) -> list[str]:
    """The label of the curve of each run."""
    several = len({run.place.variant for run in runs}) > 1
    return [", ".join(filter(None, [run.place.variant * several, run.place.row])) for run in runs]


def _with_perplexity(record: dict[str, Any]) -> dict[str, Any]:
    loss = record.get("val_loss")
    return record if loss is None else {**record, "perplexity": math.exp(loss)}


def values(table: Table, summary: list[Numbers]) -> list[Value]:
    """The paper's values and ours in the figure's columns, row by row. summary: as in
    `Rendered`."""
    wanted = table.figure.columns or [c.label for c in table.columns if c.published]
    bars = []
    for quantity in wanted:
        for line in summary:
            label = ", ".join(str(line[part]) for part in ("of", "method") if part in line)

            def number(name: str, line: Numbers = line, quantity: str = quantity) -> float | None:
                value = line.get(f"{quantity}: {name}")
                return float(value) if isinstance(value, float | int) else None

            published = number("paper")
            if published is not None:
                second_hand = line[f"{quantity}: evidence"] == "second-hand"
                bars.append(Value(quantity, label, SOURCES[second_hand], published))
            for name in ("mean", "ratio", "speedup", "sum"):
                own = number(name)
                if own is not None:
                    bars.append(Value(quantity, label, "ours", own, number("low"), number("high")))
    return bars


def axis(label: str, unit: str) -> str:
    """The title of an axis: a column's label with its unit."""
    words = "x dense" if unit == "x" else unit
    return f"{label} ({words})" if words else label


def plot(
    figure: Figure,
    data: list[Any],
    title: str,
    units: dict[str, str],
    path: Path,
    retrained: Collection[str] = (),
) -> None:
    """Write the figure of these points, pairs or values.

    units: of the table's columns, by label. retrained: labels of curves that are drawn in separate
    panels, because their runs started from a trained model.
    """
    names = {label: axis(label, unit) for label, unit in units.items()} | NAMES
    lines, over_steps = figure.kind == "lines", figure.kind in ("curves", "blocks")
    of_values = figure.kind in ("lines", "bars")
    ranges = limits(data, units, from_zero=not lines) if of_values else {}

    def panel(quantity: str, axes: Any, labels: Collection[str] | None = None) -> None:
        if figure.kind == "curves":
            draw_curves(axes, quantity, data, labels)
        elif figure.kind == "blocks":
            by_block.draw(axes, quantity, data)
        elif figure.kind == "scatter":
            scatter.draw(axes, quantity, data, figure.quantities)
        else:
            shown = [entry for entry in data if entry.quantity == quantity]
            draw_values(axes, shown, lines)
            axes.set_ylim(*ranges[quantity])

    quantities = list(dict.fromkeys(entry.quantity for entry in data))
    panels = {names.get(quantity, quantity): partial(panel, quantity) for quantity in quantities}
    if retrained:
        kinds = {entry.method for entry in data} - {*retrained}, retrained
        panels = {
            f"{label}, from {start}": partial(draw_panel, labels=labels)
            for label, draw_panel in panels.items()
            for start, labels in zip(STARTS, kinds, strict=True)
        }
    if figure.kind == "scatter" and figure.distribution:
        panels[scatter.DISTRIBUTION] = partial(
            scatter.distribution, data=data, quantity=figure.quantities[1]
        )
    labels = len({entry.method for entry in data}) if of_values else 0
    explanation = f"\n{SPREAD}" if over_steps else ""
    if of_values and any(entry.low is not None for entry in data):
        explanation = f"\n{INTERVAL}"
    # Wide enough that no label covers another, and high enough for the longest one.
    longest = max(len(entry.method) for entry in data) if labels else 0
    size = max(3.6, 0.17 * labels), 3.4 + 0.05 * max(0, longest - 16)
    draw_figure(panels, title + explanation, path, *size)


def limits(
    data: list[Value], units: dict[str, str], from_zero: bool
) -> dict[str, tuple[float, float]]:
    """The range of the y axis by quantity.

    It is the same for all quantities with the same unit, so that panels can be compared. A quantity
    whose values would all lie in the lowest twentieth has a range of its own.
    """
    ranges = {}
    ends: dict[str, list[float]] = {}
    for entry in data:
        ends.setdefault(entry.quantity, []).extend(
            end for end in (entry.low, entry.value, entry.high) if end is not None
        )
    for quantity, own in ends.items():
        unit = units[quantity]
        alike = {other: seen for other, seen in ends.items() if units[other] == unit}
        highest = max(max(seen) for seen in alike.values())
        large = [seen for seen in alike.values() if max(seen) >= highest / 20]
        of_panel = [end for seen in large for end in seen] if own in large else own
        low, high = 0.0 if from_zero else min(of_panel), max(of_panel)
        margin = 0.05 * (high - low)
        ranges[quantity] = low if from_zero else low - margin, high + margin
    return ranges


def draw_values(axes: Any, data: list[Value], lines: bool) -> None:
    """Draw the values of one quantity, as bars or as lines; second-hand values are hatched or
    hollow."""
    labels = list(dict.fromkeys(entry.method for entry in data))
    place = {label: float(number) for number, label in enumerate(labels)}
    both = len({entry.source == "ours" for entry in data}) > 1
    for source in SOURCES:
        shown = [entry for entry in data if entry.source == source]
        if not shown:
            continue
        mine, second_hand = source == "ours", source == SOURCES[1]
        at, heights = [place[entry.method] for entry in shown], [entry.value for entry in shown]
        colour = COLOURS[1 + mine]
        if lines:
            axes.plot(
                at,
                heights,
                label=source,
                color=colour,
                linestyle="--" if second_hand else "-",
                marker=MARKERS[mine],
                markersize=4,
                markerfacecolor="white" if second_hand else colour,
            )
        else:
            offset = (0.2 if mine else -0.2) * both
            at = [x + offset for x in at]
            hatch: Any = {"hatch": "///", "edgecolor": "white"} if second_hand else {}
            axes.bar(at, heights, width=0.4, label=source, color=colour, linewidth=0, **hatch)
        for x, entry in zip(at, shown, strict=True):
            if entry.low is not None and entry.high is not None:
                axes.plot([x, x], [entry.low, entry.high], color="black", linewidth=1.0)
    steep = {"rotation": 60, "ha": "right", "fontsize": 7}
    upright = {"rotation": 90, "ha": "right", "va": "center", "fontsize": 6}
    style: Any = upright if len(labels) > 12 else steep
    axes.set_xticks(list(place.values()), labels, rotation_mode="anchor", **style)
    axes.set_xlim(-0.75, len(labels) - 0.25)
    axes.ticklabel_format(axis="y", useOffset=False)
