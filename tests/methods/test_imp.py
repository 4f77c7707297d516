"""Iterative magnitude pruning: the rounds. The pruning itself is tested with that of `gmp`."""

import pytest
import torch
from torch import nn

from methods import imp
from tests.methods.loop import convert


def test_rounds_keep_a_constant_share():
    """Four rounds to a half: after each, 2^(-1/4) of the weights are left."""
    method = imp.Method(imp.Config(begin_fraction=0.2, rounds=4, total_steps=100))
    assert [method.round_start(i) for i in range(4)] == [20, 40, 60, 80]
    kept = [1 - method.share(step) / 2 for step in (19, 20, 39, 40, 60, 80, 99)]
    q = 0.5**0.25
    assert kept == pytest.approx([1, q, q, q**2, q**3, q**4, q**4], abs=1e-12)
    assert method.share(80) == 1.0
    method = imp.Method(imp.Config(begin_fraction=0.0, rounds=16, total_steps=2))
    assert method.round_start(15) == 1  # the last step, though 15/16 of 2 is nearer to 2
    method = imp.Method(imp.Config(begin_fraction=0.29, total_steps=100))
    assert method.round_start(0) == 29  # of 28.999999999999996 in fp64


def test_each_round_removes_the_smallest_of_what_is_left():
    """Two rounds on 32 weights: after the first 2^(-1/2) of them are left, 23 of 32."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 4, bias=False)
    original = layer.weight.detach().clone()
    _, method = convert("imp", layer, begin_fraction=0.0, rounds=2, total_steps=4)
    left = []
    for step in range(4):
        method.on_step_begin(step)
        method.on_step_end(step)
        left.append(int(layer.weight.count_nonzero()))
    assert left == [23, 23, 16, 16]
    two_smallest = original.abs().unflatten(1, (-1, 4)).argsort(2)[..., :2]
    expected = torch.ones(4, 2, 4, dtype=torch.bool).scatter(2, two_smallest, False).flatten(1)
    assert torch.equal(layer.weight != 0, expected)
