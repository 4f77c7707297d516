"""The page's sections on blocks: differences, the table of arms, curves, commands and files."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.runs.comparison import Summary, with_spread
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
from reproduce.verdict_text import Json

LOSSES = ("val_loss", "loss")  # the first one that a block has is drawn
NOTHING = "-"  # a cell without a value
FROM = 0.15  # share of the steps left out: all curves fall from the same height there


def difference_figure(shown: Shown, arms: Iterable[str], share: float) -> Markup:
    """The figure of differences for some arms of a block: to the baseline, or each to the arm that
    the block compares it with, which is then named beside it."""
    rows = [shown.rows[arm] for arm in arms if shown.rows[arm].pairs]
    by_seed = shown.by_seed
    if {shown.against(row.label) for row in rows} == {shown.baseline}:
        ends = shown.baseline, shown.yardstick
        return forest(rows, by_seed, *ends, shown.gap, share, shown.quantity)
    names = {row.label: f"{row.label} {html.MINUS} {shown.against(row.label)}" for row in rows}
    rows = [replace(row, label=names[row.label]) for row in rows]
    named = {name: by_seed[arm] for arm, name in names.items()}
    return forest(rows, named, "", "", math.nan, share, shown.quantity)


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


def section(shown: Shown, evidence: Evidence, margin: Margin, found: Json, links: Links) -> Markup:
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
        if any(row.pairs for row in shown.rows.values()):
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


def _gap(gap: Json) -> str:
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


def _table(shown: Shown, evidence: Evidence, margin: Margin, found: Json) -> Markup:
    name, arms = shown.block.name, [*shown.block.arms]
    first = Column("arm", True, [_anchored(name, arm) for arm in arms])
    columns = [first, *_columns(shown, arms, evidence, margin, found)]
    return _of_columns(f"Arms of block {name}", columns)


@dataclass(frozen=True)
class Column:
    """A column of a table. words: True if it holds words, False for numbers."""

    head: str
    words: bool
    cells: Sequence[Any]


def _of_columns(caption: str, columns: list[Column]) -> Markup:
    """A table of these columns, without those that are empty."""
    kept = [column for column in columns if any(cell != NOTHING for cell in column.cells)]
    rows = zip(*(column.cells for column in kept), strict=True)
    words = [place for place, column in enumerate(kept) if column.words]
    return html.table(caption, [column.head for column in kept], rows, words)


def _columns(
    shown: Shown, arms: Collection[str], evidence: Evidence, margin: Margin, found: Json
) -> list[Column]:
    """What is known of each of these arms: its values, differences, verdicts and sources."""
    name, rows = shown.block.name, [shown.rows.get(arm) for arm in arms]
    kept = [[*shown.arms.get(arm, {}).values()] for arm in arms]
    better = "less" if shown.lower_is_better else "more"
    several = len({shown.against(arm) for arm in arms} - {""}) > 1
    baseline = [shown.against(row.label) if row and row.pairs else NOTHING for row in rows]
    minus = next((other for other in baseline if other != NOTHING), "")
    return [
        Column(
            f"ours ± std (n): {shown.quantity}, {better} is better",
            False,
            [f"{with_spread(r.mean, r.std)} (n={r.n})" if r else NOTHING for r in rows],
        ),
        Column(
            "difference [95 %] (n pairs)" if several else f"minus {minus} [95 %] (n pairs)",
            False,
            [_difference(row) if row and row.pairs else NOTHING for row in rows],
        ),
        Column("compared with", True, baseline if several else [NOTHING] * len(baseline)),
        Column(
            "gap left open, g [95 %]",
            False,
            [_gap_closed(evidence, shown, row.label, margin) if row else NOTHING for row in rows],
        ),
        Column(
            "verdict",
            True,
            [claims.of_arm(found, name, row.label) if row else "not run" for row in rows],
        ),
        Column("tier", True, ["mini" if row else NOTHING for row in rows]),
        Column("revision", True, [_joined(map(revision, one)) for one in kept]),
        Column("device", True, [html.unbroken(_joined(map(device, one))) for one in kept]),
        Column(
            "source",
            True,
            [
                tag("a", "files", href=f"#{html.slug('files', name, row.label)}")
                if row
                else NOTHING
                for row in rows
            ],
        ),
    ]


def _difference(row: Summary) -> str:
    told = claims.signed(row.difference, row.low, row.high)
    return f"{told} {claims.interval(row.low, row.high)}".removesuffix(" -") + f" (n={row.pairs})"


def _joined(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words)) or NOTHING


def of_table(
    table: Table, blocks: dict[str, Shown], evidence: Evidence, margin: Margin, found: Json
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
    theirs = [papers.get(label, "not available") for label in arms]
    columns = [
        Column("method", True, [*arms]),
        Column(f"paper: {column}" if papers else "paper", False, theirs),
        *_columns(shown, arms.values(), evidence, margin, found),
    ]
    told = "Small models: compare the order of the rows with the paper's, not the numbers. "
    link = tag("a", shown.block.title, href=f"#{html.slug('block', name)}")
    return text(
        _of_columns(f"{table.title}, by block {name}", columns),
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
        return NOTHING
    return f"{g.value:.2f} {claims.interval(g.low, g.high, '.2f')}".removesuffix(" -")


def _curves(shown: Shown) -> Markup:
    """A small figure for each arm: its training loss minus the baseline's, and its flip rate."""
    last = max(k.record["steps"] for seeds in shown.arms.values() for k in seeds.values())
    first = FROM * last
    small = Scale(first, last, 40, 206)
    half, anyone = shown.yardstick, next(iter(shown.arms))
    loss_name = next((n for n in LOSSES if shown.curve(anyone, n)), LOSSES[0])
    base = {arm: shown.against(arm) for arm in shown.arms if shown.against(arm)}
    over = {arm: shown.curve(arm, loss_name, other) for arm, other in base.items()}
    flips = {arm: shown.curve(arm, "flip_rate") for arm in shown.arms}
    parts: list[Any] = [_losses(shown, loss_name, first, last)]
    late = sorted(p.mean for points in over.values() for p in points if p.step > first)
    y = Scale(*_bulk(late), 96, 6)
    log = _flip_scale(flips, first)
    panels = []
    for arm, points in over.items():
        drawn = [("other", over.get(half, []))]
        drawn += [("", points)] if arm != half else []
        loss = curves(f"{arm}: {NAMES[loss_name]}, minus {base[arm]}", drawn, y, small)
        flip = None
        if log is not None and any(p.mean for p in flips[arm]):
            flip = curves(f"{arm}: flip rate", [("", flips[arm])], log, small)
        panels.append(tag("figure", tag("figcaption", tag("strong", arm)), loss, flip))
    other = shown.baseline if {*base.values()} == {shown.baseline} else "the arm compared with"
    more = (
        f"Above: {NAMES[loss_name]}, minus that of {other} at the same seeds, from step "
        f"{first:,.0f} on{f', {half} dashed' * (half in shown.arms)}; all arms share one scale, "
        "and curves are cut off where they leave it. "
        "Below, for arms whose masks change: the fraction of the mask that flips per step, on a "
        "logarithmic scale. Lines are means over seeds, bands ± one standard deviation."
    )
    inside = tag("p", more), tag("div", panels, class_="panels")
    parts.append(html.details(f"Curves of every arm ({len(panels)})", inside, open=True))
    return text(parts)


def _bulk(values: list[float]) -> tuple[float, float]:
    """The ends of an axis for nine tenths of these sorted differences, most of which are not
    negative as a rule."""
    if not any(values):
        return -0.25, 1.0
    last = len(values) - 1
    most = 1.3 * (sorted(map(abs, values))[int(0.9 * last)] or max(map(abs, values)))
    return -most if values[int(0.1 * last)] < -0.25 * most else -0.25 * most, most


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
