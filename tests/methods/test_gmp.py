"""Gradual magnitude pruning, and what iterative pruning shares with it: which weights go and when.

Both are tested here where both must hold; the rounds of `imp` have a file of their own.
"""

import pytest
import torch
from torch import nn

import methods
from common_kernels import check24, nm_mask
from methods import gmp
from methods.gmp import prune_towards24
from tests.methods.loop import convert, training_step


def removed(weight, mask):
    return sorted(weight[~mask].tolist())


def test_which_weights_go_first_by_hand():
    """2:4 removes 1, 2 of the first group and 5, 6 of the second; the smallest of them go first."""
    weight = torch.tensor([[-1.0, 2.0, -3.0, 4.0, 8.0, -7.0, 6.0, 5.0]])
    mask = torch.ones_like(weight, dtype=torch.bool)
    expected = {0.0: [], 0.25: [-1.0], 0.5: [-1.0, 2.0], 0.75: [-1.0, 2.0, 5.0]}
    for share, values in expected.items():
        assert removed(weight, prune_towards24(weight, mask, share)) == values
    assert torch.equal(prune_towards24(weight, mask, 1.0), nm_mask(weight))


def test_weights_that_are_zero_by_chance_do_not_take_the_place_of_a_removed_one():
    weight, mask = torch.tensor([[0.0, 5.0, 0.0, 0.0]]), torch.tensor([[False, True, True, True]])
    assert prune_towards24(weight, mask, 1.0).tolist() == [[False, True, True, False]]


def test_an_all_zero_weight_ends_24():
    weight, mask = torch.zeros(4, 8), torch.ones(4, 8, dtype=torch.bool)
    for share in (0.3, 1.0):
        mask = prune_towards24(weight, mask, share)
    assert torch.equal(mask.unflatten(1, (-1, 4)).sum(2), torch.full((4, 2), 2))


def test_cubic_schedule_of_zhu_and_gupta():
    """s_t = s - s (1 - tau)^3 in steps of prune_every; 100 steps from 20 to 60."""
    options = {"begin_fraction": 0.2, "end_fraction": 0.6, "prune_every": 10, "total_steps": 100}
    method = gmp.Method(gmp.Config(**options))
    shares = {0: 0.0, 19: 0.0, 20: 0.0, 29: 0.0, 30: 1 - 0.75**3, 39: 1 - 0.75**3}
    shares |= {40: 1 - 0.5**3, 50: 1 - 0.25**3, 59: 1 - 0.25**3, 60: 1.0, 99: 1.0}
    assert {step: method.share(step) for step in shares} == shares


def test_fractions_mean_the_nearest_step():
    """0.29 of 100 steps is 28.999999999999996 in fp64, and 0.57 is 56.99999999999999."""
    options = {"begin_fraction": 0.29, "end_fraction": 0.57, "prune_every": 1, "total_steps": 100}
    method = gmp.Method(gmp.Config(**options))
    assert method.share(29) == 0.0 < method.share(30)
    assert method.share(56) < 1.0 == method.share(57)


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
            assert shares == sorted(shares)
            assert shares[-1] == 1.0


def test_training_prunes_for_good():
    """Momentum of a weight that was removed half-way must not bring it back to life."""
    for name in ("gmp", "imp"):
        torch.manual_seed(0)
        options = {"begin_fraction": 0.25, "total_steps": 12, "measure_every": 1}
        layer, method = convert(name, nn.Linear(16, 8), **options)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.05)
        phases, densities, flips, mask = [], [], [], layer.mask.clone()
        for step in range(12):
            with training_step(method, step, optimizer):
                x = torch.randn(32, 16)
                (layer(x) - x[:, :8]).square().mean().backward()
                assert not layer.weight.grad[~layer.mask].any()
            assert not (layer.mask & ~mask).any()
            assert torch.equal(layer.weight != 0, layer.mask)
            assert torch.equal(layer.weight, layer.sparse_weight)
            mask = layer.mask.clone()
            metrics = method.metrics()
            phases.append(metrics["phase"])
            densities.append(metrics["density"])
            flips.append(metrics["flip_rate"])
        assert phases[:3] == ["dense"] * 3 and phases[-1] == "sparse"
        assert densities[:3] == [1.0] * 3 and densities[-1] == 0.5
        assert flips == pytest.approx(
            [a - b for a, b in zip([1.0, *densities], densities, strict=False)]
        )
        assert int(check24(layer.weight)) == 0
        method.finalize(layer)
        assert int(check24(layer.weight)) == 0


def test_the_phase_follows_from_the_step_even_if_some_were_not_asked():
    for name in ("gmp", "imp"):
        layer, method = convert(name, nn.Linear(8, 4), total_steps=10)
        method.on_step_begin(9)
        assert method.phase() == "sparse" and not method.unfinished
        assert int(check24(layer.weight)) == 0
        _, resumed = convert(name, nn.Linear(8, 4), total_steps=10)
        assert resumed.phase() == "dense" and resumed.unfinished
        resumed.load_state_dict(method.state_dict())
        assert resumed.phase() == "sparse"


def test_distillation_is_off_unless_asked_for():
    for name in ("gmp", "imp", "one_shot"):
        assert convert(name, nn.Linear(8, 4), total_steps=4)[1].teacher is None
        taught = nn.Linear(8, 4)
        before = taught.weight.detach().clone()
        _, method = convert(name, taught, total_steps=4, kl_weight=0.67)
        assert torch.equal(method.teacher.weight, before)  # the dense model, before pruning


def test_the_smallest_numbers_of_fp16_keep_their_order():
    """They are subnormal there; none may be lifted to another's rank."""
    weight = torch.tensor([[2.0**-24, 2.0**-20, 2.0**-19, 2.0**-18]], dtype=torch.float16)
    mask = prune_towards24(weight, torch.ones(1, 4, dtype=torch.bool), 1.0)
    assert mask.tolist() == [[False, False, True, True]]
