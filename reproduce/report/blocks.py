"""Makes the page's sections on blocks: differences, tables of arms, commands and files."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.runs.comparison import Summary, with_spread
from experiments.runs.curves import NAMES
from experiments.runs.stats import excludes_zero
from reproduce import scale
from reproduce.cells import UNKNOWN, published_cell
from reproduce.claims import Margin
from reproduce.records import Evidence, StoredRecord
from reproduce.report import claims, html
from reproduce.report.block_curves import curves_of
from reproduce.report.figures import forest
from reproduce.report.gather import Shown
from reproduce.report.html import Markup, tag, text
from reproduce.report.links import Links
from reproduce.runner import command
from reproduce.spec import TIERS, Table
from reproduce.verdict_text import Json

ENDS = html.unbroken("[95 %]")  # the heading of an interval
NOTHING = "-"  # a cell without a value


def difference_figure(shown: Shown, arms: Iterable[str], share: float) -> Markup:
    """The figure of the differences of some arms of a block to the baseline, best first. If the
    block compares them with other arms, each label names both."""
    rows = sorted(
        (shown.rows[arm] for arm in arms if shown.rows[arm].pairs),
        key=lambda row: row.difference,
        reverse=not shown.lower_is_better,
    )
    by_seed = shown.by_seed
    if {shown.against(row.label) for row in rows} == {shown.baseline}:
        ends = shown.baseline, shown.yardstick
        return forest(rows, by_seed, *ends, shown.gap, share, shown.quantity)
    names = {row.label: f"{row.label} {html.MINUS} {shown.against(row.label)}" for row in rows}
    rows = [replace(row, label=names[row.label]) for row in rows]
    named = {name: by_seed[arm] for arm, name in names.items()}
    return forest(rows, named, "", "", math.nan, share, shown.quantity)


def across(blocks: list[Shown], evidence: Evidence, margin: Margin) -> Markup | None:
    """The table of g by arm and block; None if no arm is in two blocks."""
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
        tag("p", "g is the distance of an arm from dense as a fraction of that of the half-width "
                 "model: 0 is as good as dense, 1 as bad as half the width. Unlike losses, it can "
                 "be compared between models of different size."),
        html.table("Share of the gap from dense to half, g [95 %], by block", heads, rows),
    )  # fmt: skip


def section(shown: Shown, evidence: Evidence, margin: Margin, judged: Json, links: Links) -> Markup:
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
    parts += [tag("p", _gap(gap)) for gap in judged["blocks"] if gap["block"] == name]
    parts.append(
        tag("p", "“The command of every row”, further down, shows how each arm was trained.")
    )
    parts.append(_table(shown, evidence, margin, judged))
    if kind != "pilot":
        if any(row.pairs for row in shown.rows.values()):
            caption = (
                f"All arms of block {name}, best first; an arrow marks a value beyond the axis"
            )
            drawn = difference_figure(shown, shown.rows, margin.share)
            parts.append(html.details(caption, tag("figure", drawn), open=True))
            parts.append(curves_of(shown))
        parts.append(_notes(shown))
    if done < total:
        parts.append(tag("p", f"To make the {total - done} missing runs:"))
        parts.append(html.command(_run(name)))
    parts.append(_commands(shown))
    parts.append(_files(shown, links))
    return tag("section", parts)


def _gap(gap: Json) -> str:
    """Sentences on what half the width costs, in standard deviations of that difference."""
    quantity = gap["metric"].rpartition(".")[2]
    met = "has" if gap["ratio"] >= scale.ENOUGH else "does not have"
    sentences = [
        f"{gap['upper']} minus {gap['lower']} is {claims.signed(gap['gap'])} "
        f"{claims.interval(gap['low'], gap['high'])} ({NAMES.get(quantity, quantity)}), which is "
        f"{gap['ratio']:.1f} times its standard deviation over {gap['n']} seeds.",
        f"To rank methods, a block should have at least {scale.ENOUGH:g} times, which this one "
        f"{met}.",
    ]
    if gap["other_arms"]:
        sentences.append(
            f"It is {gap['other_ratio']:.1f} times the median standard deviation of the other "
            "arms' differences."
        )
    sentences.append(
        f"In the table, g is the difference of an arm from {gap['lower']} divided by this one."
        if excludes_zero(gap["low"], gap["high"])
        else "It may be zero, so differences of arms are not given as fractions of it."
    )
    return " ".join(sentences)


def _run(name: str) -> str:
    return f"python -m reproduce run {name}"


def _table(shown: Shown, evidence: Evidence, margin: Margin, judged: Json) -> Markup:
    name, arms = shown.block.name, [*shown.block.arms]
    first = Column("arm", True, [_anchored(name, arm) for arm in arms])
    columns = [first, *_columns(shown, arms, evidence, margin, judged)]
    return _of_columns(f"Arms of block {name} ({_made(shown)})", columns)


@dataclass(frozen=True)
class Column:
    """A column of a table. words: True for a column of words, False for numbers."""

    head: str
    words: bool
    cells: Sequence[Any]


def _of_columns(caption: str, columns: list[Column]) -> Markup:
    """A table of these columns without those that are empty."""
    filled = [column for column in columns if any(cell != NOTHING for cell in column.cells)]
    rows = zip(*(column.cells for column in filled), strict=True)
    words = [place for place, column in enumerate(filled) if column.words]
    return html.table(caption, [column.head for column in filled], rows, words)


def _columns(
    shown: Shown, arms: Collection[str], evidence: Evidence, margin: Margin, judged: Json
) -> list[Column]:
    """The columns on these arms: values, differences, verdicts and links to the records."""
    name, rows = shown.block.name, [shown.rows.get(arm) for arm in arms]
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
            f"{'difference' if several else f'minus {minus}'} {ENDS} (n pairs)",
            False,
            [_difference(row) if row and row.pairs else NOTHING for row in rows],
        ),
        Column("compared with", True, baseline if several else [NOTHING] * len(baseline)),
        Column(
            f"share of the gap, g {ENDS}",
            False,
            [_gap_closed(evidence, shown, row.label, margin) if row else NOTHING for row in rows],
        ),
        Column(
            "verdict",
            True,
            [claims.of_arm(judged, name, row.label) if row else "not run" for row in rows],
        ),
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
    difference = claims.signed(row.difference, row.low, row.high)
    interval = claims.interval(row.low, row.high)
    return f"{difference} {interval}".removesuffix(" -") + f" (n={row.pairs})"


def _made(shown: Shown) -> str:
    """The tier and the devices of a block's runs."""
    devices = dict.fromkeys(device(one) for seeds in shown.arms.values() for one in seeds.values())
    return f"tier mini, on {', '.join(devices)}"


