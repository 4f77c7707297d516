"""The figure of a table: validation loss and flip rate against the step, one colour per row."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from experiments.checkpoint import write_atomic
from reproduce import stats
from reproduce.engine import Run, write_text
from reproduce.render import csv_text

PANELS = {"val_loss": "validation loss", "flip_rate": "flip rate per step"}

# Okabe and Ito's colours, told apart by colour-blind readers; the baseline, first, is black.
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#0072B2")
MARKERS = ("o", "s", "^", "v", "D", "P", "X")


@dataclass(frozen=True)
class Point:
    """One step of one curve, over the seeds; std is None for a single one."""

    quantity: str
    method: str
    step: int
    mean: float
    std: float | None
    n: int


def curves(runs: list[Run]) -> list[Point]:
    """The curves of both panels; step 0 is left out.

    The last validation loss is that of the finalized model, at the step after the last.
    """
    points: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for run in runs:
        last = {"step": run.result["steps"], "val_loss": run.result["metrics"]["val_loss"]}
        for record in [*run.log, last]:
            for quantity in PANELS:
                if record["step"] > 0 and record.get(quantity) is not None:
                    key = (quantity, run.job.label, record["step"])
                    points[key].append(record[quantity])
    order = list(PANELS)
    return [
        Point(
            quantity,
            label,
            step,
            stats.mean(values),
            stats.std(values) if len(values) > 1 else None,
            len(values),
        )
        for (quantity, label, step), values in sorted(
            points.items(), key=lambda item: order.index(item[0][0])
        )
    ]


def draw(runs: list[Run], title: str, path: Path) -> None:
    """Write `path` (.png) and its data beside it (-curves.csv), unless they show these runs."""
    data = curves(runs)
    text = csv_text([dataclasses.asdict(point) for point in data])
    beside = path.with_name(f"{path.stem}-curves.csv")
    if path.exists() and beside.exists() and beside.read_text(encoding="utf-8") == text:
        return
    beside.unlink(missing_ok=True)  # written last: it vouches for the picture
    write_atomic(path, lambda p: _plot(data, title, p))
    write_text(beside, text)


def _plot(data: list[Point], title: str, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2)
    labels = list(dict.fromkeys(point.method for point in data))
    for axes, (quantity, name) in zip(panels, PANELS.items(), strict=True):
        for number, label in enumerate(labels):
            points = [p for p in data if p.quantity == quantity and p.method == label]
            steps, mean = [p.step for p in points], [p.mean for p in points]
            colour = COLOURS[number % len(COLOURS)]
            axes.plot(
                steps,
                mean,
                label=label,
                color=colour,
                linestyle="--" if number == 0 else "-",
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
        axes.set_ylabel(name, fontsize=9)
        axes.tick_params(labelsize=8, which="both")
        axes.grid(alpha=0.25, linewidth=0.5)
        axes.spines[["top", "right"]].set_visible(False)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.suptitle(f"{title}\nmean over seeds, band: ± standard deviation", fontsize=9)
    figure.savefig(path, dpi=200, format="png")
