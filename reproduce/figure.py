"""Draws the figure of a table: training curves, or its values beside the paper's.

The data of a figure stands beside it as CSV.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from experiments.runs.curves import COLOURS, MARKERS, NAMES, SPREAD, Point, points
from experiments.runs.curves import draw as draw_curves
from experiments.runs.curves import figure as draw_figure
from experiments.support.checkpoint import csv_text, write_atomic, write_text
from reproduce import by_block, scatter
from reproduce.engine import PlacedRun
from reproduce.render import Rendered
from reproduce.scatter import Pair
from reproduce.spec import Figure, Table


@dataclass(frozen=True)
class Value:
    """One bar, or one point of a line. source: `paper` or `ours`."""

    quantity: str
    method: str
    source: str
    value: float


def draw(table: Table, tier: str, runs: list[PlacedRun], rendered: Rendered, path: Path) -> bool:
    """Write the figure to `path` (.png) and its data beside it (-curves.csv, -pairs.csv or
    -values.csv), unless they show these runs already; True if the table has a figure."""
    figure, title = table.figure, f"{table.title} ({tier})"
    data: list[Point] | list[Value] | list[Pair]
    if figure.kind == "curves":
        data, beside = curves(runs, figure.quantities), "curves"
    elif figure.kind == "blocks":
        data, beside = by_block.points(runs), "curves"
    elif figure.kind == "scatter":
        data, beside = scatter.pairs(runs, figure.quantities), "pairs"
    else:
        data, beside = values(table, rendered), "values"
    if figure.kind == "none" or not data:
        return False
    text = csv_text([dataclasses.asdict(entry) for entry in data])
    record = path.with_name(f"{path.stem}-{beside}.csv")
    if path.exists() and record.exists() and record.read_text(encoding="utf-8") == text:
        return True
    record.unlink(missing_ok=True)  # written last: it vouches for the picture
    names = {label: axis(label, unit) for label, unit in rendered.units.items()} | NAMES
    write_atomic(path, lambda p: _plot(figure, data, title, names, p))
    write_text(record, text)
    return True


def curves(runs: list[PlacedRun], quantities: Iterable[str]) -> list[Point]:
    """The points of the curves of all panels."""
    several = len({run.place.variant for run in runs}) > 1
    labels = [", ".join(filter(None, [run.place.variant * several, run.place.row])) for run in runs]
    logs = [
        (label, [*map(_with_perplexity, run.log)], run.result)
        for label, run in zip(labels, runs, strict=True)
    ]
    return points(logs, quantities)


def _with_perplexity(record: dict[str, Any]) -> dict[str, Any]:
    loss = record.get("val_loss")
    return record if loss is None else {**record, "perplexity": math.exp(loss)}


def values(table: Table, rendered: Rendered) -> list[Value]:
    """The values of the figure's columns, row by row, the paper's and ours."""
    wanted = table.figure.columns or [c.label for c in table.columns if c.published]
    found = []
    for quantity in wanted:
        for line in rendered.summary:
            label = ", ".join(str(line[part]) for part in ("of", "method") if part in line)
            for source, names in {
                "paper": ["paper"],
                "ours": ["mean", "ratio", "speedup", "sum"],
            }.items():
                for name in names:
                    number = line.get(f"{quantity}: {name}")
                    if isinstance(number, float | int):
                        found.append(Value(quantity, label, source, float(number)))
    return found


def axis(label: str, unit: str) -> str:
    """A column's label on an axis, with its unit."""
    told = "x dense" if unit == "x" else unit
    return f"{label} ({told})" if told else label


def _plot(figure: Figure, data: list[Any], title: str, names: dict[str, str], path: Path) -> None:
    def panel(quantity: str, axes: Any) -> None:
        if figure.kind == "curves":
            draw_curves(axes, quantity, data)
        elif figure.kind == "blocks":
            by_block.draw(axes, quantity, data)
        elif figure.kind == "scatter":
            scatter.draw(axes, quantity, data, figure.quantities)
        else:
            shown = [entry for entry in data if entry.quantity == quantity]
            _values(axes, shown, lines=figure.kind == "lines")

    quantities = list(dict.fromkeys(entry.quantity for entry in data))
    panels = {names.get(quantity, quantity): partial(panel, quantity) for quantity in quantities}
    if figure.kind == "scatter" and figure.distribution:
        panels[scatter.DISTRIBUTION] = partial(
            scatter.distribution, data=data, quantity=figure.quantities[1]
        )
    over_steps = figure.kind in ("curves", "blocks")
    labels = 0 if over_steps or figure.kind == "scatter" else len({entry.method for entry in data})
    told = f"\n{SPREAD}" if over_steps else ""
    # Wide enough that no label covers another, and as high as the longest asks for.
    longest = max(len(entry.method) for entry in data) if labels else 0
    size = max(3.6, 0.17 * labels), 3.4 + 0.05 * max(0, longest - 16)
    draw_figure(panels, title + told, path, *size)


def _values(axes: Any, data: list[Value], lines: bool) -> None:
    labels = list(dict.fromkeys(entry.method for entry in data))
    place = {label: float(number) for number, label in enumerate(labels)}
    sources = {entry.source for entry in data}
    for number, source in enumerate(("paper", "ours")):
        shown = [entry for entry in data if entry.source == source]
        if not shown:
            continue
        at, heights = [place[entry.method] for entry in shown], [entry.value for entry in shown]
        colour = COLOURS[1 + number]
        if lines:
            axes.plot(at, heights, label=source, color=colour, marker=MARKERS[number], markersize=4)
        else:
            beside = (-0.2 + 0.4 * number) * (len(sources) > 1)
            centres = [x + beside for x in at]
            axes.bar(centres, heights, width=0.4, label=source, color=colour)
    steep = {"rotation": 60, "ha": "right", "fontsize": 7}
    upright = {"rotation": 90, "ha": "right", "va": "center", "fontsize": 6}
    style: Any = upright if len(labels) > 12 else steep
    axes.set_xticks(list(place.values()), labels, rotation_mode="anchor", **style)
    axes.set_xlim(-0.75, len(labels) - 0.25)
    axes.ticklabel_format(axis="y", useOffset=False)
