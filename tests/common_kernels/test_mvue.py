"""Sampling: its mean and variance, what it makes of hard groups, and its random words."""

import math

import pytest
import torch

from common_kernels import check24, mvue24, philox4x32
from common_kernels.backend import HAS_TRITON
from common_kernels.mvue import reference
from common_kernels.philox import rounds
from tests.each import each

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF, NAN = float("inf"), float("nan")
DRAWS = 200_000
# Group, variance of the optimum, variance of sequential sampling (where it has a short decimal).
GROUPS = [
    ((1.0, -2.0, 3.0, -4.0), 20.0, 20.47),
    ((0.1, 0.2, 0.3, 2.0), 0.22, 0.355),
    ((0.5, 2.0, 2.0, 3.2), 11.155, None),
    ((1.0, 1.0, 1.0, 1.0), 4.0, 4.0),
]
designs = each("design", ["exact", "sequential"])
# Known answers of Random123 (kat_vectors, philox4x32 with 10 rounds): counter, key, words.
KNOWN = [
    ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (" ".join(4 * ["ffffffff"]), "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def test_words_are_those_of_philox():
    """The counter fills the two low words, and a seed may be a tensor."""
    for line in KNOWN:
        counter, (low, high), words = ([int(w, 16) for w in part.split()] for part in line)
        got = rounds(low | high << 32, tuple(torch.tensor([word]) for word in counter))
        assert [word.item() for word in got] == words
    counter = torch.tensor([[0], [7], [2**32 + 5], [2**62 + 3]])
    for seed in (0, 9, 2**40 + 17):
        want = rounds(seed, (counter & 0xFFFFFFFF, counter >> 32, counter * 0, counter * 0))
        for given in (seed, torch.tensor(seed)):
            assert all(map(torch.equal, philox4x32(given, counter), want))


@designs
@each(("group", "optimum", "pps"), GROUPS)
def test_mean_and_variance(group, optimum, pps, design):
    """Mean within 5 sigma of the closed-form variance, total variance within 5 sigma of the
    sample's. With equal entries all have one size; a dominant one is always kept."""
    x = torch.tensor(group).double()
    sample = mvue24(torch.tensor(group).expand(DRAWS, 4), 1, design=design).double()
    assert check24(sample) == 0
    sigma = math.sqrt(pps or 1.5 * optimum) if design == "sequential" else math.sqrt(optimum)
    assert ((sample.mean(0) - x).abs() < 5 * sigma / math.sqrt(DRAWS)).all()
    squares = ((sample - x) ** 2).sum(1)
    # Not less than the rounding of fp32 values, for groups whose error has one size only.
    slack = 5 * squares.std() / math.sqrt(DRAWS) + 1e-6 * optimum
    want = optimum if design == "exact" else pps
    if want is None:
        assert squares.mean() > optimum - slack
    else:
        # The reference values of the sequential design are given to 3 or 4 digits.
        assert (squares.mean() - want).abs() < slack + (5e-3 if design == "sequential" else 0)
    total, top = x.abs().sum(), x.abs().max()
    least = (total - top) ** 2 + top**2 if top > total / 2 else total**2 / 2
    assert (least - (x**2).sum()).item() == pytest.approx(optimum, rel=1e-6)


def test_two_non_zeros_are_reproduced():
    for group in ((4, 0, 0, 0), (100, 1e-9, 0, 0), (0, -65504, 0, 3), (3e38, 0, -3e38, 0)):
        x = torch.tensor(group, dtype=torch.float32).expand(1000, 4)
        assert torch.equal(mvue24(x, 3), x)
        tiny = 2.0**-149 * torch.tensor(group).sign()  # the smallest of all
        assert torch.equal(mvue24(tiny, 3), tiny)


@designs
def test_extreme_numbers_stay_finite_others_propagate_and_masks_stay_legal(design, generator):
    groups = [[65504.0, 1, 1, 1], [1e30, *[1e-30] * 3], [1e-38, 1e-40, 1e-45, 0],
              [-0.0, 0, -0.0, 0]]  # fmt: skip
    x = torch.tensor(groups).repeat(1000, 1)
    assert mvue24(x, 5, design=design).isfinite().all()
    assert mvue24(x[::4].half(), 5, design=design).isfinite().all()
    x = torch.cartesian_prod(*4 * [torch.tensor([0.0, -1.0, 2.0, INF, -INF, NAN])]).repeat(8, 1)
    got = mvue24(x, 5, design=design)
    assert ((got != 0).sum(1) <= 2).all()
    assert torch.equal((~got.isfinite()).any(1), (~x.isfinite()).any(1))
    # Where the sum of four overflows but that of three does not.
    large = torch.randn(1 << 10, 4, generator=generator).sign() * (
        0.9 + 0.4 * torch.rand(1 << 10, 4, generator=generator)
    )
    for sample in (mvue24, reference.mvue24) if design == "exact" else ():
        assert torch.equal(sample(2.0**126 * large, 11), 2.0**126 * sample(large, 11))


@designs
def test_pieces_of_a_batch_draw_what_the_batch_draws(design, generator):
    """Also where the cut is no multiple of the four groups that share a counter."""
    x = torch.randn(6, 20, generator=generator)
    parts = [mvue24(row, 9, 5 + 5 * i, design) for i, row in enumerate(x)]
    assert torch.equal(mvue24(x, 9, 5, design), torch.stack(parts))


@pytest.mark.skipif(not HAS_TRITON, reason="no Triton for this platform")
def test_hard_groups_draw_the_same_bits(hard_groups):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = hard_groups(512, dtype).to(DEVICE)
        for given, dim in ((x, -1), (x.view(-1, 32, 4).mT.reshape(-1, 32), 0)):
            got, want = (mvue24(given, 77, dim=dim, backend=b) for b in ("triton", "cpu"))
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@each(("design", "want"), [("exact", 0.474), ("sequential", 0.503)])
def test_relative_error_of_a_gaussian(design, want, generator):
    x = torch.randn(1 << 20, generator=generator)
    error = (mvue24(x, 2, design=design) - x).double()
    assert abs((error**2).sum() / (x.double() ** 2).sum() - want).item() < 0.003
