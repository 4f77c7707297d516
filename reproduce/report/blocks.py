"""The page's sections on blocks: differences, the table of arms, curves, commands and files."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.runs.comparison import with_spread
from experiments.runs.curves import NAMES, Point
from reproduce import scale
from reproduce.cells import published_cell
from reproduce.claims import Margin
from reproduce.records import Evidence, StoredRecord
from reproduce.report import claims, html
from reproduce.report.figures import Scale, curves, forest, span
from reproduce.report.gather import Shown
from reproduce.report.html import Markup, tag, text
from reproduce.report.links import Links
from reproduce.runner import command
from reproduce.spec import TIERS, Table

LOSSES = ("val_loss", "loss")  # the first one that a block has is drawn
FROM = 0.15  # share of the steps left out: all curves fall from the same height there
Found = dict[str, Any]  # plain values made by reproduce/verdicts.py


def difference_figure(shown: Shown, arms: Iterable[str], share: float) -> Markup:
    """The figure of differences to the baseline for some arms of a block."""
    rows = [shown.rows[arm] for arm in arms]
    ends = shown.baseline, shown.yardstick
    return forest(rows, shown.by_seed, *ends, shown.gap, share, shown.quantity)


def across(blocks: list[Shown], evidence: Evidence, margin: Margin) -> Markup | None:
    """The table of what each arm loses of the gap in every block that has it; None if no arm is in
    two blocks."""
    known = [s for s in blocks if math.isfinite(s.gap) and not s.block.name.startswith("pilot")]
    shared = {arm: [s for s in known if arm in s.arms] for s in known for arm in s.arms}
    rows = [
        [arm, *(_gap_closed(evidence, s, arm, margin) if s in of else "-" for s in known)]
        for arm, of in shared.items()
        if len(of) > 1
    ]
    if not rows:
        return None
    heads = ["arm", *(f"block {s.block.name}, {s.quantity}" for s in known)]
    return text(
        tag("h3", "The same arms in several blocks"),
        tag("p", "g is an arm's distance from dense as a fraction of the half-width model's: 0 is "
                 "as good as dense, 1 as bad as half the width. Unlike losses, it can be compared "
                 "between scales."),
        html.table("Gap left open, g [95 %], by block", heads, rows),
    )  # fmt: skip


def section(shown: Shown, evidence: Evidence, margin: Margin, found: Found, links: Links) -> Markup:
    """The section on one block."""
    name, block = shown.block.name, shown.block
    kind = "pilot" if name.startswith("pilot") else f"block {name}"
    done = sum(map(len, shown.arms.values()))
    total = len(block.arms) * len(block.seeds)
    parts: list[Any] = [
        tag("h4" if kind == "pilot" else "h3", block.title, id=html.slug("block", name)),
        tag(
            "p",
            f"{kind.capitalize()}: {done} of {total} runs, "
            f"seeds {', '.join(map(str, block.seeds))}. "
            + ("Pilots choose settings; no claim is judged by them." if kind == "pilot" else ""),
        ),
    ]
    if not done:
        return text(parts, tag("p", "No runs yet. To make them:"), html.command(_run(name)))
    parts += [tag("p", _gap(gap)) for gap in found["blocks"] if gap["block"] == name]
    parts.append(_table(shown, evidence, margin, found))
    if kind != "pilot":
        if shown.baseline in shown.arms:
            caption = (
                f"All arms of block {name}, best first; an arrow marks a value beyond the axis"
            )
            drawn = difference_figure(shown, shown.rows, margin.share)
            parts.append(html.details(caption, tag("figure", drawn), open=True))
            parts.append(_curves(shown))
        parts.append(_notes(shown))
    parts.append(tag("p", "To make the missing runs:"))
    parts.append(html.command(_run(name)))
    parts.append(_again(shown))
    parts.append(_files(shown, links))
    return tag("section", parts)


def _gap(gap: Found) -> str:
    """A sentence on what half the width costs, in standard deviations of that difference."""
    quantity = gap["metric"].rpartition(".")[2]
    met = "met" if gap["ratio"] >= scale.ENOUGH else "missed"
    return (
        f"{gap['upper']} minus {gap['lower']} is {claims.signed(gap['gap'])} "
        f"({NAMES.get(quantity, quantity)}), "
        f"{gap['ratio']:.1f} times its standard deviation over {gap['n']} seeds; to rank methods, "
        f"a block should have at least {scale.ENOUGH:g}: {met}. "
    ) + (
        f"It is {gap['other_ratio']:.1f} times the median standard deviation of the other arms' "
        "differences."
        if gap["other_arms"]
        else ""
    )


def _run(name: str) -> str:
    return f"python -m reproduce run {name}"


def _table(shown: Shown, evidence: Evidence, margin: Margin, found: Found) -> Markup:
    name = shown.block.name
    rows = [
        [_anchored(name, arm), *_cells(shown, arm, evidence, margin, found)]
        for arm in shown.block.arms
    ]
    heads = ["arm", *_heads(shown)]
    return html.table(f"Arms of block {name}", heads, rows, words=(0, 4, 5, 6, 7, 8))


def _heads(shown: Shown) -> list[str]:
    better = "less" if shown.lower_is_better else "more"
    return [
        *(f"ours ± std (n): {shown.quantity}, {better} is better",),
        *(f"minus {shown.baseline or 'dense'} [95 %]", "gap left open, g [95 %]", "verdict"),
        *("tier", "revision", "device", "source"),
    ]


def _cells(shown: Shown, arm: str, evidence: Evidence, margin: Margin, found: Found) -> list[Any]:
    """The cells of an arm's row, in the order of `_heads`."""
    name = shown.block.name
    if arm not in shown.rows:
        return [*["-"] * 3, "not run", "mini", "-", "-", "-"]
    row, kept = shown.rows[arm], list(shown.arms[arm].values())
    told = claims.signed(row.difference, row.low, row.high)
    difference = f"{told} {claims.interval(row.low, row.high)}"
    return [
        f"{with_spread(row.mean, row.std)} (n={row.n})",
        difference.removesuffix(" -") if row.pairs else "-",
        _gap_closed(evidence, shown, arm, margin),
        claims.of_arm(found, name, arm),
        "mini",
        ", ".join(dict.fromkeys(map(revision, kept))),
        html.unbroken(", ".join(dict.fromkeys(map(device, kept)))),
        tag("a", "files", href=f"#{html.slug('files', name, arm)}"),
    ]


