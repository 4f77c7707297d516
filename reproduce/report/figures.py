"""Draws figures as SVG. Their colours are in figures.css, so that they follow the reader's colour
scheme."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from experiments.runs.comparison import Summary
from experiments.runs.curves import NAMES, Point
from experiments.runs.stats import difference_form
from reproduce.report.html import MINUS, Markup, tag, text

REDUCED, ENLARGED = 0.75, 1.25  # pixels of the page per unit of a figure: least and most
STYLE = Path(__file__).with_name("figures.css")
_numbers = count(1)  # for ids that are unique on a page


@dataclass(frozen=True)
class Scale:
    """Maps values from `low` to `high` to places on an axis from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = (math.log(v) if self.log else v for v in (self.low, self.high))
        value = math.log(value) if self.log else value
        return round(self.start + (value - low) / (high - low) * (self.end - self.start), 1)

    def ticks(self, about: int = 5) -> list[float]:
        """Round values within the scale."""
        if self.log:
            powers = range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
            every = math.ceil(len(powers) / 4)
            return [10.0**power for power in powers if power % every == 0]
        rough = (self.high - self.low) / about
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * f for f in (1, 2, 5, 10) if power * f >= rough)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [round(k * step, 12) for k in range(first, last + 1)]


def svg(title: str, description: str, width: float, height: float, *content: Any) -> Markup:
    """An SVG figure with a title and a description for screen readers."""
    own = next(_numbers)
    names = f"figure-{own}-title", f"figure-{own}-text"
    return tag(
        "svg",
        tag("title", title, id=names[0]),
        tag("desc", description, id=names[1]),
        *content,
        viewBox=f"0 0 {width:g} {height:g}",
        # Letters are as large in all figures, and not too small on a phone, where a figure scrolls.
        style=f"min-width: {REDUCED * width:.0f}px; max-width: {ENLARGED * width:.0f}px",
        role="img",
        aria_labelledby=" ".join(names),
        class_="figure",
    )


def standalone(figure: Markup) -> str:
    """A figure as the content of an SVG file, with its styles."""
    style = STYLE.read_text(encoding="utf-8").replace(":root", "svg")
    start = '<svg xmlns="http://www.w3.org/2000/svg" width="640" '
    inside = re.sub(' style="[^"]*"', "", figure, count=1).replace("<svg ", start, 1)
    return inside.replace("<title", f"<style>{style}</style><title", 1) + "\n"


