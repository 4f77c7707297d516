"""Draws the page's figures with matplotlib, as SVG whose colours follow the reader's scheme."""

import io
import re
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.runs.comparison import Summary
from experiments.runs.curves import NAMES
from experiments.runs.stats import difference_form
from reproduce.judge.claims import Margin
from reproduce.judge.scale import share_of_width
from reproduce.records import Values
from reproduce.render.report.blocks import Shown
from reproduce.render.report.html import MINUS

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
INK, _, _, BAND, MARK, OTHER = (light for light, _ in COLOURS.values())
STYLE = Path(__file__).with_name("figure.mplstyle")  # in the colours of light pages
LEFT, WIDTH, RIGHT, TOP, BOTTOM = 14, 250, 66, 48, 46  # of the axes and around them


def variables() -> Markup:
    """The style sheet that sets the colours' variables for light and for dark pages."""
    both = ([f"--{name}: {pair[dark]}; " for name, pair in COLOURS.items()] for dark in (0, 1))
    light, dark = map("".join, both)
    of_dark = f"@media (prefers-color-scheme: dark) {{ :root {{ {dark}}} }}"
    return Markup(f":root {{ {light}}}\n{of_dark}")


def svg(figure: Figure, title: str, description: str) -> Markup:
    """The figure as an SVG element with a description for screen readers."""
    # The salt makes ids that are the same in every process.
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
    # Letters are not too small on a phone, where a figure scrolls.
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


@rc_context(fname=STYLE)
def differences(shown: Shown) -> Markup:
    """The figure of the differences of a block's leading variants to the baseline, best first, with
    their intervals and a dot for each seed.

    A second axis has the difference of the half-width baseline, the gap, for its unit, and a band
    the differences that count as equal.
    """
    paired = [shown.rows[variant] for variant in shown.leading if shown.rows[variant].pairs]
    rows = sorted(paired, key=lambda row: row.difference)
    baseline, half, gap = shown.baseline, shown.margin.upper, shown.gap
    band = shown.margin.share * gap
    names = [baseline, *(row.label for row in rows)]
    left, height = LEFT + 7.4 * max(map(len, names)), 22 * len(names)
    whole, high = left + WIDTH + RIGHT, TOP + height + BOTTOM
    # Of fixed size, so that it does not depend on the fonts installed.
    figure = Figure(figsize=(whole / 72, high / 72), dpi=72)
    axes = figure.add_axes((left / whole, BOTTOM / high, WIDTH / whole, height / high))
    ends = [v for row in rows for v in (row.low, row.high, *shown.by_seed[row.label])]
    room = 0.06 * (max(ends) - min(0.0, *ends))
    axes.set(xlim=(min(0.0, *ends) - room, max(ends) + room), ylim=(len(names) - 0.5, -0.5))
    axes.axvspan(-band, band, color=BAND, linewidth=0)
    axes.axvline(gap, color=OTHER, linewidth=1.5, linestyle="--")
    scale: Any = (lambda x: x / gap, lambda g: g * gap)
    upper = axes.secondary_xaxis("top", functions=scale)
    upper.set_xlabel(f"share of the gap from {baseline} to {half}, g")
    upper.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.axvline(0, color=INK, linewidth=1.2)
    _beside(axes, 0, "0")
    for y, row in enumerate(rows, 1):
        seeds = shown.by_seed[row.label]
        _beside(axes, y, _in_words(row).partition(" ")[0])
        axes.plot(seeds, [y + 0.3] * len(seeds), ".", markersize=4, color=INK, alpha=0.55, mew=0)
        axes.plot([row.low, row.high], [y, y], marker="|", color=MARK, linewidth=1.6, mew=1.6)
        mark = "s" if row.label == half else "o"
        axes.plot(row.difference, y, mark, color=MARK, mfc=MARK, markersize=7)
    axes.set_yticks(range(len(names)), names, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.spines.left.set_visible(False)
    axes.locator_params(axis="x", nbins=5)
    for label in axes.get_yticklabels():
        label.set_fontweight("bold" if label.get_text() == half else "normal")
    quantity = shown.quantity
    axes.set_xlabel(f"{NAMES.get(quantity, quantity)}, minus {baseline} at equal seeds")
    return svg(
        figure,
        f"Differences in {quantity} to {baseline}",
        "Mean paired difference with its 95 % interval, small dots are seeds: "
        f"{'; '.join(f'{row.label} {_in_words(row)}' for row in rows)}. "
        f"{half} is the half-width baseline, {gap:+.4f}.",
    )


# Blocks of equal design, 20 tokens a parameter, by their parameters in millions.
SIZES = {"a": 5, "e6": 14, "e7": 23}


@rc_context(fname=STYLE)
def sizes(values: Values, margin: Margin) -> Markup:
    """The figure of phi (`scale.share_of_width`) of the methods at the sizes of `SIZES`, with its
    intervals. Below half the width it is read from the line's continuation."""
    figure = Figure(figsize=(5.4, 3.4), dpi=72)
    axes = figure.add_axes((0.13, 0.15, 0.84, 0.74))
    told = []
    looks = zip(("s_ste", "sr_ste", "fst"), (MARK, OTHER, INK), "os^", (-1, 0, 1), strict=True)
    for method, colour, mark, shift in looks:
        shares = {
            size: phi
            for block, size in SIZES.items()
            if (phi := share_of_width(values, block, method, "metrics.val_loss", margin))
        }
        at = [size * 1.03**shift for size in shares]
        middle, low, high = ([phi[k] for phi in shares.values()] for k in ("value", "low", "high"))
        axes.vlines(at, low, high, color=colour, linewidth=1.6)
        axes.plot(at, middle, mark + "-", label=method, color=colour, mfc=colour, ms=7, lw=0.8)
        told += [
            f"{method} at {size}M {phi['value']:.2f} [{phi['low']:.2f}, {phi['high']:.2f}] "
            f"(n={phi['n']})"
            for size, phi in shares.items()
        ]
    axes.axhline(0.5, color=INK, linewidth=1, linestyle="--")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, frameon=False)
    axes.set_xscale("log")
    axes.set_xticks([*SIZES.values()], [f"{size}M" for size in SIZES.values()])
    axes.set_xticks([], minor=True)
    axes.set(xlabel="parameters of the dense model", ylabel="share of the feed-forward width, phi")
    return svg(
        figure,
        "Share of the feed-forward width that a dense model needs for a method's loss, by size",
        f"With 95 % intervals: {'; '.join(told)}. The dashed line is half the width.",
    )


def _beside(axes: Any, y: int, words: str) -> None:
    """Write words to the right of a row."""
    axes.annotate(
        words.replace("-", MINUS), (1, y), (62, 0), axes.get_yaxis_transform(),
        textcoords="offset points", ha="right", va="center", annotation_clip=False,
    )  # fmt: skip


def _in_words(row: Summary) -> str:
    form = difference_form(row.difference, row.low, row.high)
    return f"{row.difference:{form}} [{row.low:{form}}, {row.high:{form}}] (n={row.pairs})"