def of_table(
    table: Table, blocks: dict[str, Shown], evidence: Evidence, margin: Margin, found: Found
) -> Markup | None:
    """The rows of a paper's table that have an arm in a block, with the paper's values; None if no
    such arm was run."""
    places = {label: tuple(place.split("/")) for label, place in table.arms.items()}
    known = {block: blocks[block] for block, _ in places.values() if block in blocks}
    if len(known) != 1:
        return None
    ((name, shown),) = known.items()
    arms = {label: arm for label, (_, arm) in places.items()}
    if not any(arm in shown.arms for arm in arms.values()):
        return None
    column, papers = _published(table)
    rows = [
        [label, papers.get(label, "not available"), *_cells(shown, arm, evidence, margin, found)]
        for label, arm in arms.items()
    ]
    heads = ["method", f"paper: {column}" if papers else "paper", *_heads(shown)]
    told = "Small models: compare the order of the rows with the paper's, not the numbers. "
    link = tag("a", shown.block.title, href=f"#{html.slug('block', name)}")
    return text(
        html.table(f"{table.title}, by block {name}", heads, rows, words=(0, 5, 6, 7, 8, 9)),
        tag("p", told, link, "."),
    )


def _published(table: Table) -> tuple[str, dict[str, str]]:
    """(label, values by row) of the table's first column with published values, for the size
    nearest to a small model."""
    variant = table.variants_of(TIERS[0])[0]
    for column in table.columns:
        cells = {row.label: published_cell(table, variant, row, column) for row in table.rows}
        papers = {label: cell.text(column.format) for label, cell in cells.items() if cell}
        if papers:
            size = f", {variant.published}" if variant.published else ""
            return f"{column.label}{size}", papers
    return "", {}


def _anchored(block: str, arm: str) -> Markup:
    return tag("span", arm, id=html.slug("arm", block, arm))


def _gap_closed(evidence: Evidence, shown: Shown, arm: str, margin: Margin) -> str:
    if math.isfinite(shown.gap) and arm in (shown.baseline, shown.yardstick):
        return str(int(arm == shown.yardstick))
    g = scale.gap_closed(evidence.values, shown.block.name, arm, shown.metric, margin, 2)
    if g is None:
        return "-"
    return f"{g.value:.2f} {claims.interval(g.low, g.high, '.2f')}".removesuffix(" -")


