"""Collects what the page shows of the blocks: values, differences, what is missing, and tables."""

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from experiments.runs.comparison import Summary
from experiments.runs.stats import excludes_zero, mean, paired_interval
from experiments.support.results import number
from reproduce.execute.blocks import Block, read_block
from reproduce.judge import Json
from reproduce.judge.claims import Claims, Margin
from reproduce.judge.scale import gap_closed
from reproduce.judge.verdicts import differences
from reproduce.records import Evidence, Values
from reproduce.render.report.html import interval

NOTHING = "-"  # a cell without a value
WORDS = ("variant", "compared with", "verdict", "revision", "device", "command")  # no numbers


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
        """The margin's `lower`, with which others are compared, or the first dense one, or ""."""
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
        """The mean and spread of each variant, and its paired difference to its other one."""
        numbers = {
            variant: [number(record, self.metric) for record in seeds.values()]
            for variant, seeds in self.variants.items()
        }
        return {v: Summary.of(v, own, self.by_seed.get(v, [])) for v, own in numbers.items()}

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

    def g(self, variant: str) -> str:
        """The share of the gap between the baselines that a variant loses, with its interval."""
        if math.isfinite(self.gap) and variant in (self.baseline, self.margin.upper):
            return str(int(variant == self.margin.upper))
        g = gap_closed(self.values, self.block.name, variant, self.metric, self.margin, 2)
        if g is None:
            return NOTHING
        return f"{g['value']:.2f} {interval(g['low'], g['high'], '.2f')}".removesuffix(" -")

    def commands(self) -> Iterator[tuple[str, str]]:
        """Yields (variant, command that trains it) for the first seed."""
        for run in replace(self.block, seeds=self.block.seeds[:1]).runs(Path("runs")):
            words = ["python", *(run.command() or [])[1:]]
            yield run.variant, shlex.join(word for word in words if not word.startswith("runs="))

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


def filled(caption: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The arguments of the macro `table` for cells by heading; empty columns are left out."""
    heads = [head for head in rows[0] if any(row[head] not in ("", NOTHING) for row in rows)]
    cells = [[row[head] or NOTHING for head in heads] for row in rows]
    words = [place for place, head in enumerate(heads) if head in WORDS]
    return {"caption": caption, "heads": heads, "rows": cells, "words": words}
