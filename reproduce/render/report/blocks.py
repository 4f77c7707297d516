"""Makes the figures and tables of blocks for the page."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from experiments.runs.comparison import with_spread
from experiments.runs.curves import NAMES, Point
from reproduce.judge.verdicts import verdict
from reproduce.records import StoredRecord
from reproduce.render.cells import UNKNOWN, published_cell
from reproduce.render.report.figures import MINUS, Limits, Panel, curves, forest, span
from reproduce.render.report.gather import Shown
from reproduce.render.report.html import badge, breakable, interval, signed, slug, unbroken
from reproduce.specs.table import TIERS, Table

NOTHING = "-"  # a cell without a value
WORDS = ("variant", "method", "compared with", "verdict", "source")  # columns that have no numbers
LOSSES = ("val_loss", "loss")  # the first of them that a block has is drawn
FROM = 0.15  # share of the steps left out, in which all curves fall from the same height
Cells = dict[str, Any]  # those of a row that have a value, by the heading of their column


def difference_figure(shown: Shown, variants: Iterable[str]) -> Markup:
    """The figure of the differences of some variants of a block to the baseline, best first. If the
    block compares them with other variants, each label names both."""
    rows = sorted(
        (shown.rows[variant] for variant in variants if shown.rows[variant].pairs),
        key=lambda row: row.difference,
        reverse=not shown.lower_is_better,
    )
    by_seed, share = shown.by_seed, shown.margin.share
    if {shown.against(row.label) for row in rows} == {shown.baseline}:
        ends = shown.baseline, shown.half
        return forest(rows, by_seed, *ends, shown.gap, share, shown.quantity)
    names = {row.label: f"{row.label} {MINUS} {shown.against(row.label)}" for row in rows}
    rows = [replace(row, label=names[row.label]) for row in rows]
    named = {name: by_seed[variant] for variant, name in names.items()}
    return forest(rows, named, "", "", math.nan, share, shown.quantity)


# ----------------------------------------------------------------------------- tables


def across(shown: Sequence[Shown]) -> dict[str, Any]:
    """The table of g by variant and block, for variants in more than one."""
    known = {f"block {s.block.name}, {s.quantity}": s for s in shown if math.isfinite(s.gap)}
    known = {head: s for head, s in known.items() if not s.pilot}
    rows = [
        {"variant": name} | {head: _g(s, name) for head, s in known.items() if name in s.variants}
        for name in dict.fromkeys(name for s in known.values() for name in s.variants)
    ]
    caption = "Share of the gap from dense to half, g [95 %], by block"
    return _table(caption, ["variant", *known], [row for row in rows if len(row) > 2])


def table_of_variants(shown: Shown) -> dict[str, Any]:
    """The table of a block's variants."""
    variants, name = [*shown.block.variants], shown.block.name
    anchor = Markup('<span id="{}">{}</span>')
    heads, rows = _rows(shown, variants)
    for variant, row in zip(variants, rows, strict=True):
        row["variant"] = anchor.format(slug("variant", name, variant), breakable(variant))
    return _table(f"Variants of block {name} ({_made(shown)})", ["variant", *heads], rows)


def small_models(shown: Sequence[Shown], table: Table) -> dict[str, Any] | None:
    """The rows of a paper's table that have a variant in a block, with the paper's values; None if
    no such variant was run. block, published: the block, and whether those values are known."""
    places = {label: place.split("/") for label, place in table.block_variants.items()}
    blocks = {block for block, _ in places.values()}
    known = [s for s in shown if s.block.name in blocks]
    if len(known) != 1 or not any(v in known[0].variants for _, v in places.values()):
        return None
    (one,) = known
    column, papers = _published(table)
    heads, rows = _rows(one, [variant for _, variant in places.values()])
    for label, row in zip(places, rows, strict=True):
        row |= {"method": label} | ({column: papers.get(label, UNKNOWN)} if papers else {})
    caption = f"{table.title}, by block {one.block.name} ({_made(one)})"
    found = _table(caption, ["method", column, *heads], rows)
    return found | {"block": one.block, "published": bool(papers)}


