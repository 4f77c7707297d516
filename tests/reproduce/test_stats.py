"""Statistics over seeds, against numbers worked out by hand."""

import math

import pytest

from reproduce.stats import mean, paired_interval, std


def test_mean_and_sample_deviation():
    assert mean([1.0, 2.0, 6.0]) == 3.0
    assert std([1.0, 2.0, 6.0]) == pytest.approx(math.sqrt((4 + 1 + 9) / 2))
    assert math.isnan(std([1.0]))


def test_interval_of_three_pairs():
    """Two degrees of freedom have a closed form: t = (2p - 1) / sqrt(2 p (1 - p))."""
    p = 0.975
    t = (2 * p - 1) / math.sqrt(2 * p * (1 - p))
    assert t == pytest.approx(4.3027, abs=5e-5)  # the tables' value
    half = t * 0.5 / math.sqrt(3)  # 0.5, 0.0, 1.0 have mean 0.5 and deviation 0.5
    assert paired_interval([0.5, 0.0, 1.0]) == pytest.approx((0.5 - half, 0.5 + half))


def test_interval_of_two_pairs_at_another_confidence():
    """One degree of freedom is Cauchy: t = tan(pi (p - 1/2)), 1 for p = 0.75."""
    assert paired_interval([1.0, 3.0], confidence=0.5) == pytest.approx((1.0, 3.0))


def test_one_pair_has_no_interval():
    assert all(math.isnan(end) for end in paired_interval([0.1]))


def test_interval_covers_as_often_as_it_says():
    """Of 2000 intervals from three normal differences about 95 % hold the mean 0.

    The share has a standard error of sqrt(0.95 * 0.05 / 2000) = 0.0049; the bound is 4 sigma.
    """
    import numpy as np

    samples = np.random.default_rng(0).standard_normal((2000, 3))
    intervals = [paired_interval(list(row)) for row in samples]
    share = mean([float(low <= 0 <= high) for low, high in intervals])
    assert abs(share - 0.95) < 4 * 0.0049
