"""Draws the training curves of a block's arms."""

from __future__ import annotations

import math
from typing import Any

from experiments.runs.curves import NAMES, Point
from reproduce.report import html
from reproduce.report.figures import Scale, curves, span
from reproduce.report.gather import Shown
from reproduce.report.html import Markup, tag, text

LOSSES = ("val_loss", "loss")  # the first of them that a block has is drawn
FROM = 0.15  # share of the steps left out, in which all curves fall from the same height


def curves_of(shown: Shown) -> Markup:
    """The figure of losses, and for each arm a small figure of its loss minus that of the arm that
    it is compared with, and of its flip rate."""
    last = max(k.record["steps"] for seeds in shown.arms.values() for k in seeds.values())
    first = FROM * last
    small = Scale(first, last, 40, 206)
    half, anyone = shown.yardstick, next(iter(shown.arms))
    loss_name = next((n for n in LOSSES if shown.curve(anyone, n)), LOSSES[0])
    base = {arm: shown.against(arm) for arm in shown.arms if shown.against(arm)}
    over = {arm: shown.curve(arm, loss_name, other) for arm, other in base.items()}
    flips = {arm: shown.curve(arm, "flip_rate") for arm in shown.arms}
    parts: list[Any] = [_losses(shown, loss_name, last)]
    late = sorted(p.mean for points in over.values() for p in points if p.step > first)
    y = Scale(*_bulk(late), 96, 6)
    log = _flip_scale(flips, first)
    panels, absent = [], []
    for arm, points in over.items():
        if not any(p.step > first and y.low <= p.mean <= y.high for p in points):
            absent.append(arm)
            continue
        drawn = [("other", over.get(half, []))]
        drawn += [("", points)] if arm != half else []
        loss = curves(f"{arm}: {NAMES[loss_name]}, minus {base[arm]}", drawn, y, small)
        flip = None
        if log is not None and any(p.mean for p in flips[arm]):
            flip = curves(f"{arm}: flip rate", [("", flips[arm])], log, small)
        panels.append(tag("figure", tag("figcaption", tag("strong", html.name(arm))), loss, flip))
    other = shown.baseline if {*base.values()} == {shown.baseline} else "the arm compared with"
    explanation = (
        f"Above: {NAMES[loss_name]}, minus that of {other} at the same seeds, from step "
        f"{first:,.0f} on{f', {half} dashed' * (half in shown.arms)}. All arms have the same "
        "scale, and curves are cut off where they leave it. "
        "Below, for arms whose masks change: the fraction of the mask that flips per step, on a "
        "logarithmic scale. Lines are means over seeds, bands ± one standard deviation."
    )
    if absent:
        explanation += f" Without a curve on this scale: {', '.join(absent)}."
    inside = tag("p", explanation), tag("div", panels, class_="panels")
    parts.append(html.details(f"Curves of every arm ({len(panels)})", inside, open=True))
    return text(parts)


def _bulk(values: list[float]) -> tuple[float, float]:
    """The ends of an axis for about nine tenths of these sorted differences. Most are usually
    positive, so the axis reaches less far below 0 unless many are negative."""
    if not any(values):
        return -0.25, 1.0
    last = len(values) - 1
    most = 1.3 * (sorted(map(abs, values))[int(0.9 * last)] or max(map(abs, values)))
    return -most if values[int(0.1 * last)] < -0.25 * most else -0.25 * most, most


def _losses(shown: Shown, quantity: str, last: float) -> Markup:
    """The figure of losses in absolute terms, in the second half of the steps: dense, half the
    width and the leading methods."""
    first = last / 2
    names = [arm for arm in shown.leading if arm not in (shown.baseline, shown.yardstick)]
    lines = [(f"arm-{n % 8}", shown.curve(arm, quantity)) for n, arm in enumerate(names)]
    lines += [
        ("other", shown.curve(shown.yardstick, quantity)),
        ("base", shown.curve(shown.baseline, quantity)),
    ]
    inside = [p.mean for _, points in lines for p in points if p.step >= first]
    if not inside:
        return text()
    drawn = curves(
        f"{NAMES[quantity]} of the leading arms",
        lines,
        Scale(*span(inside), 250, 8),
        Scale(first, last, 44, 380),
        named=True,
    )
    loss, _, unit = NAMES[quantity].capitalize().partition(", ")
    caption = (
        f"{loss} ({unit}) in the second half of the steps, means over seeds: the first arm of "
        "every method. The small figures below show differences, for all arms."
    )
    return tag("figure", drawn, tag("figcaption", caption))


def _flip_scale(flips: dict[str, list[Point]], first: float) -> Scale | None:
    """A logarithmic axis for the flip rates; None if no mask changes."""
    rates = [p.mean for points in flips.values() for p in points if p.step >= first and p.mean > 0]
    if not rates:
        return None
    low = 10 ** math.floor(math.log10(max(min(rates), 1e-6)))
    return Scale(low, 10 ** math.ceil(math.log10(max(rates))), 76, 6, log=True)
