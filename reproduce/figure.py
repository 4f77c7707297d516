"""The figure of a table: curves of its trainings, or its values beside the paper's.

The data of a figure stands beside it as CSV.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments import stats
from experiments.checkpoint import write_atomic
from reproduce.engine import Run, write_text
from reproduce.render import Rendered, csv_text
from reproduce.spec import Figure, Table

NAMES = {
    "val_loss": "validation loss, nats",
    "flip_rate": "flip rate, share of the mask per step",
    "loss": "training loss, nats",
}

# Okabe and Ito's colours, told apart by colour-blind readers; the baseline, first, is black.
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#0072B2")
MARKERS = ("o", "s", "^", "v", "D", "P", "X")
STYLES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Point:
    """One step of one curve, over the seeds; std is None for a single one."""

    quantity: str
    method: str
    step: int
    mean: float
    std: float | None
    n: int


@dataclass(frozen=True)
class Value:
    """One bar, or one point of a line. source: `paper` or `ours`."""

    quantity: str
    method: str
    source: str
    value: float


def draw(table: Table, tier: str, runs: list[Run], rendered: Rendered, path: Path) -> bool:
    """Write `path` (.png) and its data beside it (-curves.csv or -values.csv), unless they show
    these runs; whether there is a figure."""
    figure, title = table.figure, f"{table.title} ({tier})"
    data: list[Point] | list[Value]
    if figure.kind == "curves":
        data, beside = curves(runs, figure.quantities), "curves"
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


def curves(runs: list[Run], quantities: Iterable[str]) -> list[Point]:
    """The curves of all panels; step 0 is left out.

    The last validation loss is that of the finalized model, at the step after the last.
    """
    order = list(quantities)
    points: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for run in runs:
        label = ", ".join(filter(None, [run.place.variant, run.place.row]))
        last = {"step": run.result["steps"], "val_loss": run.result["metrics"].get("val_loss")}
        for record in [*run.log, last]:
            for quantity in order:
                if record["step"] > 0 and record.get(quantity) is not None:
                    points[quantity, label, record["step"]].append(record[quantity])
    return [
        Point(
            quantity,
            label,
            step,
            stats.mean(found),
            stats.std(found) if len(found) > 1 else None,
            len(found),
        )
        for (quantity, label, step), found in sorted(
            points.items(), key=lambda item: order.index(item[0][0])
        )
    ]


def values(table: Table, rendered: Rendered) -> list[Value]:
    """What the figure's columns say, row by row, in the paper and here."""
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
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    quantities = list(dict.fromkeys(entry.quantity for entry in data))
    labels = 0 if figure.kind == "curves" else len({entry.method for entry in data})
    width = max(3.6, 0.17 * labels)  # of a panel, so that no label covers another
    canvas = Canvas(figsize=(max(width * len(quantities), 5.0), 3.4), layout="constrained")
    FigureCanvasAgg(canvas)
    panels = canvas.subplots(1, len(quantities), squeeze=False)[0]
    for axes, quantity in zip(panels, quantities, strict=True):
        shown = [entry for entry in data if entry.quantity == quantity]
        if figure.kind == "curves":
            _curves(axes, quantity, shown)
        else:
            _values(axes, shown, lines=figure.kind == "lines")
        axes.set_ylabel(names.get(quantity, quantity), fontsize=9)
        axes.tick_params(labelsize=8, which="both")
        axes.grid(alpha=0.25, linewidth=0.5)
        axes.spines[["top", "right"]].set_visible(False)
    legend: dict[str, Any] = {}
    for axes in panels:
        handles, labelled = axes.get_legend_handles_labels()
        legend |= dict(zip(labelled, handles, strict=True))
    canvas.legend(
        list(legend.values()),
        list(legend),
        loc="outside lower center",
        ncols=3,
        fontsize=8,
        frameon=False,
    )
    told = "\nmean over seeds, band: ± standard deviation" if figure.kind == "curves" else ""
    canvas.suptitle(title + told, fontsize=9)
    canvas.savefig(path, dpi=200, format="png")


def _curves(axes: Any, quantity: str, data: list[Point]) -> None:
    for number, label in enumerate(dict.fromkeys(point.method for point in data)):
        points = [p for p in data if p.method == label]
        steps, mean = [p.step for p in points], [p.mean for p in points]
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(
            steps,
            mean,
            label=label,
            color=colour,
            linestyle="--" if number == 0 else STYLES[number // len(COLOURS) % len(STYLES)],
            # Thinner from row to row, so that a curve under another one still shows.
            linewidth=max(1.0, 2.6 - 0.4 * number),
            marker=MARKERS[number % len(MARKERS)] if quantity == "val_loss" else None,
            markersize=4,
        )
        low = [p.mean - (p.std or 0.0) for p in points]
        high = [p.mean + (p.std or 0.0) for p in points]
        axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    if quantity == "flip_rate":
        axes.set_yscale("log", nonpositive="mask")
    axes.set_xlabel("optimizer step", fontsize=9)


def _values(axes: Any, data: list[Value], lines: bool) -> None:
    labels = list(dict.fromkeys(entry.method for entry in data))
    place = {label: float(number) for number, label in enumerate(labels)}
    for number, source in enumerate(("paper", "ours")):
        shown = [entry for entry in data if entry.source == source]
        if not shown:
            continue
        at, heights = [place[entry.method] for entry in shown], [entry.value for entry in shown]
        colour = COLOURS[1 + number]
        if lines:
            axes.plot(at, heights, label=source, color=colour, marker=MARKERS[number], markersize=4)
        else:
            left = [x - 0.2 + 0.4 * number for x in at]
            axes.bar(left, heights, width=0.4, label=source, color=colour)
    steep = {"rotation": 60, "ha": "right", "fontsize": 7}
    upright = {"rotation": 90, "ha": "right", "va": "center", "fontsize": 6}
    style: Any = upright if len(labels) > 12 else steep
    axes.set_xticks(list(place.values()), labels, rotation_mode="anchor", **style)
