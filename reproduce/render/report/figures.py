"""Draws the page's figures with matplotlib, as SVG whose colours follow the reader's scheme."""

from __future__ import annotations

import io
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.runs.comparison import Summary
from experiments.runs.curves import NAMES, Point
from experiments.runs.stats import difference_form

MINUS = "\N{MINUS SIGN}"
REDUCED, ENLARGED = 0.75, 1.25  # pixels of the page per unit of a figure: least and most
# By name in style.css: the colour on light and on dark pages.
COLOURS = {
    "ink": ("#1b1f24", "#e6edf3"),
    "soft": ("#57606a", "#9aa7b4"),
    "rule": ("#d0d7de", "#3a434d"),
    "band": ("#dfe9f3", "#1c2f42"),
    "mark": ("#0b5cad", "#6cb2ff"),
    "other": ("#9a6700", "#d7a72c"),
    "c1": ("#b3440e", "#f08a55"),
    "c2": ("#00795c", "#3fc79c"),
    "c3": ("#a3467f", "#e59cc8"),
}
INK, SOFT, RULE, BAND, MARK, OTHER, *MORE = (light for light, _ in COLOURS.values())
LINES = [MARK, *MORE]  # colours of curves
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 12,
    "font.family": "sans-serif",
    "xtick.labelsize": 11,
    "ytick.labelsize": 11,
    "axes.labelsize": 12,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": SOFT,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "grid.color": RULE,
    "axes.linewidth": 1,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.xmargin": 0,
    "legend.frameon": False,
    "legend.fontsize": 11,
    "text.parse_math": False,
}
Limits = tuple[float, float]


def variables() -> Markup:
    """The style sheet that sets the colours' variables for light and for dark pages."""
    light, dark = (
        "".join(f"--{name}: {pair[dark]}; " for name, pair in COLOURS.items()) for dark in (0, 1)
    )
    return Markup(
        f":root {{ {light}}}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark}}} }}"
    )


def canvas(width: float, heights: Sequence[float], left: float, **room: float) -> Any:
    """(figure, its axes from top to bottom), all of fixed size, so that they do not depend on the
    fonts installed. room: `right`, `top`, `bottom` of the figure and `between` axes."""
    right, top, bottom, between = (room[k] for k in ("right", "top", "bottom", "between"))
    total = left + width + right, top + sum(heights) + between * (len(heights) - 1) + bottom
    figure, axes, place = Figure(figsize=(total[0] / 72, total[1] / 72), dpi=72), [], top
    for height in heights:
        start = 1 - (place + height) / total[1]
        axes.append(figure.add_axes((left / total[0], start, width / total[0], height / total[1])))
        place += height + between
    return figure, axes


def svg(figure: Figure, title: str, description: str) -> Markup:
    """The figure as an SVG element with a description for screen readers."""
    # The salt makes ids that are the same in every process and unique on a page.
    with rc_context({"svg.hashsalt": title + description}), io.StringIO() as out:
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
        drawn = out.getvalue()
    body = re.search(r"</metadata>(.*)</svg>", drawn, re.S)
    assert body is not None
    inside = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>|<!--.*?-->", "", body[1], flags=re.S)
    inside = re.sub(r'<g id="[^"]*"', "<g", inside)
    inside = re.sub(r"\s*font-family: [^;]*;", "", inside)  # the page's own
    inside = re.sub(r"\s*\n\s*", " ", inside)
    inside = re.sub(r' (d|x|y)="[^"]*"', lambda m: re.sub(r"(\.\d\d)\d+", r"\1", m[0]), inside)
    for name, (light, _) in COLOURS.items():
        inside = inside.replace(light, f"var(--{name})")
    width, height = 72 * figure.get_size_inches()
    # Letters are as large in all figures, and not too small on a phone, where a figure scrolls.
    return Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        'viewBox="0 0 {:g} {:g}" style="min-width: {:.0f}px; max-width: {:.0f}px" '
        'role="img" aria-label="{}" class="figure">{}</svg>'
    ).format(
        width, height, REDUCED * width, ENLARGED * width, f"{title}. {description}", Markup(inside)
    )


def standalone(figure: Markup) -> str:
    """A figure as the content of an SVG file, with its colours."""
    fonts = "svg { font-family: system-ui, 'DejaVu Sans', sans-serif; }"
    inside = re.sub(r'style="[^"]*"', 'width="640"', figure, count=1)
    return inside.replace(">", f"><style>{variables()}{fonts}</style>", 1) + "\n"


# ----------------------------------------------------------------------------- differences