def _curves(shown: Shown) -> Markup:
    """A small figure for each arm: its training loss minus the baseline's, and its flip rate."""
    last = max(k.record["steps"] for seeds in shown.arms.values() for k in seeds.values())
    first = FROM * last
    small = Scale(first, last, 40, 206)
    base, half = shown.baseline, shown.yardstick
    loss_name = next((n for n in LOSSES if shown.curve(base, n)), LOSSES[0])
    over = {arm: shown.curve(arm, loss_name, base) for arm in shown.arms if arm != base}
    flips = {arm: shown.curve(arm, "flip_rate") for arm in shown.arms}
    parts: list[Any] = [_losses(shown, loss_name, first, last)]
    late = [abs(p.mean) for points in over.values() for p in points if p.step > first]
    most = sorted(late)[int(0.9 * (len(late) - 1))] * 1.3 if late else 1.0
    y = Scale(-0.25 * most, most, 96, 6)
    log = _flip_scale(flips, first)
    panels = []
    for arm, points in over.items():
        drawn = [("other", over.get(half, []))]
        drawn += [("", points)] if arm != half else []
        loss = curves(f"{arm}: {NAMES[loss_name]}, minus {base}", drawn, y, small)
        flip = None
        if log is not None and any(p.mean for p in flips[arm]):
            flip = curves(f"{arm}: flip rate", [("", flips[arm])], log, small)
        panels.append(tag("figure", tag("figcaption", tag("strong", arm)), loss, flip))
    more = (
        f"Above: {NAMES[loss_name]}, minus that of {base} at the same seeds, from step "
        f"{first:,.0f} on{f', {half} dashed' * (half in shown.arms)}; all arms share one scale, "
        "and curves are cut off where they leave it. "
        "Below, for arms whose masks change: the fraction of the mask that flips per step, on a "
        "logarithmic scale. Lines are means over seeds, bands ± one standard deviation."
    )
    inside = tag("p", more), tag("div", panels, class_="panels")
    parts.append(html.details(f"Curves of every arm ({len(panels)})", inside, open=True))
    return text(parts)


def _losses(shown: Shown, quantity: str, first: float, last: float) -> Markup:
    """The figure of losses in absolute terms: dense, half the width and the leading methods."""
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
    caption = (
        f"{NAMES[quantity].capitalize()} of the leading arms from step {first:,.0f} on, means over "
        "seeds. The figures below show their differences from dense."
    )
    return tag("figure", drawn, tag("figcaption", caption))


def _flip_scale(flips: dict[str, list[Point]], first: float) -> Scale | None:
    seen = [p.mean for points in flips.values() for p in points if p.step >= first and p.mean > 0]
    if not seen:
        return None
    low = 10 ** math.floor(math.log10(max(min(seen), 1e-6)))
    return Scale(low, 10 ** math.ceil(math.log10(max(seen))), 76, 6, log=True)


def _notes(shown: Shown) -> Markup:
    return tag("ul", [tag("li", note.strip()) for note in shown.block.notes])


def _again(shown: Shown) -> Markup:
    """The list of every arm's command."""
    runs = Path("runs")  # the drivers' default
    rows = []
    for run in replace(shown.block, seeds=shown.block.seeds[:1]).runs(runs):
        words = ["python", *command(run, runs)[1:]]
        line = shlex.join(word for word in words if not word.startswith("runs="))
        rows.append([run.arm, tag("code", line)])
    told = f"These are for seed {shown.block.seeds[0]}; change seed= for the others."
    if shown.block.source is not None:
        told += " Each starts from a finished run (init=), which its own block makes."
    return html.details(
        "The command of every row",
        tag("p", told),
        html.table(f"Commands of block {shown.block.name}", ["arm", "command"], rows, words=(0, 1)),
    )


def _files(shown: Shown, links: Links) -> Markup:
    parts = []
    for arm, seeds in shown.arms.items():
        rows = []
        for seed, kept in seeds.items():
            record = kept.record
            value = record["metrics"].get(shown.quantity)
            rows.append(
                [
                    links.to(kept.path),
                    seed,
                    "not finite" if value is None else f"{value:.6f}",
                    revision(kept),
                    html.unbroken(device(kept)),
                    record["config_hash"],
                ]
            )
        heads = ["file", "seed", shown.quantity, "revision", "device", "config"]
        drawn = html.table(f"Records of {arm}", heads, rows, words=(0, 3, 4, 5))
        parts.append(tag("div", drawn, id=html.slug("files", shown.block.name, arm)))
    return html.details(f"The files behind every number of {shown.block.name}", parts)


def device(kept: StoredRecord) -> str:
    """The device that made a record."""
    return kept.record["environment"]["device"]


def revision(kept: StoredRecord) -> str:
    """The short git revision that made a record; + if it had uncommitted changes."""
    environment = kept.record["environment"]
    short = (environment["git_revision"] or "unknown")[:7]
    return short + ("+" if environment["git_dirty"] else "")
