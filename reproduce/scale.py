"""Puts a block's results into scale: the gap between dense and half the width, the share of it
that a method loses, and the size of the runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from experiments.runs.stats import mean, paired_interval, ratio_interval, std
from reproduce.claims import Margin, differences
from reproduce.records import Values

# Before variants are compared, half the width should cost at least so many standard deviations of a
# paired difference.
ENOUGH = 5.0


@dataclass(frozen=True)
class GapClosed:
    """g = (L - L_dense) / (L_half - L_dense) of a loss or an accuracy L: 0 is as good as dense, 1
    as bad as half the width. low, high: Fieller's interval over the n seeds that all three have."""

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class HalfWidthGap:
    """The cost of half the width in a block.

    gap: mean difference of the variants `upper` and `lower` over n seeds. low, high: its 95 %
    interval. std: the standard deviation of a difference. ratio: of gap and std. other_std: the
    median, over `other_variants` other variants, of the standard deviation of their differences to
    `lower`. other_ratio: of gap and other_std.
    """

    block: str
    metric: str
    lower: str
    upper: str
    n: int
    gap: float
    low: float
    high: float
    std: float
    ratio: float
    other_variants: int
    other_std: float
    other_ratio: float


def gap_closed(
    values: Values, block: str, variant: str, metric: str, margin: Margin, seeds: int
) -> GapClosed | None:
    """g of a variant; None for the dense variant itself, with fewer than `seeds` seeds that all
    three variants have, if a value is not finite, and if the gap does not differ significantly from
    zero."""
    lower, upper, own = (values.get((block, a), {}) for a in (margin.lower, margin.upper, variant))
    common = lower.keys() & upper.keys() & own.keys()
    if variant == margin.lower or len(common) < seeds:
        return None
    three = {(block, a): {s: values[block, a][s] for s in common}
             for a in (margin.lower, margin.upper, variant)}  # fmt: skip
    losses = differences(three, block, variant, margin.lower, metric)
    gaps = differences(three, block, margin.upper, margin.lower, metric)
    low, high = ratio_interval(losses, gaps)
    if not math.isfinite(low):
        return None
    return GapClosed(mean(losses) / mean(gaps), low, high, len(common))


def half_width_gap(values: Values, block: str, metric: str, margin: Margin) -> HalfWidthGap | None:
    """The gap of a block; None with fewer than two pairs of finite values."""
    paired = differences(values, block, margin.upper, margin.lower, metric)
    if len(paired) < 2 or not all(map(math.isfinite, paired)):
        return None
    spreads = []
    for name, variant in values:
        if name == block and variant not in (margin.lower, margin.upper):
            own = std(differences(values, block, variant, margin.lower, metric))
            spreads += [own] if math.isfinite(own) else []
    gap, spread = mean(paired), std(paired)
    other = statistics.median(spreads) if spreads else math.nan
    return HalfWidthGap(
        block,
        metric,
        margin.lower,
        margin.upper,
        len(paired),
        gap,
        *paired_interval(paired),
        spread,
        abs(gap) / spread if spread else math.inf,
        len(spreads),
        other,
        abs(gap) / other if other else math.inf,
    )


def _amount(count: int) -> str:
    return f"{count / 1e6:.4g}M" if count >= 1e6 else f"{count:,}"


def model(runs: dict[int, dict[str, Any]]) -> str:
    """The name of the model of a variant's runs."""
    overrides = [o.partition("=") for run in runs.values() for o in run.get("overrides", [])]
    return next((value for key, _, value in overrides if key == "model"), "?")


def of_records(records: Iterable[dict[str, Any]]) -> str:
    """Model, length of training, data and seeds of runs, in words; "" without runs. Seeds at which
    runs started from different weights, because their first model was trained twice, are named."""
    texts: dict[str, dict[str, None]] = {}
    seeds: set[int] = set()
    starts: dict[tuple[str, int], set[str]] = {}
    for record in records:
        chosen = dict(o.split("=", 1) for o in record["overrides"] if "=" in o)
        name = model({0: record})
        # A record counts what a model reads: of an image its patches and the class token.
        unit = "tokens" if name.startswith(("gpt2", "bert", "hf")) else "image tokens"
        data = f"data={chosen['data']}" if "data" in chosen else "the default data"
        setting = {
            "model": name,
            "length": f"{_amount(record['tokens'])} {unit}",
            "batch": f"{round(record['tokens'] / max(1, record['steps'])):,} {unit} a step",
            "data": f"{data} ({record['corpus_hash'][:12]})",
        }
        for key, text in setting.items():
            texts.setdefault(key, {})[text] = None
        seeds.add(record["seed"])
        if "source" in record:
            starts.setdefault((record["block"], record["seed"]), set()).add(str(record.get("init")))
    if not seeds:
        return ""
    parts = [" or ".join(several) for several in texts.values()]
    parts.append(f"seeds {', '.join(map(str, sorted(seeds)))}")
    if unequal := sorted({seed for (_, seed), weights in starts.items() if len(weights) > 1}):
        at = ", ".join(map(str, unequal))
        parts.append(f"from different trainings of the first model at seeds {at}")
    return ", ".join(parts)
