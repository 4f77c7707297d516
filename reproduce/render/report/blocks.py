"""Collects what the page shows of the blocks: values, differences, what is missing, and tables."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from markupsafe import Markup

from experiments.runs.comparison import Summary, with_spread
from experiments.runs.stats import excludes_zero, mean, paired_interval, std
from experiments.support.results import number
from reproduce.execute.blocks import Block, read_block
from reproduce.judge import Json
from reproduce.judge.claims import Claims, Margin
from reproduce.judge.scale import gap_closed
from reproduce.judge.verdicts import differences, verdict
from reproduce.records import Evidence, Values
from reproduce.render.report.html import badge, interval, signed, slug

NOTHING = "-"  # a cell without a value
WORDS = ("variant", "compared with", "verdict", "revision", "device", "command")  # no numbers
Table = dict[str, Any]  # the arguments of the macro of this name


@dataclass(frozen=True)
class Shown:
    """A block with its records."""

    block: Block
    metric: str  # what its variants are compared by, a dotted path into a record
    margin: Margin  # `upper`, half the width, differs from the baseline by the gap
    variants: dict[str, dict[int, Json]]  # the records by variant and seed
    # By variant and claim, those on its contrasts with others.
    verdicts: dict[str, dict[int, list[str]]]

    @cached_property
    def methods(self) -> dict[str, str]:
        """The method of each variant."""
        variants = self.block.variants.items()
        given = {variant: dict(o.split("=", 1) for o in own) for variant, own in variants}
        return {variant: chosen.get("method", "") for variant, chosen in given.items()}

    @cached_property
    def baseline(self) -> str:
        """The variant that the others are compared with: the margin's `lower`, or else the first
        dense one; "" without one."""
        dense = [variant for variant, method in self.methods.items() if method == "dense"]
        return self.margin.lower if self.margin.lower in dense else next(iter(dense), "")

    @property
    def quantity(self) -> str:
        """The last part of `metric`, `val_loss` for example."""
        return self.metric.rpartition(".")[2]

    @property
    def pilot(self) -> bool:
        """True if the block chose settings, so that no claim is judged by it."""
        return self.block.name.startswith("pilot")

    def against(self, variant: str) -> str:
        """The variant that this variant is compared with: the one that the block names for it, or
        else the baseline; "" if there is none."""
        other = self.block.against.get(variant, self.baseline)
        return "" if other == variant else other

    @property
    def values(self) -> Values:
        """Its records by block and variant."""
        return {(self.block.name, variant): seeds for variant, seeds in self.variants.items()}

    @cached_property
    def by_seed(self) -> dict[str, list[float]]:
        """The differences of each variant to the one it is compared with, as in `claims`."""
        return {
            variant: differences(self.values, self.block.name, variant, other, self.metric)
            for variant in self.variants
            if (other := self.against(variant))
        }

    @cached_property
    def rows(self) -> dict[str, Summary]:
        """The mean and the spread of each variant, and its paired difference to the variant that it
        is compared with."""
        rows = {}
        for variant, seeds in self.variants.items():
            numbers = [number(record, self.metric) for record in seeds.values()]
            row = Summary(variant, len(numbers), mean(numbers), std(numbers))
            if paired := self.by_seed.get(variant):
                low, high = paired_interval(paired)
                row = replace(row, pairs=len(paired), difference=mean(paired), low=low, high=high)
            rows[variant] = row
        return rows

    @cached_property
    def gap(self) -> float:
        """Mean difference of the half-width baseline to the baseline; nan if one of them is
        missing, or if the difference does not differ significantly from zero."""
        half = self.margin.upper
        found = self.by_seed.get(half) if self.against(half) == self.baseline else None
        return mean(found) if found and excludes_zero(*paired_interval(found)) else math.nan

    @cached_property
    def leading(self) -> list[str]:
        """The variants that represent their methods: the first variant of every method and all
        dense ones, without variants that have a defect of released code."""
        first = {method: variant for variant, method in reversed(self.methods.items())}
        return [
            variant
            for variant, method in self.methods.items()
            if variant in self.rows
            and (method == "dense" or first[method] == variant)
            and not method.startswith("released/")
        ]

    @property
    def missing(self) -> int:
        """The number of its runs without a record."""
        runs = len(self.block.variants) * len(self.block.seeds)
        return runs - sum(map(len, self.variants.values()))

    @property
    def paths(self) -> list[Path]:
        """The files of its records."""
        records = (record for seeds in self.variants.values() for record in seeds.values())
        return list(dict.fromkeys(record["file"] for record in records))


def shown_blocks(claims: Claims, evidence: Evidence, judged: Json) -> list[Shown]:
    """Every block that judges a claim or has records; pilots come last. judged: the verdicts."""
    names = {block for block, _ in evidence.values} | claims.metrics.keys()
    shown = []
    for name in sorted(names, key=lambda name: (name.startswith("pilot"), name)):
        block, verdicts = read_block(name), dict[str, dict[int, list[str]]]()
        for claim in judged["claims"]:
            for c in (c for c in claim["contrasts"] if c["block"] == name):
                of_claim = verdicts.setdefault(c["variant"], {}).setdefault(claim["id"], [])
                of_claim.append(c["verdict"])
        kept = {v: evidence.values.get((name, v), {}) for v in block.variants}
        there = {v: dict(sorted(seeds.items())) for v, seeds in kept.items() if seeds}
        metric = claims.metrics.get(name, "metrics.val_loss")
        shown.append(Shown(block, metric, claims.margin, there, verdicts))
    return shown


# --- tables --------------------------------------------------------------------------------------


def _table(caption: str, rows: list[dict[str, Any]]) -> Table:
    """A table of cells by the heading of their column; a column without a value is left out."""
    heads = [head for head in rows[0] if any(row[head] not in ("", NOTHING) for row in rows)]
    cells = [[row[head] or NOTHING for head in heads] for row in rows]
    words = [place for place, head in enumerate(heads) if head in WORDS]
    return {"caption": caption, "heads": heads, "rows": cells, "words": words}


def table_of_variants(shown: Shown) -> Table:
    """Values, differences and verdicts of a block's variants."""
    several = len({shown.against(variant) for variant in shown.block.variants} - {""}) > 1
    minus = "difference" if several else f"minus {shown.baseline}"
    link = Markup('{} <a href="#claim-{}">claim {}</a>')
    anchor, rows = Markup('<span id="{}">{}</span>'), []
    for variant in shown.block.variants:
        row, difference, verdicts = shown.rows.get(variant), "", Markup("not run")
        if row is not None:
            verdicts = Markup(", ").join(
                link.format(badge(verdict(words)), claim, claim)
                for claim, words in shown.verdicts.get(variant, {}).items()
            )
        if row is not None and row.pairs:
            ends = interval(row.low, row.high).removesuffix(NOTHING)
            difference = f"{signed(row.difference, row.low, row.high)} {ends}".rstrip()
            difference += f" (n={row.pairs})"
        rows.append({
            "variant": anchor.format(slug("variant", shown.block.name, variant), variant),
            f"{shown.quantity} ± std (n)": row and f"{with_spread(row.mean, row.std)} (n={row.n})",
            f"{minus} [95 %] (n pairs)": difference,
            "compared with": shown.against(variant) * (several and bool(difference)),
            "share of the gap, g [95 %]": _g(shown, variant) if row else "",
            "verdict": verdicts,
        })  # fmt: skip
    return _table(f"Variants of block {shown.block.name}", rows)


