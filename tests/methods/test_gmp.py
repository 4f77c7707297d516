"""Pruning by magnitude, gradually (`gmp`) and in rounds (`imp`): which weights go, and when."""

import pytest
import torch
from torch import nn

import methods
from common_kernels import check24, nm_mask
from methods import gmp, imp
from methods.gmp import prune_towards24
from tests.methods.loop import convert, training_step


def test_which_weights_go_by_hand():
    """2:4 removes 1, 2 of the first group and 5, 6 of the second; the smallest of them go first."""
    weight = torch.tensor([[-1.0, 2.0, -3.0, 4.0, 8.0, -7.0, 6.0, 5.0]])
    mask = torch.ones_like(weight, dtype=torch.bool)
    expected = {0.0: [], 0.25: [-1.0], 0.5: [-1.0, 2.0], 0.75: [-1.0, 2.0, 5.0]}
    for share, values in expected.items():
        assert sorted(weight[~prune_towards24(weight, mask, share)].tolist()) == values
    assert torch.equal(prune_towards24(weight, mask, 1.0), nm_mask(weight))
    for values, before, kept in (
        # A weight that is zero by chance does not take the place of a removed one.
        ([0.0, 5.0, 0.0, 0.0], [0, 1, 1, 1], [0, 1, 1, 0]),
        # They are subnormal in fp16; none may be lifted to another's rank.
        ([2.0**-24, 2.0**-20, 2.0**-19, 2.0**-18], [1] * 4, [0, 0, 1, 1]),
    ):
        weight, mask = torch.tensor([values], dtype=torch.float16), torch.tensor([before]).bool()
        for share in (0.3, 1.0):
            mask = prune_towards24(weight, mask, share)
        assert mask[0].int().tolist() == kept


@pytest.mark.parametrize(
    ("options", "shares"),
    [  # s_t = s - s (1 - tau)^3 of Zhu and Gupta, in steps of prune_every; from 20 to 60
        ({"begin_fraction": 0.2, "end_fraction": 0.6, "prune_every": 10},
         {0: 0.0, 19: 0.0, 20: 0.0, 29: 0.0, 30: 1 - 0.75**3, 39: 1 - 0.75**3, 40: 1 - 0.5**3,
          50: 1 - 0.25**3, 59: 1 - 0.25**3, 60: 1.0, 99: 1.0}),
        # 0.29 of 100 steps is 28.999999999999996 in fp64, and 0.57 is 56.99999999999999.
        ({"begin_fraction": 0.29, "end_fraction": 0.57, "prune_every": 1},
         {29: 0.0, 30: 1 - (27 / 28) ** 3, 56: 1 - (1 / 28) ** 3, 57: 1.0}),
    ],
)  # fmt: skip
def test_the_cubic_schedule(options, shares):
    method = gmp.Method(gmp.Config(total_steps=100, **options))
    assert {step: method.share(step) for step in shares} == pytest.approx(shares, abs=1e-12)


def test_rounds_keep_a_constant_share():
    """Four rounds to a half: after each, 2^(-1/4) of the weights are left."""
    method = imp.Method(imp.Config(begin_fraction=0.2, rounds=4, total_steps=100))
    kept = [1 - method.share(step) / 2 for step in (19, 20, 39, 40, 60, 80, 99)]
    q = 0.5**0.25
    assert kept == pytest.approx([1, q, q, q**2, q**3, q**4, q**4], abs=1e-12)
    # The last step, though 15/16 of 2 is nearer to 2.
    method = imp.Method(imp.Config(begin_fraction=0.0, rounds=16, total_steps=2))
    assert method.round_start(15) == 1


def test_each_round_removes_the_smallest_of_what_is_left():
    """Two rounds on 32 weights: after the first 2^(-1/2) of them are left, 23 of 32."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 4, bias=False)
    expected = nm_mask(layer.weight.detach())
    _, method = convert("imp", layer, begin_fraction=0.0, rounds=2, total_steps=4)
    left = []
    for step in range(4):
        method.on_step_begin(step)
        method.on_step_end(step)
        left.append(int(layer.weight.count_nonzero()))
    assert left == [23, 23, 16, 16] and torch.equal(layer.weight != 0, expected)


def test_every_schedule_ends_24():
    for name, options in (
        ("gmp", {"end_fraction": 1.0, "prune_every": 7}),
        ("gmp", {"begin_fraction": 1.0, "end_fraction": 1.0}),
        ("imp", {"rounds": 16}),
        ("imp", {"begin_fraction": 0.0, "rounds": 1}),
    ):
        for total in (1, 2, 6, 50):
            method = methods.build(name, total_steps=total, **options)
            shares = [method.share(step) for step in range(total)]
            assert shares == sorted(shares) and shares[-1] == 1.0


@pytest.mark.parametrize("name", ["gmp", "imp"])
def test_training_prunes_for_good(name):
    """Momentum of a weight that was removed half-way must not bring it back to life."""
    torch.manual_seed(0)
    layer, method = convert(name, nn.Linear(16, 8), begin_fraction=0.25, total_steps=12)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.05)
    found, mask = [], layer.mask.clone()
    for step in range(12):
        with training_step(method, step, optimizer):
            x = torch.randn(32, 16)
            (layer(x) - x[:, :8]).square().mean().backward()
            assert not layer.weight.grad[~layer.mask].any()
        assert not (layer.mask & ~mask).any()
        assert torch.equal(layer.weight != 0, layer.mask)
        mask = layer.mask.clone()
        found.append(method.metrics())
    phases, densities = ([each[key] for each in found] for key in ("phase", "density"))
    assert phases[:3] == ["dense"] * 3 and phases[-1] == "sparse"
    assert densities[:3] == [1.0] * 3 and densities[-1] == 0.5
    method.finalize(layer)
    assert int(check24(layer.weight)) == 0
