"""Statistics over seeds, against numbers worked out by hand and against scipy.stats."""

import math
from itertools import combinations

import numpy as np
import pytest
from scipy.stats import ttest_1samp, ttest_rel

from experiments.runs.stats import (
    decimals,
    difference_form,
    equivalence_p_value,
    holm,
    mean,
    p_value,
    paired_interval,
    ratio_interval,
)


def test_a_value_has_the_decimals_that_its_interval_asks_for():
    for value, low, high, places in (
        (-0.0350, -0.0463, -0.0238, 4),
        (2.86e-5, 8.0e-6, 4.92e-5, 6),  # four would be +0.0000 [+0.0000, +0.0000]
        (0.00271, 0.0000294, 0.0054, 5),  # four would not tell the lower end from zero
        (0.02, 1e-9, 0.04, 5),  # but an end is not followed to zero
        (-0.000995, -0.00101, -0.00098, 6),  # the width is 0.00003, whatever the ends are
        (1.7e-5, math.nan, math.nan, 6),
        (math.nan, math.nan, math.nan, 4),
    ):
        assert decimals(value, low, high) == places
        assert difference_form(value, low, high) == f"+.{places}f"


PAIRS = [
    [0.031, 0.012, 0.027, -0.004, 0.019],
    [-1.5, -0.25, -2.0],
    [0.01, -0.01, 0.02, -0.03, 0.005, 0.0125],
    [1e-3, 1.1e-3, 1.05e-3, 0.98e-3, 1.02e-3],  # p of 1e-8: the tail itself, not 1 - the rest
]


def test_paired_t_test_and_interval_are_scipys():
    for differences in PAIRS:
        for center in [0.0, 0.015, -1.0]:
            ours = [1.0 + 0.5 * i + d for i, d in enumerate(differences)]
            theirs = [1.0 + 0.5 * i + center for i, _ in enumerate(differences)]
            sides = {"both": "two-sided", "above": "greater", "below": "less"}
            for side, alternative in sides.items():
                p = p_value(differences, center, side)
                # Rounding leaves 1e-16 in a difference of 1e-3, and t has five digits more.
                paired = ttest_rel(ours, theirs, alternative=alternative).pvalue
                assert p == pytest.approx(paired, rel=1e-7)
                exact = ttest_1samp(differences, center, alternative=alternative).pvalue
                assert p == pytest.approx(exact, rel=1e-11)
        for confidence in (0.9, 0.95):
            expected = ttest_1samp(differences, 0.0).confidence_interval(confidence)
            found = paired_interval(differences, confidence)
            assert found == pytest.approx((expected.low, expected.high), rel=1e-11)


def test_equivalence_is_two_one_sided_tests_of_scipy():
    for differences in PAIRS:
        for margin in [0.005, 0.04, 3.0]:
            above = ttest_1samp(differences, -margin, alternative="greater").pvalue
            below = ttest_1samp(differences, margin, alternative="less").pvalue
            p = equivalence_p_value(differences, [margin] * len(differences))
            assert p == pytest.approx(max(above, below), rel=1e-11)
            # The same by intervals: equivalent at 5 % where that of 90 % lies within the margin.
            low, high = paired_interval(differences, 0.9)
            assert (p < 0.05) == (-margin < low and high < margin)


def test_differences_without_spread():
    assert p_value([0.5, 0.5, 0.5]) == 0.0
    assert p_value([0.5, 0.5, 0.5], side="above") == 0.0
    assert p_value([0.5, 0.5, 0.5], side="below") == 1.0
    assert p_value([0.5, 0.5, 0.5], center=0.5) == 1.0
    assert p_value([0.0, 0.0]) == 1.0
    assert equivalence_p_value([0.0, 0.0], [0.1, 0.1]) == 0.0
    assert equivalence_p_value([0.2, 0.2], [0.1, 0.1]) == 1.0
    assert paired_interval([0.5, 0.5, 0.5]) == (0.5, 0.5)


GAPS = [0.081, 0.084, 0.077, 0.082, 0.078]


def test_ends_of_the_interval_of_a_quotient_are_just_refused():
    """Fieller's: the quotient g is refused where the mean of numerator - g denominator is not 0."""
    for above in [[0.03, 0.011, 0.027, -0.004, 0.019], [0.08, 0.09, 0.07, 0.1, 0.06]]:
        for confidence in [0.5, 0.95]:

            def p(g, above=above):
                return p_value([a - g * b for a, b in zip(above, GAPS, strict=True)])

            low, high = ratio_interval(above, GAPS, confidence)
            g = mean(above) / mean(GAPS)
            assert low < g < high
            # The ends are roots of a quadratic: half of its discriminant's digits at the worst.
            assert [p(low), p(high)] == pytest.approx([1 - confidence] * 2, rel=1e-6)
            assert p((low + g) / 2) > 1 - confidence and p(high + 0.1) < 1 - confidence


def test_holm_is_bonferroni_on_every_subset():
    """Its closed form: an adjusted value is the largest of Bonferroni's over all sets of hypotheses
    that hold this one, each n times the least of its p-values."""
    for p in np.random.default_rng(1).uniform(0, 0.3, (20, 5)):
        subsets = [s for n in range(1, 6) for s in combinations(range(5), n)]
        closed = [
            max(min(1.0, len(s) * min(p[list(s)])) for s in subsets if i in s) for i in range(5)
        ]
        assert holm(list(p)) == pytest.approx(closed)
