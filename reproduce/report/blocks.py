"""Collects what the page shows of blocks: figures, and tables of variants."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from experiments.runs.comparison import Summary, with_spread
from experiments.runs.curves import NAMES, Point
from reproduce.judge import Json
from reproduce.judge.claims import Margin
from reproduce.judge.scale import gap_closed
from reproduce.judge.verdicts import verdict
from reproduce.records import Evidence, StoredRecord
from reproduce.render.cells import UNKNOWN, published_cell
from reproduce.report.figures import MINUS, Limits, Panel, curves, forest, span
from reproduce.report.gather import Shown
from reproduce.report.html import badge, breakable, interval, signed, slug, unbroken
from reproduce.runner import command
from reproduce.specs.table import TIERS, Table

NOTHING = "-"  # a cell without a value
LOSSES = ("val_loss", "loss")  # the first of them that a block has is drawn
FROM = 0.15  # share of the steps left out, in which all curves fall from the same height
Column = tuple[str, bool, Sequence[Any]]  # heading, whether it has words, cells


@dataclass(frozen=True)
class Variants:
    """A table of variants, without empty columns. block, published: of a paper's table, the
    block that it is made of and whether the paper's values are known."""

    caption: str
    heads: list[str]
    rows: list[tuple[Any, ...]]
    words: list[int]
    block: Any = None
    published: bool = False


def _of_columns(caption: str, columns: list[Column], **given: Any) -> Variants:
    filled = [column for column in columns if any(cell != NOTHING for cell in column[2])]
    heads, words, cells = zip(*filled, strict=True)
    places = [place for place, word in enumerate(words) if word]
    return Variants(caption, [*heads], [*zip(*cells, strict=True)], places, **given)


@dataclass(frozen=True)
class Curves:
    """The figures of a block's curves.

    losses: of the leading variants; None without any. panels: by variant, its loss minus that of
    the variant that it is compared with, and its flip rate. absent: variants that are off the
    scale. quantity, against, first: what is drawn, minus which variant, and from which step on.
    """

    quantity: str
    against: str
    first: float
    losses: Markup | None
    panels: dict[str, Markup]
    absent: list[str]


