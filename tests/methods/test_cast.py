"""CAST: the rule of its optimizer, the dense forward pass and the folded scale."""

import math

import pytest
import torch
from torch import nn

import methods
from methods import cast
from tests.methods.loop import convert, linear_of, training_step

VALUES = [4.0, 1.0, 3.0, -2.0]  # entries 1 and 3 are pruned
LR, WD, BETAS, EPS = 1e-2, 0.1, (0.9, 0.95), 1e-8


def converted(**options):
    options = {"kl_weight": 0.0, "total_steps": 4, **options}
    return convert("cast", linear_of(VALUES), **options)


def optimizer_of(layer, method, wd=WD):
    return method.optimizer(layer.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=wd)


def test_the_rule_step_by_step():
    """Algorithm 1 in fp64 scalars: t from 0, the decay in m' and v but not in m."""
    layer, method = converted(decay=0.3, refresh_every=9)
    optimizer = optimizer_of(layer, method)
    grads = torch.randn(4, 4, 4, generator=torch.Generator().manual_seed(0))
    for step in range(4):
        with training_step(method, step, optimizer):
            layer.weight.grad = grads[step].clone()
    for column, (w, kept) in enumerate(zip(VALUES, (1, 0, 1, 0), strict=True)):
        m = v = 0.0
        for t in range(4):
            g, a = float(grads[t, 0, column]), t / 4
            w *= 1 - LR * WD
            m = BETAS[0] * m + (1 - BETAS[0]) * g
            u = m if kept else (1 - a) * m + a * 0.3 * math.copysign(1, w)
            v = BETAS[1] * v + (1 - BETAS[1]) * u * u
            root = math.sqrt(v / (1 - BETAS[1] ** (t + 1)))
            w -= LR / (1 - BETAS[0] ** (t + 1)) * u / (root + EPS)
        assert layer.weight[0, column].item() == pytest.approx(w, rel=1e-5)


def test_training_is_dense_and_evaluation_and_the_end_are_pruned_and_scaled():
    layer, method = converted()
    assert torch.equal(layer.weight_scale, torch.ones(4, 2))
    with torch.no_grad():
        layer.weight_scale.copy_(torch.tensor([2.0, 3.0]).expand(4, 2))
    methods.refresh(layer)
    y = layer(torch.eye(4))
    assert y[:, 0].tolist() == [8.0, 2.0, 9.0, -6.0]
    y.sum().backward()
    assert layer.weight.grad[0].tolist() == [2.0, 2.0, 3.0, 3.0]
    assert layer.weight_scale.grad[0].tolist() == [4.0 + 1.0, 3.0 - 2.0]
    layer.eval()
    with torch.no_grad():
        assert layer(torch.eye(4))[:, 0].tolist() == [8.0, 0.0, 9.0, 0.0]
    assert method.metrics()["pruned_magnitude"] == pytest.approx(3 / 10)
    method.finalize(layer)
    assert type(layer) is nn.Linear and layer.state_dict().keys() == {"weight"}
    assert layer.weight[0].tolist() == [8.0, 0.0, 9.0, 0.0]


def test_the_loss_is_the_papers():
    """Equation 13: temperature 1, weights that sum to 1."""
    config = cast.Config()
    assert config.task_weight + config.kl_weight == 1 and config.kl_weight == pytest.approx(1 / 3)
    assert (config.temperature, config.divergence) == (1.0, "forward")
