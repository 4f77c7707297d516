"""Draws the main figure with matplotlib, as SVG whose colours follow the reader's scheme."""

from __future__ import annotations

import io
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.runs.comparison import Summary
from experiments.runs.curves import NAMES
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
}
INK, SOFT, RULE, BAND, MARK, OTHER = (light for light, _ in COLOURS.values())
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


def canvas(
    width: float, height: float, left: float, right: float, top: float, bottom: float
) -> tuple[Figure, Any]:
    """(figure, its axes), of fixed size, so that it does not depend on the fonts installed."""
    whole, high = left + width + right, top + height + bottom
    figure = Figure(figsize=(whole / 72, high / 72), dpi=72)
    place = left / whole, 1 - (top + height) / high, width / whole, height / high
    return figure, figure.add_axes(place)


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
        baseline: the variant that all are compared with.
        gap: the difference of the half-width baseline, the unit of the upper axis; nan = no upper
            axis.
        share: of the gap, up to which a difference counts as equal; drawn as a band.
        quantity: what is compared.
    """
    names = [baseline, *(row.label for row in rows)]
    known = math.isfinite(gap) and gap != 0
    left = 14 + 7.4 * max(map(len, names))
    figure, axes = canvas(250, 22 * len(names), left, right=66, top=48 if known else 8, bottom=46)
    axes.set(xlim=_reach(rows, by_seed, gap if known else None), ylim=(len(names) - 0.5, -0.5))
    if known:
        axes.axvspan(-share * gap, share * gap, color=BAND, linewidth=0)
        axes.axvline(gap, color=OTHER, linewidth=1.5, linestyle="--")
        upper = axes.secondary_xaxis("top", functions=(lambda x: x / gap, lambda g: g * gap))
        upper.set_xlabel(f"share of the gap from {baseline} to {half}, g")
        upper.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.axvline(0, color=INK, linewidth=1.2)
    _beside(axes, 0, "0")
    for y, row in enumerate(rows, 1):
        _estimate(axes, y, row, by_seed.get(row.label, ()), row.label == half)
    axes.set_yticks(range(len(names)), names, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.spines.left.set_visible(False)
    axes.locator_params(axis="x", nbins=5)
    for label in axes.get_yticklabels():
        label.set_fontweight("bold" if label.get_text() == half else "normal")
    axes.set_xlabel(f"{NAMES.get(quantity, quantity)}, minus {baseline} at equal seeds")
    differences = "; ".join(f"{row.label} {_in_words(row)}" for row in rows)
    return svg(
        figure,
        f"Differences in {quantity} to {baseline}",
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


def _beside(axes: Any, y: int, words: str) -> None:
    """Write words to the right of a row."""
    axes.annotate(
        words.replace("-", MINUS), (1, y), (62, 0), axes.get_yaxis_transform(),
        textcoords="offset points", ha="right", va="center", annotation_clip=False,
    )  # fmt: skip


def _in_words(row: Summary) -> str:
    form = difference_form(row.difference, row.low, row.high)
    interval = f" [{row.low:{form}}, {row.high:{form}}]" if math.isfinite(row.low) else ""
    return f"{row.difference:{form}}{interval} (n={row.pairs})"


def span(values: Sequence[float], room: float = 0.05) -> Limits:
    """(least, greatest) of the values, with some room around them."""
    low, high = min(values), max(values)
    more = (high - low or abs(high) or 1.0) * room
    return low - more, high + more
