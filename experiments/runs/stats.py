"""Statistics over seeds."""

import math
import statistics
from collections.abc import Sequence


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; nan if a value is nan."""
    return statistics.fmean(values)


def std(values: Sequence[float]) -> float:
    """Sample standard deviation (n - 1); nan with fewer than two values or a non-finite one."""
    defined = len(values) > 1 and all(map(math.isfinite, values))
    return statistics.stdev(values) if defined else math.nan


def paired_interval(differences: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Confidence interval of the mean of paired differences: Student's t, n - 1 degrees of freedom;
    (nan, nan) for a single pair. Pairs that share weights and data make it narrow."""
    n = len(differences)
    if n < 2:
        return math.nan, math.nan
    from scipy.special import stdtrit

    quantile = float(stdtrit(n - 1, 0.5 + confidence / 2))
    half = quantile * std(differences) / math.sqrt(n)
    return mean(differences) - half, mean(differences) + half


def excludes_zero(low: float, high: float) -> bool:
    """True if both ends of an interval are on one side of zero; False for (nan, nan)."""
    return low > 0 or high < 0


def decimals(value: float, low: float = math.nan, high: float = math.nan, least: int = 4) -> int:
    """The decimals to write a value and its interval with: `least`, or as many as show two digits
    of the interval's width, and an end near zero on its side; without one two of the value."""
    width = high - low
    if not width > 0:  # nan without an interval
        return max(least, _places(value) + 1)
    enough = _places(width) + 1
    near = max(_places(low), _places(high))
    return max(least, enough, min(near, enough + 2))


def difference_form(value: float, low: float = math.nan, high: float = math.nan) -> str:
    """The format of a difference and of the ends of its interval: signed, with `decimals`."""
    return f"+.{decimals(value, low, high)}f"


def _places(value: float) -> int:
    """The decimals that show the first digit of a value."""
    return -math.floor(math.log10(abs(value))) if value and math.isfinite(value) else 0


def ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float], confidence: float = 0.95
) -> tuple[float, float]:
    """Confidence interval of the quotient of two means over the same pairs, by Fieller's theorem:
    the quotients g for which a t test does not reject that numerator - g * denominator has mean
    zero. (nan, nan) for fewer than two pairs, or if the denominator's mean may be zero."""
    n = len(numerators)
    if n < 2:
        return math.nan, math.nan
    from scipy.special import stdtrit

    t2 = float(stdtrit(n - 1, 0.5 + confidence / 2)) ** 2 / n
    above, below = mean(numerators), mean(denominators)
    squared = below**2 - t2 * std(denominators) ** 2
    mixed = above * below - t2 * statistics.covariance(numerators, denominators)
    constant = above**2 - t2 * std(numerators) ** 2
    if not squared > 0:
        return math.nan, math.nan
    root = math.sqrt(max(0.0, mixed**2 - squared * constant))  # only rounding makes it negative
    return (mixed - root) / squared, (mixed + root) / squared


def p_value(differences: Sequence[float], center: float = 0.0, side: str = "both") -> float:
    """p-value of Student's t test that the mean of paired differences is `center`, against `both`
    sides, or that it is `above` or `below`; nan for fewer than two. Without spread t is infinite
    unless all differences equal the center."""
    from scipy.special import stdtr

    n = len(differences)
    if n < 2:
        return math.nan
    distance, spread = mean(differences) - center, std(differences) / math.sqrt(n)
    without_spread = math.copysign(math.inf, distance) if distance else 0.0
    t = distance / spread if spread else without_spread
    # Compute each tail separately: 1 - below would round p-values under 1e-16 to 0.
    below, above = float(stdtr(n - 1, t)), float(stdtr(n - 1, -t))
    return {"below": below, "above": above, "both": 2 * min(below, above)}[side]


def equivalence_p_value(differences: Sequence[float], margins: Sequence[float]) -> float:
    """p-value of two one-sided tests (TOST): small if the mean of `differences` lies between minus
    and plus the mean of `margins`. There is one margin per difference, because a margin estimated
    from the same pairs also has an error."""
    above = p_value([d + m for d, m in zip(differences, margins, strict=True)], side="above")
    below = p_value([d - m for d, m in zip(differences, margins, strict=True)], side="below")
    return max(above, below)


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values adjusted by Holm's step-down procedure, in their own order."""
    adjusted, highest = [math.nan] * len(p_values), 0.0
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = highest
    return adjusted