def _table(caption: str, heads: list[str], rows: list[Cells]) -> dict[str, Any]:
    """A table for the macro of this name, without empty columns."""
    heads = [head for head in heads if any(head in row for row in rows)]
    cells = [[row.get(head, NOTHING) for head in heads] for row in rows]
    words = [place for place, head in enumerate(heads) if head in WORDS]
    return {"caption": caption, "heads": heads, "rows": cells, "words": words}


def _rows(shown: Shown, variants: Collection[str]) -> tuple[list[str], list[Cells]]:
    """(headings, rows) on these variants: values, differences, verdicts and links to records."""
    several = len({shown.against(variant) for variant in variants} - {""}) > 1
    paired = [v for v in variants if (row := shown.rows.get(v)) and row.pairs]
    minus = next(map(shown.against, paired), "")
    better, ends = "less" if shown.lower_is_better else "more", unbroken("[95 %]")
    heads = [
        f"ours ± std (n): {shown.quantity}, {better} is better",
        f"{'difference' if several else f'minus {minus}'} {ends} (n pairs)",
        "compared with",
        f"share of the gap, g {ends}",
        "verdict",
        "source",
    ]
    link = Markup('{} <a href="#claim-{}">claim {}</a>')
    source, rows = Markup('<a href="#{}">files</a>'), []
    for variant in variants:
        row = shown.rows.get(variant)
        if row is None:
            rows.append({"verdict": "not run"})
            continue
        difference, against = "", ""
        if row.pairs:
            bounds = interval(row.low, row.high).removesuffix("-")
            difference = f"{signed(row.difference, row.low, row.high)} {bounds}".rstrip()
            difference += f" (n={row.pairs})"
            against = shown.against(variant) if several else ""
        verdicts = Markup(", ").join(
            link.format(badge(verdict(words)), claim, claim)
            for claim, words in shown.verdicts.get(variant, {}).items()
        )
        cells = [
            f"{with_spread(row.mean, row.std)} (n={row.n})",
            *(difference, against, _g(shown, variant), verdicts),
            source.format(slug("files", shown.block.name, variant)),
        ]
        filled = zip(heads, cells, strict=True)
        rows.append({head: cell for head, cell in filled if cell not in ("", NOTHING)})
    return heads, rows


def _g(shown: Shown, variant: str) -> str:
    """The share of the gap between the baselines that a variant loses, with its interval."""
    if math.isfinite(shown.gap) and variant in (shown.baseline, shown.half):
        return str(int(variant == shown.half))
    g = shown.gap_closed(variant)
    if g is None:
        return NOTHING
    return f"{g.value:.2f} {interval(g.low, g.high, '.2f')}".removesuffix(" -")


def _made(shown: Shown) -> str:
    """The tier and the devices of a block's runs."""
    every = (stored for seeds in shown.variants.values() for stored in seeds.values())
    devices = dict.fromkeys(stored.record["environment"]["device"] for stored in every)
    return f"tier mini, on {', '.join(devices)}"


def _published(table: Table) -> tuple[str, dict[str, str]]:
    """(heading, values by row) of the first column with published values, for the first variant of
    the smallest tier."""
    variant = table.variants_of(TIERS[0])[0]
    for column in table.columns:
        cells = {row.label: published_cell(table, variant, row, column) for row in table.rows}
        papers = {label: cell.text(column.format) for label, cell in cells.items() if cell}
        if papers:
            size = f", {variant.published}" if variant.published else ""
            return f"paper: {column.label}{size}", papers
    return "", {}


def commands_of(shown: Shown) -> list[tuple[str, str]]:
    """(variant, the command that trains it) for the first seed."""
    runs = Path("runs")  # the drivers' default
    rows = []
    for run in replace(shown.block, seeds=shown.block.seeds[:1]).runs(runs):
        words = ["python", *(run.job.command() or [])[1:]]
        rows.append((run.variant, shlex.join(w for w in words if not w.startswith("runs="))))
    return rows


