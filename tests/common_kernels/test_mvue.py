import math

import pytest
import torch

from common_kernels import check24, mvue24
from common_kernels.backend import HAS_TRITON
from common_kernels.mvue import reference
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


def closed_form(group: torch.Tensor) -> torch.Tensor:
    """The least total variance of an unbiased 2:4 estimator, for groups `[..., 4]`."""
    total, top, squares = group.abs().sum(-1), group.abs().amax(-1), (group**2).sum(-1)
    spread = torch.where(top > total / 2, (total - top) ** 2 + top**2, total**2 / 2)
    return spread - squares


def draws(group: tuple[float, ...], design: str, seed: int = 1) -> torch.Tensor:
    return mvue24(torch.tensor(group).expand(DRAWS, 4), seed, design=design).double()


@each("design", ["exact", "sequential"])
@each(("group", "optimum", "pps"), GROUPS)
def test_mean_and_variance(group, optimum, pps, design):
    """Mean within 5 sigma of the closed-form variance, total variance within 5 sigma of the
    sample's.
    """
    x, sample = torch.tensor(group).double(), draws(group, design)
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
    assert closed_form(x).item() == pytest.approx(optimum, rel=1e-6)


def test_unbiased_with_least_variance_on_a_grid_of_uniforms(generator):
    """No statistics: averaging over all u on a grid of step 1/K is wrong by at most a few steps of
    H.
    """
    from common_kernels.mvue.cpu import exact

    steps, groups = 4096, torch.randn(4, 256, 1, generator=generator) ** 3
    u = ((torch.arange(steps) + 0.5) / steps).expand(1, 256, steps)
    x = groups.expand(4, 256, steps).contiguous()
    sample = exact(x, u).double()
    total = groups.double().abs().sum(0)
    assert ((sample.mean(2) - groups[..., 0]).abs() <= 3 * total.T / steps).all()
    variance = ((sample - groups) ** 2).sum(0).mean(1)
    assert (
        (variance - closed_form(groups.double()[..., 0].T)).abs() <= 8 * total[:, 0] ** 2 / steps
    ).all()


def test_kept_values():
    """No dominant entry: both kept magnitudes are S/2. A dominant one is kept as it is, always,
    with R beside it.
    """
    sample = draws((1.0, -2.0, 3.0, -4.0), "exact")
    assert sample.abs().unique().tolist() == [0, 5]
    assert ((sample != 0).sum(1) == 2).all()
    sample = draws((0.25, 0.5, -8.0, 1.0), "exact")
    assert (sample[:, 2] == -8).all()
    assert sample[:, [0, 1, 3]].sum(1).unique().tolist() == [1.75]


@each("design", ["exact", "sequential"])
@each(
    "group",
    [
        (4, 0, 0, 0), (0, 0, 0, 0), (100, 1e-9, 0, 0), (0, -65504, 0, 3), (0, 0, 5, 5),
        (3e38, 0, -3e38, 0),
    ],
)  # fmt: skip
def test_two_non_zeros_are_reproduced(group, design):
    x = torch.tensor(group, dtype=torch.float32).expand(1000, 4)
    got = mvue24(x, 3, design=design)
    if design == "exact":
        assert torch.equal(got, x)
        tiny = 2.0**-149 * torch.tensor(group).sign()  # the smallest of all
        assert torch.equal(mvue24(tiny, 3), tiny)
    else:
        assert torch.allclose(got, x, rtol=1e-6, atol=0)


@each("design", ["exact", "sequential"])
def test_extreme_numbers_stay_finite_others_propagate_and_masks_stay_legal(design):
    groups = [
        [65504.0, 1, 1, 1],
        [1e30, *[1e-30] * 3],
        [1e-38, 1e-40, 1e-45, 0],
        [-0.0, 0, -0.0, 0],
    ]
    x = torch.tensor(groups).repeat(1000, 1)
    assert mvue24(x, 5, design=design).isfinite().all()
    assert mvue24(x[::4].half(), 5, design=design).isfinite().all()
    values = torch.tensor([0.0, -1.0, 2.0, INF, -INF, NAN])
    x = torch.cartesian_prod(values, values, values, values).repeat(8, 1)
    got = mvue24(x, 5, design=design)
    assert ((got != 0).sum(1) <= 2).all()
    assert torch.equal((~got.isfinite()).any(1), (~x.isfinite()).any(1))


def test_scale_invariance(generator):
    """Also where the sum of four overflows but that of three does not."""
    x = torch.randn(1 << 12, 4, generator=generator)
    assert torch.equal(mvue24(2.0**-20 * x, 11), 2.0**-20 * mvue24(x, 11))
    large = x.sign() * (0.9 + 0.4 * torch.rand(x.shape, generator=generator))
    for sample in (mvue24, reference.mvue24):
        assert torch.equal(sample(2.0**126 * large, 11), 2.0**126 * sample(large, 11))


@each(("design", "want"), [("exact", 0.474), ("sequential", 0.503)])
def test_relative_error_of_a_gaussian(design, want, generator):
    x = torch.randn(1 << 20, generator=generator)
    error = (mvue24(x, 2, design=design) - x).double()
    assert abs((error**2).sum() / (x.double() ** 2).sum() - want).item() < 0.003


def test_pieces_of_a_batch_draw_what_the_batch_draws(generator):
    """Also where the cut is no multiple of the four groups that share a counter."""
    x = torch.randn(6, 20, generator=generator)
    for design in ("exact", "sequential"):
        whole = mvue24(x, 9, 5, design)
        parts = [mvue24(row, 9, 5 + 5 * i, design) for i, row in enumerate(x)]
        assert torch.equal(whole, torch.stack(parts))


def test_draws_depend_on_the_key_alone():
    x = torch.ones(256, 64)
    torch.manual_seed(0)
    first = mvue24(x, 1)
    torch.manual_seed(1)
    assert torch.equal(mvue24(x, 1), first)
    for key in ((2,), (1 << 32 | 1,), (1, 256 * 16), (1, 1 << 36)):
        other = mvue24(x, *key)
        assert torch.equal(mvue24(x, *map(torch.tensor, key)), other)
        assert abs((other != first).float().mean().item() - 0.5) < 5 * 0.5 / math.sqrt(256 * 16)


def test_masks_of_an_all_ones_matrix():
    """Systematic sampling of equal entries has two outcomes, {0, 2} and {1, 3}, each with
    probability one half.
    """
    pairs = mvue24(torch.ones(1 << 20, 4), 4).bool()
    even = pairs[:, 0]
    assert torch.equal(pairs, torch.stack((even, ~even, even, ~even), 1))
    coin = even.double() * 2 - 1
    assert abs(coin.mean()) < 5 / 2**10
    for lag in (1, 2, 3, 4, 64, 1024):
        assert abs((coin[lag:] * coin[:-lag]).mean()) < 5 / math.sqrt(len(coin) - lag)
    assert (
        len(even.view(-1, 64).unique(dim=0)) == (1 << 20) // 64
    )  # no two tiles of 64 groups are alike


@pytest.mark.skipif(not HAS_TRITON, reason="no Triton for this platform")
def test_hard_groups_draw_the_same_bits(hard_groups):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = hard_groups(512, dtype).to(DEVICE)
        for given, dim in ((x, -1), (x.view(-1, 32, 4).mT.reshape(-1, 32), 0)):
            got, want = (mvue24(given, 77, dim=dim, backend=b) for b in ("triton", "cpu"))
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