def _g(shown: Shown, variant: str) -> str:
    """The share of the gap between the baselines that a variant loses, with its interval."""
    if math.isfinite(shown.gap) and variant in (shown.baseline, shown.margin.upper):
        return str(int(variant == shown.margin.upper))
    g = gap_closed(shown.values, shown.block.name, variant, shown.metric, shown.margin, 2)
    if g is None:
        return NOTHING
    return f"{g.value:.2f} {interval(g.low, g.high, '.2f')}".removesuffix(" -")


def table_of_seeds(shown: Shown) -> Table:
    """The value of every run of a block, and the code and devices that made them."""
    rows = []
    for variant, seeds in shown.variants.items():
        values = {seed: r["metrics"][shown.quantity] for seed, r in seeds.items()}
        numbers = {seed: "not finite" if v is None else f"{v:.6f}" for seed, v in values.items()}
        made = [record["environment"] for record in seeds.values()]
        code = [(e["git_revision"] or "unknown")[:7] + "+" * bool(e["git_dirty"]) for e in made]
        row = {"variant": variant}
        row |= {f"seed {seed}": numbers.get(seed, NOTHING) for seed in shown.block.seeds}
        row["revision"] = ", ".join(dict.fromkeys(code))
        rows.append(row | {"device": ", ".join(dict.fromkeys(e["device"] for e in made))})
    return _table(f"{shown.quantity} of block {shown.block.name} by seed", rows)


def table_of_commands(shown: Shown) -> Table:
    """The command that trains each variant of a block, for the first seed."""
    code, rows = Markup("<code>{}</code>"), []
    for run in replace(shown.block, seeds=shown.block.seeds[:1]).runs(Path("runs")):
        words = ["python", *(run.job.command() or [])[1:]]
        line = shlex.join(word for word in words if not word.startswith("runs="))
        rows.append({"variant": run.variant, "command": code.format(line)})
    return _table(f"Commands of block {shown.block.name}", rows)
