"""Collects what the page shows of the blocks and of one's own runs: values, differences, curves,
and what is missing."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from experiments.runs import comparison
from experiments.runs.comparison import Summary
from experiments.runs.curves import Point
from experiments.runs.stats import excludes_zero, mean, paired_interval, std
from experiments.support.errors import UserError, one_line
from experiments.support.results import FILE, number
from reproduce.blocks import BLOCKS, Block, read_block
from reproduce.execute.processes import last_line
from reproduce.judge.claims import Claims
from reproduce.judge.verdicts import differences
from reproduce.packed import run_name
from reproduce.records import Evidence, StoredRecord


@dataclass(frozen=True)
class Shown:
    """A block with its records.

    metric: what its variants are compared by, a dotted path into a record. baseline, half: the
    variants whose difference is the gap; "" without one. variants: the records by variant and seed.
    """

    block: Block
    metric: str
    baseline: str
    half: str
    variants: dict[str, dict[int, StoredRecord]]

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
    def by_seed(self) -> dict[str, list[float]]:
        """The differences of each variant to the one it is compared with, as in `claims`."""
        name = self.block.name
        values = {
            (name, variant): {seed: stored.record for seed, stored in seeds.items()}
            for variant, seeds in self.variants.items()
        }
        return {
            variant: differences(values, name, variant, self.against(variant), self.metric)
            for variant in self.variants
            if self.against(variant)
        }

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

    def curve(self, variant: str, quantity: str, minus: str | None = None) -> list[Point]:
        """The curve of a quantity as a mean over a variant's seeds; with `minus`, of the difference
        to that variant at the same seeds."""
        found: dict[int, list[float]] = {}
        for seed, kept in self.variants.get(variant, {}).items():
            other: dict[int, float] | None = None
            if minus is not None:
                if seed not in self.variants.get(minus, {}):
                    continue
                other = dict(self.variants[minus][seed].record["curves"].get(quantity, []))
            for step, value in kept.record["curves"].get(quantity, []):
                if step > 0 and (other is None or step in other):
                    found.setdefault(step, []).append(value - (other[step] if other else 0.0))
        return [
            Point(quantity, variant, step, mean(v), std(v) if len(v) > 1 else None, len(v))
            for step, v in sorted(found.items())
        ]


def _method(overrides: list[str]) -> str:
    named = [o.removeprefix("method=") for o in overrides if o.startswith("method=")]
    return named[-1] if named else ""


def shown_blocks(claims: Claims, evidence: Evidence, folder: Path = BLOCKS) -> list[Shown]:
    """Every block that judges a claim or has records; pilots come last."""
    asked = {contrast.block for claim in claims.claims for contrast in claim.contrasts}
    names = {block for block, _ in evidence.kept} | {
        path.stem for path in folder.glob("*.yaml") if path.stem in asked
    }
    shown = []
    for name in sorted(names, key=lambda name: (name.startswith("pilot"), name)):
        block = read_block(name, folder)
        metrics = Counter(
            c.metric for claim in claims.claims for c in claim.contrasts if c.block == name
        )
        metric = metrics.most_common(1)[0][0] if metrics else "metrics.val_loss"
        variants = {variant: evidence.kept.get((name, variant), {}) for variant in block.variants}
        there = {
            variant: dict(sorted(seeds.items())) for variant, seeds in variants.items() if seeds
        }
        shown.append(Shown(block, metric, _baseline(block, claims), claims.margin.upper, there))
    return shown


def _baseline(block: Block, claims: Claims) -> str:
    """The variant that the others are compared with: the margin's `lower`, or else the first
    dense one."""
    dense = [variant for variant, own in block.variants.items() if _method(own) == "dense"]
    return next(iter([variant for variant in dense if variant == claims.margin.lower] + dense), "")


def unfinished(runs: Path, evidence: Evidence) -> list[tuple[Path, str]]:
    """(file, its last line) of one's own runs that were started but have no result.

    Runs that were repeated so that others could start from them are left out: their record is in
    another folder.
    """
    found = []
    kept = runs / "evidence"
    ended = {
        (block, run_name(variant, seed))
        for (block, variant), seeds in evidence.kept.items()
        for seed in seeds
    }
    for log in sorted((kept / "logs").glob("*/*.txt")):
        own = kept / log.parent.name / f"{log.stem}.json"
        if not own.is_file() and (log.parent.name, log.stem) not in ended:
            found.append((log, last_line(log)))
    found += [(trace, last_line(trace)) for trace in sorted(runs.glob("*/*/*/failure.txt"))]
    return found


@dataclass(frozen=True)
class Own:
    """One's own finished trainings.

    rows: by folder, the rows that `experiments.compare` shows, each with the paths of its results.
    trouble: why some folders cannot be shown.
    """

    rows: dict[Path, list[tuple[Summary, list[Path]]]]
    trouble: list[str]


def own_runs(runs: Path) -> Own:
    """The finished trainings below `runs`."""
    own = Own({}, [])
    for folder in sorted(path for path in runs.glob("*") if path.is_dir()):
        if not any(folder.glob(f"*/*/{FILE}")):
            continue
        try:
            finished, _ = comparison.find([folder])
            variants = comparison.variants(finished)
            files = {a.label: [r.directory / FILE for r in a.runs.values()] for a in variants}
            rows = comparison.table(variants, comparison.choose(variants, None))
            own.rows[folder] = [(row, files[row.label]) for row in rows]
        except UserError as error:
            own.trouble.append(f"{folder}: {one_line(error)}")
    return own