@rc_context(STYLE)
def forest(
    rows: Sequence[Summary],
    by_seed: Mapping[str, Sequence[float]],
    baseline: str,
    half: str,
    gap: float,
    share: float,
    quantity: str,
) -> Markup:
    """A figure of differences with their intervals and a dot for each seed.

    Args:
        rows: the variants, from top to bottom.
        by_seed: the differences of each variant by seed.
        baseline: the variant that all are compared with; "" if the labels of the rows say it.
        gap: the difference of the half-width baseline, the unit of the upper axis; nan = no upper
            axis.
        share: of the gap, up to which a difference counts as equal; drawn as a band.
        quantity: what is compared.
    """
    names = [*([baseline] if baseline else []), *(row.label for row in rows)]
    known = math.isfinite(gap) and gap != 0
    left = 14 + 7.4 * max(map(len, names))
    sizes = {"right": 66, "top": 48 if known else 8, "bottom": 46, "between": 0}
    figure, (axes,) = canvas(250, [22 * len(names)], left, **sizes)
    axes.set(xlim=_reach(rows, by_seed, gap if known else None), ylim=(len(names) - 0.5, -0.5))
    if known:
        axes.axvspan(-share * gap, share * gap, color=BAND, linewidth=0)
        axes.axvline(gap, color=OTHER, linewidth=1.5, linestyle="--")
        upper = axes.secondary_xaxis("top", functions=(lambda x: x / gap, lambda g: g * gap))
        upper.set_xlabel(f"share of the gap from {baseline} to {half}, g")
        upper.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.axvline(0, color=INK, linewidth=1.2)
    if baseline:
        _beside(axes, 0, "0")
    for y, row in enumerate(rows, len(names) - len(rows)):
        _estimate(axes, y, row, by_seed.get(row.label, ()), row.label == half)
    _name_rows(axes, names)
    for label in axes.get_yticklabels():
        label.set_fontweight("bold" if label.get_text() == half else "normal")
    against = f"minus {baseline}" if baseline else "difference"
    axes.set_xlabel(f"{NAMES.get(quantity, quantity)}, {against} at equal seeds")
    differences = "; ".join(f"{row.label} {_in_words(row)}" for row in rows)
    return svg(
        figure,
        f"Differences in {quantity}" + (f" to {baseline}" if baseline else ""),
        f"Mean paired difference with its 95 % interval, small dots are seeds: {differences}."
        + (f" {half} is the half-width baseline, {gap:+.4f}." if known else ""),
    )


def _reach(
    rows: Sequence[Summary], by_seed: Mapping[str, Sequence[float]], gap: float | None
) -> Limits:
    """The ends of the axis. Values far outside are drawn as arrows, so that it suits the others."""
    own = [[v for v in (r.difference, r.low, r.high) if math.isfinite(v)] for r in rows]
    sizes = [max(map(abs, values)) for values in own if values]
    reach = 3 * (abs(gap) if gap is not None else statistics.median(sizes or [0.0]))
    ends = [v for values in own for v in values]
    ends += [v for r in rows for v in by_seed.get(r.label, ()) if math.isfinite(v)]
    ends = [v for v in ends if abs(v) <= reach or not reach] + [0.0, gap or 0.0]
    return span(ends, 0.06)


def _estimate(axes: Any, y: int, row: Summary, seeds: Sequence[float], square: bool) -> None:
    """Draw a row: its difference with the interval, its seeds and the number. A hollow mark is a
    single seed, which has no interval."""
    low, high = axes.get_xlim()
    words, _, _ = _in_words(row).partition(" ")
    _beside(axes, y, words if math.isfinite(row.difference) else "not finite")
    axes.plot(seeds, [y + 0.3] * len(seeds), ".", markersize=4, color=INK, alpha=0.55, mew=0)
    if not low <= row.difference <= high:
        end, mark = (high, ">") if row.difference > high else (low, "<")
        axes.plot(end, y, mark, color=MARK, clip_on=False)
        return
    known = math.isfinite(row.low)
    if known:
        axes.plot([row.low, row.high], [y, y], marker="|", color=MARK, linewidth=1.6, mew=1.6)
    face = MARK if known else "none"
    axes.plot(row.difference, y, "s" if square else "o", color=MARK, mfc=face, markersize=7)


def _beside(axes: Any, y: int, words: str, offset: float = 62, **style: Any) -> None:
    """Write words to the right of a row."""
    axes.annotate(
        words.replace("-", MINUS), (1, y), (offset, 0), axes.get_yaxis_transform(),
        textcoords="offset points", ha="right", va="center", annotation_clip=False, **style,
    )  # fmt: skip