@dataclass(frozen=True)
class Blocks:
    """The data of the page's templates about blocks, by the records and the verdicts."""

    shown: list[Shown]
    evidence: Evidence
    margin: Margin
    judged: Json

    def difference_figure(self, shown: Shown, variants: Iterable[str]) -> Markup:
        """The figure of the differences of some variants of a block to the baseline, best first. If
        the block compares them with other variants, each label names both."""
        rows = sorted(
            (shown.rows[variant] for variant in variants if shown.rows[variant].pairs),
            key=lambda row: row.difference,
            reverse=not shown.lower_is_better,
        )
        by_seed, share = shown.by_seed, self.margin.share
        if {shown.against(row.label) for row in rows} == {shown.baseline}:
            ends = shown.baseline, shown.half
            return forest(rows, by_seed, *ends, shown.gap, share, shown.quantity)
        names = {row.label: f"{row.label} {MINUS} {shown.against(row.label)}" for row in rows}
        rows = [replace(row, label=names[row.label]) for row in rows]
        named = {name: by_seed[variant] for variant, name in names.items()}
        return forest(rows, named, "", "", math.nan, share, shown.quantity)

    def across(self) -> tuple[list[str], list[list[str]]]:
        """(heads, rows) of the table of g by variant and block, for variants in more than one."""
        known = [s for s in self.shown if math.isfinite(s.gap) and not s.pilot]
        variants = dict.fromkeys(variant for s in known for variant in s.variants)
        rows = [
            [
                variant,
                *(
                    self._gap_closed(s, variant) if variant in s.variants else NOTHING
                    for s in known
                ),
            ]
            for variant in variants
            if sum(variant in s.variants for s in known) > 1
        ]
        return ["variant", *(f"block {s.block.name}, {s.quantity}" for s in known)], rows

    def table_of_variants(self, shown: Shown) -> Variants:
        """The table of a block's variants."""
        variants = [*shown.block.variants]
        template = Markup('<span id="{}">{}</span>')
        name = shown.block.name
        anchored = [
            template.format(slug("variant", name, variant), breakable(variant))
            for variant in variants
        ]
        columns = [("variant", True, anchored), *self._columns(shown, variants)]
        return _of_columns(f"Variants of block {name} ({_made(shown)})", columns)

    def small_models(self, table: Table) -> Variants | None:
        """The rows of a paper's table that have a variant in a block, with the paper's values; None
        if no such variant was run."""
        places = {label: place.split("/") for label, place in table.block_variants.items()}
        blocks = {block for block, _ in places.values()}
        known = [s for s in self.shown if s.block.name in blocks]
        if len(known) != 1 or not any(
            variant in known[0].variants for _, variant in places.values()
        ):
            return None
        (shown,) = known
        column, papers = _published(table)
        theirs = [papers.get(label, UNKNOWN) if papers else NOTHING for label in places]
        columns = [
            ("method", True, [*places]),
            (f"paper: {column}", False, theirs),
            *self._columns(shown, [variant for _, variant in places.values()]),
        ]
        caption = f"{table.title}, by block {shown.block.name} ({_made(shown)})"
        return _of_columns(caption, columns, block=shown.block, published=bool(papers))

    def _columns(self, shown: Shown, variants: Collection[str]) -> list[Column]:
        """The columns on these variants: values, differences, verdicts and links to the records."""
        name, rows = shown.block.name, [shown.rows.get(variant) for variant in variants]
        paired = [row if row and row.pairs else None for row in rows]
        against = [shown.against(row.label) if row else NOTHING for row in paired]
        several = len({shown.against(variant) for variant in variants} - {""}) > 1
        minus = next((other for other in against if other != NOTHING), "")
        better = "less" if shown.lower_is_better else "more"
        ends = unbroken("[95 %]")
        source = Markup('<a href="#{}">files</a>')

        def cells(
            make: Any, of: Sequence[Summary | None] = rows, empty: str = NOTHING
        ) -> list[Any]:
            return [make(row) if row else empty for row in of]

        return [
            (
                f"ours ± std (n): {shown.quantity}, {better} is better",
                False,
                cells(lambda r: f"{with_spread(r.mean, r.std)} (n={r.n})"),
            ),
            (
                f"{'difference' if several else f'minus {minus}'} {ends} (n pairs)",
                False,
                cells(_difference, paired),
            ),
            ("compared with", True, against if several else [NOTHING] * len(against)),
            (
                f"share of the gap, g {ends}",
                False,
                cells(lambda r: self._gap_closed(shown, r.label)),
            ),
            ("verdict", True, cells(lambda r: self._verdicts(name, r.label), empty="not run")),
            ("source", True, cells(lambda r: source.format(slug("files", name, r.label)))),
        ]

    def _verdicts(self, block: str, variant: str) -> Markup:
        """For each claim with contrasts of this variant against others, the verdict on them."""
        link = Markup('{} <a href="#claim-{}">claim {}</a>')
        badges = []
        for claim in self.judged["claims"]:
            own = [c for c in claim["contrasts"] if (c["block"], c["variant"]) == (block, variant)]
            if own:
                found = badge(verdict([c["verdict"] for c in own]))
                badges.append(link.format(found, claim["id"], claim["id"]))
        return Markup(", ").join(badges) if badges else Markup(NOTHING)

    def _gap_closed(self, shown: Shown, variant: str) -> str:
        if math.isfinite(shown.gap) and variant in (shown.baseline, shown.half):
            return str(int(variant == shown.half))
        values, name = self.evidence.values, shown.block.name
        g = gap_closed(values, name, variant, shown.metric, self.margin, 2)
        if g is None:
            return NOTHING
        return f"{g.value:.2f} {interval(g.low, g.high, '.2f')}".removesuffix(" -")


def _difference(row: Summary) -> str:
    difference = signed(row.difference, row.low, row.high)
    return f"{difference} {interval(row.low, row.high)}".removesuffix(" -") + f" (n={row.pairs})"


def _made(shown: Shown) -> str:
    """The tier and the devices of a block's runs."""
    every = (stored for seeds in shown.variants.values() for stored in seeds.values())
    devices = dict.fromkeys(stored.record["environment"]["device"] for stored in every)
    return f"tier mini, on {', '.join(devices)}"


def _published(table: Table) -> tuple[str, dict[str, str]]:
    """(label, values by row) of the first column with published values, for the first variant of
    the smallest tier."""
    variant = table.variants_of(TIERS[0])[0]
    for column in table.columns:
        cells = {row.label: published_cell(table, variant, row, column) for row in table.rows}
        papers = {label: cell.text(column.format) for label, cell in cells.items() if cell}
        if papers:
            size = f", {variant.published}" if variant.published else ""
            return f"{column.label}{size}", papers
    return "", {}


def commands_of(shown: Shown) -> list[tuple[str, str]]:
    """(variant, the command that trains it) for the first seed."""
    runs = Path("runs")  # the drivers' default
    rows = []
    for run in replace(shown.block, seeds=shown.block.seeds[:1]).runs(runs):
        words = ["python", *command(run, runs)[1:]]
        rows.append((run.variant, shlex.join(w for w in words if not w.startswith("runs="))))
    return rows


def revision_of(stored: StoredRecord) -> str:
    """The short git revision of the code that made a record, with + if there were uncommitted
    changes."""
    environment = stored.record["environment"]
    short = (environment["git_revision"] or "unknown")[:7]
    return short + ("+" if environment["git_dirty"] else "")


# ----------------------------------------------------------------------------- curves


def curves_of(shown: Shown) -> Curves:
    """The figures of a block's curves."""
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
    return Curves(NAMES[name], against, first, _losses(shown, name, last), panels, absent)


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
