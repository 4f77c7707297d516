"""Statistics over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def std(values: Sequence[float]) -> float:
    """Sample standard deviation (n - 1); of one value it is not defined: nan."""
    return statistics.stdev(values) if len(values) > 1 else math.nan


def paired_interval(differences: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Confidence interval of the mean of paired differences: Student's t, n - 1 degrees of freedom.

    Pairs that share initial weights and data make this far narrower than an interval of two
    independent means. From one pair nothing follows: (nan, nan).
    """
    n = len(differences)
    if n < 2:
        return math.nan, math.nan
    from scipy.special import stdtrit

    quantile = float(stdtrit(n - 1, 0.5 + confidence / 2))
    half = quantile * std(differences) / math.sqrt(n)
    return mean(differences) - half, mean(differences) + half