def revision_of(stored: StoredRecord) -> str:
    """The short git revision of the code that made a record, with + if there were uncommitted
    changes."""
    environment = stored.record["environment"]
    short = (environment["git_revision"] or "unknown")[:7]
    return short + ("+" if environment["git_dirty"] else "")


# ----------------------------------------------------------------------------- curves


def curves_of(shown: Shown) -> dict[str, Any]:
    """The figures of a block's curves.

    losses: of the leading variants; None without any. panels: by variant, its loss minus that of
    the variant that it is compared with, and its flip rate. absent: variants that are off the
    scale. quantity, against, first: what is drawn, minus which variant, and from which step on.
    """
    last = max(k.record["steps"] for seeds in shown.variants.values() for k in seeds.values())
    first, half, anyone = FROM * last, shown.half, next(iter(shown.variants))
    name = next((n for n in LOSSES if shown.curve(anyone, n)), LOSSES[0])
    base = {variant: shown.against(variant) for variant in shown.variants if shown.against(variant)}
    over = {variant: shown.curve(variant, name, other) for variant, other in base.items()}
    flips = {variant: shown.curve(variant, "flip_rate") for variant in shown.variants}
    y = _bulk(sorted(p.mean for points in over.values() for p in points if p.step > first))
    rates = [p.mean for points in flips.values() for p in points if p.step >= first and p.mean > 0]
    log = _decades(rates) if rates else None
    panels, absent = {}, []
    for variant, points in over.items():
        if not any(p.step > first and y[0] <= p.mean <= y[1] for p in points):
            absent.append(variant)
            continue
        lines: list[tuple[str | int, Sequence[Point]]] = [("other", over.get(half, []))]
        lines += [(0, points)] if variant != half else []
        drawn = [Panel(f"{variant}: {NAMES[name]}, minus {base[variant]}", lines, y)]
        if log is not None and any(p.mean for p in flips[variant]):
            drawn.append(Panel(f"{variant}: flip rate", [(0, flips[variant])], log, log=True))
        panels[variant] = curves(drawn, (first, last))
    one = {*base.values()} == {shown.baseline}
    against = shown.baseline if one else "the variant compared with"
    found = {"quantity": NAMES[name], "against": against, "first": first, "absent": absent}
    return found | {"losses": _losses(shown, name, last), "panels": panels}


def _bulk(values: list[float]) -> Limits:
    """The ends of an axis for about nine tenths of these sorted differences. Most are usually
    positive, so the axis reaches less far below 0 unless many are negative."""
    if not any(values):
        return -0.25, 1.0
    last = len(values) - 1
    most = 1.3 * (sorted(map(abs, values))[int(0.9 * last)] or max(map(abs, values)))
    return -most if values[int(0.1 * last)] < -0.25 * most else -0.25 * most, most


def _decades(rates: list[float]) -> Limits:
    """The ends of a logarithmic axis for these rates."""
    low, high = math.log10(max(min(rates), 1e-6)), math.log10(max(rates))
    return 10.0 ** math.floor(low), 10.0 ** math.ceil(high)


def _losses(shown: Shown, quantity: str, last: float) -> Markup | None:
    """The figure of losses in absolute terms, in the second half of the steps: dense, half the
    width and the leading methods."""
    names = [variant for variant in shown.leading if variant not in (shown.baseline, shown.half)]
    looks: list[tuple[str | int, str]] = [*enumerate(names)]
    looks += [("other", shown.half), ("base", shown.baseline)]
    lines = [(look, shown.curve(variant, quantity)) for look, variant in looks]
    inside = [p.mean for _, points in lines for p in points if p.step >= last / 2]
    if not inside:
        return None
    panel = Panel(f"{NAMES[quantity]} of the leading variants", lines, span(inside))
    return curves([panel], (last / 2, last), named=True)
