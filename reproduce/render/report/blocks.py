"""Makes the main figure and the tables of blocks for the page."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from experiments.runs.comparison import with_spread
from reproduce.judge.verdicts import verdict
from reproduce.records import StoredRecord
from reproduce.render.report.figures import forest
from reproduce.render.report.gather import Shown
from reproduce.render.report.html import badge, breakable, interval, signed, slug, unbroken

NOTHING = "-"  # a cell without a value
WORDS = ("variant", "compared with", "verdict", "source")  # columns that have no numbers
Cells = dict[str, Any]  # those of a row that have a value, by the heading of their column


def difference_figure(shown: Shown) -> Markup:
    """The figure of the differences of a block's leading variants to the baseline, best first."""
    rows = sorted(
        (shown.rows[variant] for variant in shown.leading if shown.rows[variant].pairs),
        key=lambda row: row.difference,
        reverse=not shown.lower_is_better,
    )
    ends = shown.baseline, shown.half
    return forest(rows, shown.by_seed, *ends, shown.gap, shown.margin.share, shown.quantity)


# ----------------------------------------------------------------------------- tables


def table_of_variants(shown: Shown) -> dict[str, Any]:
    """The table of a block's variants."""
    variants, name = [*shown.block.variants], shown.block.name
    anchor = Markup('<span id="{}">{}</span>')
    heads, rows = _rows(shown, variants)
    for variant, row in zip(variants, rows, strict=True):
        row["variant"] = anchor.format(slug("variant", name, variant), breakable(variant))
    return _table(f"Variants of block {name} ({_made(shown)})", ["variant", *heads], rows)


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
