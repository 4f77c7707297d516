"""Collects what the page shows of the blocks: values, differences, and what is missing."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from experiments.runs.comparison import Summary
from experiments.runs.stats import excludes_zero, mean, paired_interval, std
from experiments.support.results import FILE, number
from reproduce.execute.blocks import Block, read_block
from reproduce.execute.jobs import OUTPUT
from reproduce.execute.processes import last_line
from reproduce.judge import Json
from reproduce.judge.claims import Claims, Margin
from reproduce.judge.scale import GapClosed, gap_closed
from reproduce.judge.verdicts import differences
from reproduce.records import Evidence, StoredRecord, Values


@dataclass(frozen=True)
class Shown:
    """A block with its records.

    metric: what its variants are compared by, a dotted path into a record. variants: the records by
    variant and seed. verdicts: by variant and claim, those on its contrasts with others.
    """

    block: Block
    metric: str
    margin: Margin
    variants: dict[str, dict[int, StoredRecord]]
    verdicts: dict[str, dict[int, list[str]]] = field(default_factory=dict)

    @property
    def half(self) -> str:
        """The variant of half the width, whose difference to the baseline is the gap."""
        return self.margin.upper

    @cached_property
    def baseline(self) -> str:
        """The variant that the others are compared with: the margin's `lower`, or else the first
        dense one; "" without one."""
        dense = [v for v, own in self.block.variants.items() if _method(own) == "dense"]
        return self.margin.lower if self.margin.lower in dense else next(iter(dense), "")

    @property
    def quantity(self) -> str:
        """The last part of `metric`, `val_loss` for example."""
        return self.metric.rpartition(".")[2]

    @property
    def pilot(self) -> bool:
        """True if the block chose settings, so that no claim is judged by it."""
        return self.block.name.startswith("pilot")

    @property
    def lower_is_better(self) -> bool:
        """True for losses and perplexities."""
        return any(word in self.quantity for word in ("loss", "perplexity"))

    def against(self, variant: str) -> str:
        """The variant that this variant is compared with: the one that the block names for it, or
        else the baseline; "" if there is none."""
        other = self.block.against.get(variant, self.baseline)
        return "" if other == variant else other

    @cached_property
    def values(self) -> Values:
        """The contents of its records."""
        return {
            (self.block.name, variant): {seed: stored.record for seed, stored in seeds.items()}
            for variant, seeds in self.variants.items()
        }

    @cached_property
    def by_seed(self) -> dict[str, list[float]]:
        """The differences of each variant to the one it is compared with, as in `claims`."""
        name = self.block.name
        return {
            variant: differences(self.values, name, variant, other, self.metric)
            for variant in self.variants
            if (other := self.against(variant))
        }

    def gap_closed(self, variant: str) -> GapClosed | None:
        """The share of the gap that a variant loses; None if it is not known."""
        name = self.block.name
        return gap_closed(self.values, name, variant, self.metric, self.margin, 2)

    @cached_property
    def rows(self) -> dict[str, Summary]:
        """The mean and the spread of each variant, and its paired difference to the variant that it
        is compared with."""
        rows = {}
        for variant, seeds in self.variants.items():
            numbers = [number(stored.record, self.metric) for stored in seeds.values()]
            row = Summary(variant, len(numbers), mean(numbers), std(numbers))
            if paired := self.by_seed.get(variant):
                low, high = paired_interval(paired)
                row = replace(row, pairs=len(paired), difference=mean(paired), low=low, high=high)
            rows[variant] = row
        return rows

    @property
    def gap(self) -> float:
        """Mean difference of the half-width baseline to the baseline; nan if one of them is
        missing, or if the difference does not differ significantly from zero."""
        own = self.against(self.half) == self.baseline
        found = self.by_seed.get(self.half) if own else None
        return mean(found) if found and excludes_zero(*paired_interval(found)) else math.nan

    @cached_property
    def leading(self) -> list[str]:
        """The variants that represent their methods: the first variant of every method and all
        dense ones, without variants that have a defect of released code."""
        methods = {variant: _method(own) for variant, own in self.block.variants.items()}
        first = {method: variant for variant, method in reversed(methods.items())}
        return [
            variant
            for variant, method in methods.items()
            if variant in self.rows
            and (method == "dense" or first[method] == variant)
            and not method.startswith("released/")
        ]

    @property
    def seed_counts(self) -> list[int]:
        """The numbers of pairs of the leading variants, sorted."""
        return sorted({self.rows[variant].pairs for variant in self.leading} - {0}) or [0]

    @property
    def missing(self) -> dict[str, list[int]]:
        """The seeds without a record, by variant."""
        found = {
            variant: [s for s in self.block.seeds if s not in self.variants.get(variant, {})]
            for variant in self.block.variants
        }
        return {variant: seeds for variant, seeds in found.items() if seeds}

    @property
    def diverged(self) -> list[StoredRecord]:
        """The records whose metric is not finite."""
        every = [stored for seeds in self.variants.values() for stored in seeds.values()]
        return [s for s in every if not math.isfinite(number(s.record, self.metric))]


def _method(overrides: list[str]) -> str:
    named = [o.removeprefix("method=") for o in overrides if o.startswith("method=")]
    return named[-1] if named else ""


def shown_blocks(claims: Claims, evidence: Evidence, judged: Json) -> list[Shown]:
    """Every block that judges a claim or has records; pilots come last. judged: the verdicts."""
    names = {block for block, _ in evidence.kept} | claims.metrics.keys()
    shown = []
    for name in sorted(names, key=lambda name: (name.startswith("pilot"), name)):
        block, verdicts = read_block(name), dict[str, dict[int, list[str]]]()
        for claim in judged["claims"]:
            for c in (c for c in claim["contrasts"] if c["block"] == name):
                of_claim = verdicts.setdefault(c["variant"], {}).setdefault(claim["id"], [])
                of_claim.append(c["verdict"])
        kept = {v: evidence.kept.get((name, v), {}) for v in block.variants}
        there = {v: dict(sorted(seeds.items())) for v, seeds in kept.items() if seeds}
        metric = claims.metrics.get(name, "metrics.val_loss")
        shown.append(Shown(block, metric, claims.margin, there, verdicts))
    return shown


def unfinished(runs: Path) -> list[tuple[Path, str]]:
    """(output, its last line) of one's own runs that were started but have no result."""
    logs = sorted(runs.glob(f"*/*/*/{OUTPUT}"))
    return [(log, last_line(log)) for log in logs if not log.with_name(FILE).is_file()]
