"""CAST: the rule of its optimizer, the dense forward pass, the folded scale, and its decay when
weights and masks are sharded."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import methods
from methods import cast
from methods.nn.sharding import full
from tests.methods.loop import linear_of, training_step

VALUES = [4.0, 1.0, 3.0, -2.0]  # entries 1 and 3 are pruned
LR, WD, BETAS, EPS = 1e-2, 0.1, (0.9, 0.95), 1e-8


def converted(rows=4, **options):
    layer = linear_of(VALUES, rows)
    options = {"kl_weight": 0.0, "total_steps": 4, **options}
    method = methods.build("cast", include=["*"], **options)
    method.convert(layer)
    return layer, method


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


def test_pruned_weights_shrink_by_about_the_rate_in_each_step_whatever_lambda_is():
    sizes = []
    for decay in (4e-4, 4e-2):
        layer, method = converted(decay=decay, total_steps=40, refresh_every=99)
        optimizer = method.optimizer([layer.weight], lr=LR, eps=1e-12, weight_decay=0.0)
        for step in range(40):
            with training_step(method, step, optimizer):
                layer.weight.grad = torch.zeros(4, 4)
        assert layer.weight[0, [0, 2]].tolist() == [4.0, 3.0]
        sizes.append(layer.weight[0, [1, 3]].detach())
        assert 0 < sizes[-1][0] < 1 - 38 * LR and -2 + 38 * LR < sizes[-1][1] < 0
    torch.testing.assert_close(*sizes, rtol=1e-4, atol=0)


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


def test_the_loss_and_what_is_refused():
    """Equation 13: temperature 1, weights that sum to 1."""
    config = cast.Config()
    assert config.task_weight + config.kl_weight == 1 and config.kl_weight == pytest.approx(1 / 3)
    assert (config.temperature, config.divergence) == (1.0, "forward")
    layer, method = converted()
    layer.weight.grad = torch.zeros(4, 4)
    with pytest.raises(ValueError, match=r"CAST has its own .*AdamW lacks: .* lr=\.\.\.\)$"):
        method.on_gradients(0, torch.optim.AdamW([layer.weight]))


def decayed(mesh=None):
    """Weights, mask, second moments and metric after steps without any gradient."""
    layer, method = converted(rows=8, decay=0.3)
    if mesh is not None:
        fully_shard(layer, mesh=mesh)
    optimizer = optimizer_of(layer, method, wd=0.0)
    for step in range(4):
        with training_step(method, step, optimizer):
            layer.weight.grad = torch.zeros_like(layer.weight)
    state = optimizer.state[layer.weight]
    found = map(full, (layer.weight.detach(), layer.mask, state["exp_avg_sq"]))
    return [*found, method.metrics()["pruned_magnitude"]]


def _decayed(rank, result):
    """4 rows on each of two ranks."""
    found = decayed(dist.init_device_mesh("cpu", (2,)))
    if rank == 0:
        torch.save(found, result)


def test_the_decay_is_not_lost_where_weights_are_sharded(start_ranks, tmp_path):
    """A reproduction of others lost it, where masks and weights were cut differently."""
    start_ranks(_decayed, tmp_path / "found")
    *tensors, share = torch.load(tmp_path / "found", weights_only=True)
    *expected, alone = decayed()
    assert all(map(torch.equal, tensors, expected)) and share == alone  # summed over the ranks
    weight, mask, _ = tensors
    assert torch.equal(weight != torch.tensor(VALUES), ~mask)  # pruned ones moved, kept ones not