def label(x: float, y: float, content: Any, class_: str = "", anchor: str = "start") -> Markup:
    """A text element at (x, y)."""
    return tag("text", content, x=x, y=y, class_=class_ or None, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """A line element from (x1, y1) to (x2, y2)."""
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def short(value: float) -> str:
    """The label of a tick."""
    return f"{value:,.4f}".rstrip("0").rstrip(".").replace("-", MINUS) if value else "0"


# ----------------------------------------------------------------------------- differences


def forest(
    rows: Sequence[Summary],
    by_seed: Mapping[str, Sequence[float]],
    baseline: str,
    yardstick: str,
    gap: float,
    share: float,
    quantity: str,
) -> Markup:
    """A figure of differences with their intervals and a dot for each seed.

    Args:
        rows: the arms, from top to bottom.
        by_seed: the differences of each arm by seed.
        baseline: the arm that all are compared with; "" if the labels of the rows say it.
        gap: the difference of the yardstick, in units of which the upper axis counts; nan = no
            upper axis.
        share: of the gap, up to which a difference counts as equal; drawn as a band.
        quantity: what is compared.
    """
    left = 14 + 7.4 * max(len(label) for label in [baseline, *(r.label for r in rows)])
    known = math.isfinite(gap) and gap != 0
    name, right, top, pitch = left - 8, left + 250, 44 if known else 8, 22
    above = 1 if baseline else 0  # rows above the differences
    bottom = top + pitch * (len(rows) + above)
    each = {r.label: by_seed.get(r.label, ()) for r in rows}
    ends = [v for r in rows for v in (r.difference, r.low, r.high, *each[r.label])]
    ends = [v for v in ends if math.isfinite(v)]
    # Values far outside are drawn as arrows, so that the scale suits the others.
    sizes = [
        max(abs(v) for v in (r.difference, r.low, r.high) if math.isfinite(v))
        for r in rows
        if math.isfinite(r.difference)
    ]
    reach = 3 * (abs(gap) if known else statistics.median(sizes or [0.0]))
    if reach:
        ends = [v for v in ends if abs(v) <= reach] + [gap] * known
    low, high = min([*ends, 0.0]), max([*ends, 0.0])
    room = (high - low or 1.0) * 0.06
    x = Scale(low - room, high + room, left, right)
    parts: list[Markup] = []
    if known:
        margin = sorted((x(-share * gap), x(share * gap)))
        start = max(margin[0], left)
        width = round(min(margin[1], right) - start, 1)
        parts.append(tag("rect", x=start, y=top, width=width, height=bottom - top, class_="band"))
        parts.append(line(x(gap), top, x(gap), bottom, "yardstick"))
        in_gaps = Scale(x.low / gap, x.high / gap, left, right)
        for tick in in_gaps.ticks(4) if gap > 0 else []:
            parts.append(label(in_gaps(tick), top - 8, short(tick), "tick", "middle"))
        parts.append(label(left, top - 26, f"share of the gap from {baseline} to {yardstick}, g"))
    parts.append(line(x(0), top, x(0), bottom, "zero"))
    for tick in x.ticks():
        parts.append(line(x(tick), bottom, x(tick), bottom + 4, "axis"))
        parts.append(label(x(tick), bottom + 16, short(tick), "tick", "middle"))
    parts.append(line(left, bottom, right, bottom, "axis"))
    minus = f"minus {baseline}" if baseline else "difference"
    unit = f"{NAMES.get(quantity, quantity)}, {minus} at equal seeds"
    parts.append(label(left, bottom + 34, unit))
    if baseline:
        parts.append(label(name, top + 16, baseline, anchor="end"))
        parts.append(label(x(0) + 4, top + 16, "0", "value"))
    for place, row in enumerate(rows, above):
        y = top + pitch * place + 11
        parts += _estimate(row, x, y, name, row.label == yardstick)
        seeds = [v for v in each[row.label] if row.pairs > 1 and x.low <= v <= x.high]
        parts += [tag("circle", cx=x(v), cy=y + 7, r=1.6, class_="seed") for v in seeds]
    differences = "; ".join(f"{r.label} {_in_words(r)}" for r in rows)
    return svg(
        f"Differences in {quantity}" + (f" to {baseline}" if baseline else ""),
        f"Mean paired difference with its 95 % interval, small dots are seeds: {differences}."
        + (f" {yardstick} is the yardstick, {gap:+.4f}." if known else ""),
        max(right + 66, left + 6.8 * len(unit)),
        bottom + 44,
        *parts,
    )


def _estimate(row: Summary, x: Scale, y: float, name: float, is_yardstick: bool) -> list[Markup]:
    parts = [label(name, y + 5, row.label, "strong" if is_yardstick else "", "end")]
    value = f"{row.difference:{_form(row)}}".replace("-", MINUS)
    value = value if math.isfinite(row.difference) else "not finite"
    parts.append(label(x.end + 62, y + 5, value, "value", "end"))
    if not x.low <= row.difference <= x.high:
        at, way = (x.end, 1) if row.difference > x.high else (x.start, -1)
        arrow = f"M{at - 9 * way} {y - 5}L{at} {y}L{at - 9 * way} {y + 5}Z"
        return [*parts, tag("path", d=arrow, class_="mark")]
    if math.isfinite(row.low):
        low, high = x(max(row.low, x.low)), x(min(row.high, x.high))
        parts.append(line(low, y, high, y, "interval"))
        ends = [x(end) for end in (row.low, row.high) if x.low <= end <= x.high]
        parts += [line(end, y - 4, end, y + 4, "interval") for end in ends]
        kind = "mark"
    else:
        kind = "mark hollow"  # one seed has no interval
    at = x(row.difference)
    if is_yardstick:
        parts.append(tag("rect", x=at - 4, y=y - 4, width=8, height=8, class_=kind))
    else:
        parts.append(tag("circle", cx=at, cy=y, r=4, class_=kind))
    return parts


def _form(row: Summary) -> str:
    return difference_form(row.difference, row.low, row.high)


def _in_words(row: Summary) -> str:
    form = _form(row)
    interval = f" [{row.low:{form}}, {row.high:{form}}]" if math.isfinite(row.low) else ""
    return f"{row.difference:{form}}{interval} (n={row.pairs})"


# ----------------------------------------------------------------------------- curves


def curves(
    title: str,
    lines: Sequence[tuple[str, Sequence[Point]]],
    y: Scale,
    x: Scale,
    named: bool = False,
) -> Markup:
    """A figure of curves: means over seeds with a band of ± standard deviation.

    lines: (class in figures.css, points) of each curve; points outside of the axes are not drawn.
    named: write the names of the curves at their ends.
    """
    longest = max((len(points[0].method) for _, points in lines if points), default=0)
    width, height = x.end + (28 + 6.6 * longest if named else 8), y.start + 18
    parts = [line(x.start, y(tick), x.end, y(tick), "grid") for tick in y.ticks(3)]
    parts += [label(x.start - 4, y(t) + 4, _tick(t, y), "tick", "end") for t in y.ticks(3)]
    parts += [
        label(x(t), y.start + 14, _steps(t), "tick", "middle") for t in x.ticks(6 if named else 3)
    ]
    if y.low < 0 < y.high and not y.log:
        parts.append(line(x.start, y(0), x.end, y(0), "zero"))
    parts.append(line(x.start, y.start, x.end, y.start, "axis"))
    descriptions, ends = [], []
    for class_, points in lines:
        inside = [p for p in points if x.low <= p.step <= x.high and y.low <= p.mean <= y.high]
        if not inside:
            continue
        if any(p.std for p in inside) and not named:
            edges = [_bounded(p.mean + (p.std or 0.0), y) for p in inside]
            under = [_bounded(p.mean - (p.std or 0.0), y) for p in inside]
            steps = [p.step for p in inside]
            around = [*zip(steps, edges, strict=True)]
            around += reversed([*zip(steps, under, strict=True)])
            parts.append(tag("path", d=f"{_path(around, x, y)}Z", class_=f"spread {class_}"))
        drawn = _path([(p.step, p.mean) for p in inside], x, y)
        parts.append(tag("path", d=drawn, class_=f"curve {class_}"))
        first, last = inside[0], inside[-1]
        ends.append((y(last.mean), class_, last.method))
        descriptions.append(
            f"{first.method}: {first.mean:.4g} at step {first.step:,}, {last.mean:.4g} at step "
            f"{last.step:,}"
        )
    if named:
        parts += _names(sorted(ends), x.end, y.start)
    return svg(title, "; ".join(descriptions) or "nothing to draw", width, height, *parts)


def _names(ends: list[tuple[float, str, str]], right: float, bottom: float) -> list[Markup]:
    """The names of curves at their ends, moved apart so that none covers another."""
    pitch, parts = 14, []
    lowest = bottom - pitch * (len(ends) - 1)
    place = min(ends[0][0], lowest) if ends else 0.0
    for number, (end, class_, name) in enumerate(ends):
        place = max(place, min(end, lowest + pitch * number))
        lead = f"M{right} {end}L{right + 12} {round(place, 1)}h8"
        parts.append(tag("path", d=lead, class_=f"curve {class_}"))
        parts.append(label(right + 24, round(place + 4, 1), name, "small"))
        place += pitch
    return parts


def _tick(value: float, y: Scale) -> str:
    return f"1e{round(math.log10(value))}".replace("-", MINUS) if y.log else short(value)


def _steps(value: float) -> str:
    return f"{short(value / 1000)}k" if value >= 1000 else short(value)


def _bounded(value: float, y: Scale) -> float:
    return min(max(value, y.low), y.high)


def _path(points: Sequence[tuple[float, float]], x: Scale, y: Scale) -> str:
    return "M" + "L".join(f"{x(step):g} {y(value):g}" for step, value in points)


def span(values: Sequence[float], room: float = 0.05) -> tuple[float, float]:
    """(least, greatest) of the values, with some room around them."""
    low, high = min(values), max(values)
    more = (high - low or abs(high) or 1.0) * room
    return low - more, high + more


# ----------------------------------------------------------------------------- speed


def factors(title: str, rows: Sequence[tuple[str, float | None, float]], unit: str) -> Markup:
    """A figure of the paper's factors and ours, row by row; dense is 1. rows: (label, the paper's
    factor, ours)."""
    values = [v for _, paper, ours in rows for v in (paper, ours) if v is not None]
    left = 14 + 7.0 * max(len(row) for row, _, _ in rows)
    name, right, top, pitch = left - 8, left + 220, 12, 18
    bottom = top + pitch * len(rows) + 6
    x = Scale(*span([*values, 1.0]), left, right)
    parts = [line(x(t), top, x(t), bottom, "grid") for t in x.ticks()]
    parts += [label(x(t), bottom + 16, short(t), "tick", "middle") for t in x.ticks()]
    parts.append(line(x(1), top, x(1), bottom, "zero"))
    for place, (row, paper, ours) in enumerate(rows):
        y = top + pitch * place + 12
        parts.append(label(name, y + 4, row, "small", "end"))
        if paper is not None:
            parts.append(line(x(paper), y, x(ours), y, "grid"))
            at = x(paper)
            d = f"M{at} {y - 5}L{at + 5} {y}L{at} {y + 5}L{at - 5} {y}Z"
            parts.append(tag("path", d=d, class_="mark hollow"))
        parts.append(tag("circle", cx=x(ours), cy=y, r=4, class_="mark"))
        parts.append(label(right + 40, y + 4, f"{ours:.2f}", "value small", "end"))
    parts.append(label(left, bottom + 34, unit))
    description = "; ".join(
        f"{row}: {ours:.3f}" + (f", the paper {paper:.3f}" if paper is not None else "")
        for row, paper, ours in rows
    )
    return svg(title, description, right + 44, bottom + 42, *parts)


# ----------------------------------------------------------------------------- verdicts

SHAPES: dict[str, Callable[[], Markup]] = {
    "confirmed": lambda: text(
        tag("circle", cx=8, cy=8, r=7, class_="full"),
        tag("path", d="M4.5 8.5l2.5 2.5 4.5-5.5", class_="sign"),
    ),
    "direction only": lambda: text(
        tag("circle", cx=8, cy=8, r=7, class_="full"),
        tag("path", d="M8 12V4M5 7l3-3 3 3", class_="sign"),
    ),
    "refuted": lambda: text(
        tag("path", d="M5 1h6l4 4v6l-4 4H5l-4-4V5z", class_="full"),
        tag("path", d="M5.2 5.2l5.6 5.6M10.8 5.2l-5.6 5.6", class_="sign"),
    ),
    "not reproduced": lambda: text(
        tag("path", d="M5 1h6l4 4v6l-4 4H5l-4-4V5z", class_="full"),
        tag("path", d="M4.5 8h7", class_="sign"),
    ),
    "inconclusive": lambda: text(
        tag("path", d="M8 .8L15.2 8 8 15.2.8 8z", class_="full"),
        tag("path", d="M4.6 8.4c1.2-1.8 2.2-1.8 3.4-.4s2.2 1.4 3.4-.4", class_="sign"),
    ),
    "not tested": lambda: tag("circle", cx=8, cy=8, r=6.2, class_="open"),
}


def badge(verdict: str) -> Markup:
    """A verdict in words, with a shape by which it can be recognised without colour."""
    kind = verdict.replace(" ", "-")
    if verdict not in SHAPES:
        return tag("span", verdict, class_="verdict")
    shape = tag("svg", SHAPES[verdict](), viewBox="0 0 16 16", aria_hidden="true", class_="shape")
    return tag("span", shape, verdict, class_=f"verdict {kind}")