def _name_rows(axes: Any, names: Sequence[str]) -> None:
    """Name the rows of a figure on its left."""
    axes.set_yticks(range(len(names)), names, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.spines.left.set_visible(False)
    axes.locator_params(axis="x", nbins=5)


def _in_words(row: Summary) -> str:
    form = difference_form(row.difference, row.low, row.high)
    interval = f" [{row.low:{form}}, {row.high:{form}}]" if math.isfinite(row.low) else ""
    return f"{row.difference:{form}}{interval} (n={row.pairs})"


def span(values: Sequence[float], room: float = 0.05) -> Limits:
    """(least, greatest) of the values, with some room around them."""
    low, high = min(values), max(values)
    more = (high - low or abs(high) or 1.0) * room
    return low - more, high + more


# ----------------------------------------------------------------------------- curves


@dataclass(frozen=True)
class Panel:
    """Axes of a figure of curves. lines: the look (`base`, `other` or the number of a variant) and
    the points of each curve. y: the ends of the axis, which is logarithmic if `log`."""

    title: str
    lines: Sequence[tuple[str | int, Sequence[Point]]]
    y: Limits
    log: bool = False


@rc_context(STYLE)
def curves(panels: Sequence[Panel], x: Limits, named: bool = False) -> Markup:
    """A figure of curves, one panel below the other: means over seeds with a band of ± standard
    deviation. Points beyond the axes are not drawn.

    named: one large panel with a legend in place of the bands.
    """
    longest = max(len(p[0].method) for panel in panels for _, p in panel.lines if p)
    room = {"right": 60 + 7.0 * longest if named else 12, "top": 6, "bottom": 20, "between": 26}
    width, height = (336, 242) if named else (166, 84)
    figure, several = canvas(width, [height] * len(panels), 44, **room)
    described = []
    for axes, panel in zip(several, panels, strict=True):
        axes.set(xlim=x, ylim=panel.y, yscale="log" if panel.log else "linear")
        if panel.y[0] < 0 < panel.y[1]:
            axes.axhline(0, color=INK, linewidth=1.2)
        told, (low, high) = [], panel.y
        for look, points in panel.lines:
            inside = [p for p in points if x[0] <= p.step <= x[1] and low <= p.mean <= high]
            if inside:
                _curve(axes, look, inside, spread=not named)
                reached = [f"{p.mean:.4g} at step {p.step:,}" for p in (inside[0], inside[-1])]
                told.append(f"{inside[0].method}: {', '.join(reached)}")
        described.append(f"{panel.title}. {'; '.join(told) or 'nothing to draw'}")
        axes.grid(axis="y")
        axes.spines.left.set_visible(False)
        axes.tick_params(axis="y", length=0, which="both", labelleft=True)
        axes.locator_params(axis="x", nbins=7 if named else 4)
        axes.xaxis.set_major_formatter(lambda step, _: f"{step / 1000:g}k" if step else "0")
        if panel.log:
            axes.minorticks_off()
            axes.yaxis.set_major_formatter("{x:g}")
        else:
            axes.locator_params(axis="y", nbins=4)
    if named:  # in the order in which the curves end
        ends = zip(*axes.get_legend_handles_labels(), strict=True)
        ordered = sorted(ends, key=lambda entry: -entry[0].get_ydata()[-1])
        axes.legend(*zip(*ordered, strict=True), loc="center left", bbox_to_anchor=(1.01, 0.5))
    return svg(figure, *(" ".join(described)).split(". ", 1))


def _curve(axes: Any, look: str | int, points: Sequence[Point], spread: bool) -> None:
    """Draw a curve and, if asked for, its spread."""
    if isinstance(look, int):
        colour, line, width = LINES[look % 4], ":" if look >= len(LINES) else "-", 1.6
    else:
        colour, line, width = INK if look == "base" else OTHER, "--", 1.2
    steps, means = [p.step for p in points], [p.mean for p in points]
    axes.plot(steps, means, color=colour, linestyle=line, linewidth=width, label=points[0].method)
    if spread and any(p.std for p in points):
        low, high = ([p.mean + way * (p.std or 0.0) for p in points] for way in (-1, 1))
        alpha = 0.12 if look == "other" else 0.22
        axes.fill_between(steps, low, high, color=colour, alpha=alpha, linewidth=0)


# ----------------------------------------------------------------------------- speed


@rc_context(STYLE)
def factors(title: str, rows: Sequence[tuple[str, float | None, float]], unit: str) -> Markup:
    """A figure of the paper's factors and ours, row by row; dense is 1. rows: (label, the paper's
    factor, ours)."""
    left = 14 + 7.0 * max(len(label) for label, _, _ in rows)
    room = {"right": 48, "top": 8, "bottom": 44, "between": 0}
    figure, (axes,) = canvas(220, [18 * len(rows) + 6], left, **room)
    values = [v for _, paper, ours in rows for v in (paper, ours) if v is not None]
    axes.set(xlim=span([*values, 1.0]), ylim=(len(rows) - 0.4, -0.6), xlabel=unit)
    axes.grid(axis="x")
    axes.axvline(1, color=INK, linewidth=1.2)
    for y, (_, paper, ours) in enumerate(rows):
        if paper is not None:
            axes.plot([paper, ours], [y, y], color=RULE)
            axes.plot(paper, y, "D", color=MARK, mfc="none", markersize=6)
        axes.plot(ours, y, "o", color=MARK, markersize=7)
        _beside(axes, y, f"{ours:.2f}", 40, fontsize=11)
    _name_rows(axes, [label for label, _, _ in rows])
    papers = ["" if paper is None else f", the paper {paper:.3f}" for _, paper, _ in rows]
    told = [f"{row}: {ours:.3f}{paper}" for (row, _, ours), paper in zip(rows, papers, strict=True)]
    return svg(figure, title, "; ".join(told))
