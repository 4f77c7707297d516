"""STEP: the dense phase, when it ends, and the update with a frozen second moment."""

import math

import pytest
import torch
from torch import nn

from common_kernels import check24
from tests.methods.loop import convert, training_step

BETAS = (0.9, 0.75)  # a window of 4 steps


def network():
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))


def converted(**options):
    torch.manual_seed(0)
    model, method = convert("step", network(), **{"include": ["0"], "total_steps": 20, **options})
    optimizer = method.optimizer(model.parameters(), lr=1e-2, betas=BETAS)
    return model, method, optimizer


def train(model, method, optimizer, steps):
    for number in steps:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(number))
        with training_step(method, number, optimizer):
            model(x).square().mean().backward()


def one_step(model, method, optimizer, number, gradient):
    """A step with this gradient of the converted weight, an entry or a matrix."""
    with training_step(method, number, optimizer):
        model[0].weight.grad = torch.ones(8, 8) * gradient


def test_phase_1_is_dense_adamw():
    model, method, optimizer = converted()
    assert method.metrics()["density"] == 1.0  # before the first step, too
    torch.manual_seed(0)
    plain, reference = convert("dense", network(), include=["0"])
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=BETAS)
    train(model, method, optimizer, range(10))
    train(plain, reference, adamw, range(10))
    assert method.phase() == "dense"
    assert method.metrics()["density"] == 1.0
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_change_of_the_second_moment_by_hand():
    """v starts at 0. g = 2 makes it 0.25 * 4 = 1, then g = 4 makes it 0.75 + 0.25 * 16 = 4.75.

    Where g stays 2 the second change is 1.75 - 1 = 0.75.
    """
    model, method, optimizer = converted()
    gradient = torch.full((8, 8), 2.0)
    one_step(model, method, optimizer, 0, gradient)
    gradient[0] = 4.0  # one row of eight
    one_step(model, method, optimizer, 1, gradient)
    second = (3.75 + 7 * 0.75) / 8
    assert method.changes == pytest.approx([1.0, second], rel=1e-6)
    moment = optimizer.state[model[0].weight]["exp_avg_sq"]
    torch.testing.assert_close(moment[:2, 0], torch.tensor([4.75, 1.75]))


def test_the_window():
    """round(1 / (1 - beta2)); int() of it gives 19 for 0.95 and 999 for 0.999."""
    for beta2, window in ((0.75, 4), (0.95, 20)):
        model, method, optimizer = converted(total_steps=10**6)
        optimizer.param_groups[0]["betas"] = (0.9, beta2)
        for number in range(window + 2):
            model[0].weight.grad = torch.full((8, 8), float(number))
            method.on_gradients(number, optimizer)
        assert len(method.changes) == window
        # The oldest were dropped. Without optimizer.step() v is 0 and the change (1 - beta2) g^2.
        assert method.changes[0] == pytest.approx((1 - beta2) * 2.0**2, rel=1e-5)


def test_phase_1_ends_between_its_bounds():
    """20 steps: at least 2 and at most 10 of them are dense by default; 7 of 15, below a half."""
    for options, gradient, start in (
        ({}, 0.0, 2),
        ({}, 1.0, 10),
        ({"total_steps": 15}, 1.0, 7),
        ({"min_fraction": 0.0}, 0.0, 1),
    ):
        model, method, optimizer = converted(**options)
        phases = []
        for number in range(12):
            # Growing, so that v never comes to rest.
            one_step(model, method, optimizer, number, gradient * 2.0**number)
            phases.append(method.phase())
        assert phases == ["dense"] * start + ["sparse"] * (12 - start)
        assert method.start == start


def test_the_threshold_is_adams_eps():
    """v grows by the same amount in every step: just below or above eps."""
    for factor, start in ((0.99, 2), (1.01, 10)):
        model, method, optimizer = converted()
        group = optimizer.param_groups[0]
        group["eps"], moment = 1e-4, 0.0
        for number in range(11):
            # g^2 - v = 4 * change
            gradient = math.sqrt(moment + 4 * factor * 1e-4)
            one_step(model, method, optimizer, number, gradient)
            moment += factor * 1e-4
        assert method.start == start


def test_update_with_the_frozen_moment_by_hand():
    for fused in (False, True):
        model, method, _ = converted(min_fraction=0.1, max_fraction=0.1)
        optimizer = method.optimizer(
            model.parameters(), lr=1e-2, betas=BETAS, weight_decay=0.1, fused=fused
        )
        train(model, method, optimizer, range(2))
        weight = model[0].weight
        assert method.phase() == "dense" and method.start == 2
        state = {k: v.clone() for k, v in optimizer.state[weight].items()}
        bias_moment = optimizer.state[model[0].bias]["exp_avg_sq"].clone()
        before = weight.detach().double()

        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(2))
        method.on_step_begin(2)
        assert int(check24(model[0].sparse_weight)) == 0
        model(x).square().mean().backward()
        gradient = weight.grad.double()
        method.on_gradients(2, optimizer)
        optimizer.step()

        after = optimizer.state[weight]
        assert torch.equal(after["exp_avg_sq"], state["exp_avg_sq"])
        assert float(after["step"]) == 3
        mean = 0.9 * state["exp_avg"].double() + 0.1 * gradient
        torch.testing.assert_close(after["exp_avg"].double(), mean, rtol=1e-5, atol=1e-9)
        denominator = state["exp_avg_sq"].double().sqrt() + 1e-8**0.75
        expected = before * (1 - 1e-2 * 0.1) - 1e-2 / (1 - 0.9**3) * mean / denominator
        torch.testing.assert_close(weight.double(), expected, rtol=1e-5, atol=1e-7)
        # The other parameters keep AdamW's rule.
        assert not torch.equal(optimizer.state[model[0].bias]["exp_avg_sq"], bias_moment)
        assert float(optimizer.state[model[0].bias]["step"]) == 3


def test_optimizers_without_adams_moments_are_refused_in_the_first_step():
    model, method, _ = converted()
    assert method.capabilities.needs_adamw  # drivers ask this before any work starts
    model[0].weight.grad = torch.ones(8, 8)
    weights = list(model.parameters())
    for optimizer, message in (
        (torch.optim.SGD(weights, lr=0.1), r"torch\.optim\.AdamW.*not of a SGD"),
        (torch.optim.Adam(weights, weight_decay=0.1), "not of a Adam;"),  # decays the gradient
        (torch.optim.AdamW(weights, amsgrad=True), "without amsgrad"),
    ):
        with pytest.raises(ValueError, match=message):
            method.on_gradients(0, optimizer)


def test_a_step_that_a_scaler_skips_changes_nothing():
    """The converted linear's gradient is not finite, or another one's."""
    for phase, where in (("dense", 0), ("sparse", 2)):
        model, method, optimizer = converted(min_fraction=0.1, max_fraction=0.1)
        train(model, method, optimizer, range(1 if phase == "dense" else 4))
        assert method.phase() == phase
        weights, state = [p.detach().clone() for p in model.parameters()], method.state_dict()
        method.on_step_begin(4)
        model(torch.randn(16, 8)).square().mean().backward()
        model[where].weight.grad[0, 0] = float("inf")
        method.on_gradients(4, optimizer)
        assert method.state_dict() == state
        assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
        assert model[0].weight.grad is not None  # left for the scaler to see