def of_table(
    table: Table, blocks: dict[str, Shown], evidence: Evidence, margin: Margin, judged: Json
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
    columns = [Column("method", True, [*arms])]
    advice = "Small models: compare the order of the rows with the paper's, not the numbers. "
    if papers:
        theirs = [papers.get(label, UNKNOWN) for label in arms]
        columns.append(Column(f"paper: {column}", False, theirs))
    else:
        advice = "The paper's values are not available. The small models are those of "
    columns += _columns(shown, arms.values(), evidence, margin, judged)
    link = tag("a", shown.block.title, href=f"#{html.slug('block', name)}")
    return text(
        _of_columns(f"{table.title}, by block {name} ({_made(shown)})", columns),
        tag("p", advice, link, "."),
    )


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


def _anchored(block: str, arm: str) -> Markup:
    return tag("span", html.name(arm), id=html.slug("arm", block, arm))


def _gap_closed(evidence: Evidence, shown: Shown, arm: str, margin: Margin) -> str:
    if math.isfinite(shown.gap) and arm in (shown.baseline, shown.yardstick):
        return str(int(arm == shown.yardstick))
    g = scale.gap_closed(evidence.values, shown.block.name, arm, shown.metric, margin, 2)
    if g is None:
        return NOTHING
    return f"{g.value:.2f} {claims.interval(g.low, g.high, '.2f')}".removesuffix(" -")


def _notes(shown: Shown) -> Markup:
    return tag("ul", [tag("li", note.strip()) for note in shown.block.notes])


def _commands(shown: Shown) -> Markup:
    """The list of the commands that train each arm."""
    runs = Path("runs")  # the drivers' default
    rows = []
    for run in replace(shown.block, seeds=shown.block.seeds[:1]).runs(runs):
        words = ["python", *command(run, runs)[1:]]
        line = shlex.join(word for word in words if not word.startswith("runs="))
        rows.append([run.arm, tag("code", line)])
    explanation = f"These are for seed {shown.block.seeds[0]}; change seed= for the others."
    if shown.block.source is not None:
        source = shown.block.source.block.name
        explanation += f" Each starts from a finished run of block {source} (init=)."
    return html.details(
        "The command of every row",
        tag("p", explanation),
        html.table(f"Commands of block {shown.block.name}", ["arm", "command"], rows, words=(0, 1)),
    )


def _files(shown: Shown, links: Links) -> Markup:
    parts = []
    for arm, seeds in shown.arms.items():
        rows = []
        for seed, stored in seeds.items():
            record = stored.record
            value = record["metrics"].get(shown.quantity)
            rows.append(
                [
                    links.to(stored.path),
                    seed,
                    "not finite" if value is None else f"{value:.6f}",
                    revision(stored),
                    html.unbroken(device(stored)),
                    record["config_hash"],
                ]
            )
        heads = ["file", "seed", shown.quantity, "revision", "device", "config"]
        drawn = html.table(f"Records of {arm}", heads, rows, words=(0, 3, 4, 5))
        parts.append(tag("div", drawn, id=html.slug("files", shown.block.name, arm)))
    return html.details(f"The files behind every number of {shown.block.name}", parts)


def device(stored: StoredRecord) -> str:
    """The device on which the run of a record was made."""
    return stored.record["environment"]["device"]


def revision(stored: StoredRecord) -> str:
    """The short git revision of the code that made a record, with + if there were uncommitted
    changes."""
    environment = stored.record["environment"]
    short = (environment["git_revision"] or "unknown")[:7]
    return short + ("+" if environment["git_dirty"] else "")
