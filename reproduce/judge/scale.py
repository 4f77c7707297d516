"""Puts a block's results into scale: the gap to half the width, and the share of it lost."""

import math
import statistics
from typing import Any

import numpy as np

from experiments.runs.stats import mean, paired_interval, ratio_interval, std
from experiments.support.results import number
from reproduce.judge.claims import Margin
from reproduce.judge.verdicts import differences
from reproduce.records import Values

# Before variants are compared, half the width should cost at least so many standard deviations of a
# paired difference.
ENOUGH = 5.0


def gap_closed(
    values: Values, block: str, variant: str, metric: str, margin: Margin, seeds: int
) -> dict[str, float] | None:
    """g = (L - L_dense) / (L_half - L_dense) of a loss or an accuracy L: 0 is as good as dense, 1
    as bad as half the width. With Fieller's interval, and the number of seeds that all three have.
    None for the dense variant itself, with fewer than `seeds` such seeds, if a value is not finite,
    and if the gap does not differ significantly from zero."""
    names = (variant, margin.lower, margin.upper)
    common = set.intersection(*({*values.get((block, name), {})} for name in names))
    if variant == margin.lower or len(common) < seeds:
        return None
    three = {(block, name): {s: values[block, name][s] for s in common} for name in names}
    both = (variant, margin.upper)
    lost, gaps = (differences(three, block, name, margin.lower, metric) for name in both)
    low, high = ratio_interval(lost, gaps)
    if not math.isfinite(low):
        return None
    return {"value": mean(lost) / mean(gaps), "low": low, "high": high, "n": len(common)}


def share_of_width(
    values: Values, block: str, variant: str, metric: str, margin: Margin
) -> dict[str, float] | None:
    """phi, the share of the feed-forward width at which the straight line through the mean losses
    of half the width and of dense, over the logarithm of the share, has the variant's mean loss.
    With the 2.5 and 97.5 % quantiles of 2,000 resamples of the seeds that all three have; None with
    fewer than two."""
    names = (margin.lower, margin.upper, variant)
    common = sorted(set.intersection(*({*values.get((block, name), {})} for name in names)))
    if len(common) < 2:
        return None
    losses = np.array([[number(values[block, n][s], metric) for s in common] for n in names])

    def share(seeds: Any) -> float:
        dense, half, loss = losses[:, seeds].mean(1)
        return 0.5 ** ((loss - dense) / (half - dense))

    draws = np.random.default_rng(0).integers(len(common), size=(2000, len(common)))
    low, high = np.quantile([share(draw) for draw in draws], (0.025, 0.975))
    return {"value": share(slice(None)), "low": low, "high": high, "n": len(common)}


def half_width_gap(
    values: Values, block: str, metric: str, margin: Margin
) -> dict[str, Any] | None:
    """The cost of half the width in a block; None with fewer than two pairs of finite values.

    gap: mean difference of the variants `upper` and `lower` over n seeds. low, high: its 95 %
    interval. std: the standard deviation of a difference. ratio: of gap and std. other_std: the
    median, over `other_variants` other variants, of the standard deviation of their differences to
    `lower`. other_ratio: of gap and other_std.
    """

    def lost(variant: str) -> list[float]:
        return differences(values, block, variant, margin.lower, metric)

    paired, ends = lost(margin.upper), (margin.lower, margin.upper)
    if len(paired) < 2 or not all(map(math.isfinite, paired)):
        return None
    others = [std(lost(v)) for b, v in values if b == block and v not in ends]
    spreads = [spread for spread in others if math.isfinite(spread)]
    gap, spread, (low, high) = mean(paired), std(paired), paired_interval(paired)
    other = statistics.median(spreads) if spreads else math.nan
    return {
        "block": block,
        "metric": metric,
        "lower": margin.lower,
        "upper": margin.upper,
        "n": len(paired),
        "gap": gap,
        "low": low,
        "high": high,
        "std": spread,
        "ratio": abs(gap) / spread if spread else math.inf,
        "other_variants": len(spreads),
        "other_std": other,
        "other_ratio": abs(gap) / other if other else math.inf,
    }
