"""One-shot pruning: the metrics, calibration, and a mask that holds during fine-tuning."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import methods
from common_kernels import check24
from methods.nn import learnt
from methods.nn.learnt import patterns, prox24, soft_mask
from methods.nn.sparsegpt import BLOCK, prune
from methods.one_shot import LEARNT, METRICS
from tests.methods.loop import training_step


def correlated(tokens, features, seed=0, dtype=torch.float32):
    """Inputs whose features have very different sizes and are far from independent."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(features, features, generator=generator, dtype=dtype)
    scales = torch.logspace(-1, 1, features, dtype=dtype)[
        torch.randperm(features, generator=generator)
    ]
    sources = torch.randn(tokens, features, generator=generator, dtype=dtype) * scales
    return sources @ mix / features**0.5


class Net(nn.Module):
    """Two linears; takes and gives what a method expects of a model."""

    def __init__(self, width=16, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.mlp = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, x, target=None):
        y = self.mlp(x)
        return y, None if target is None else F.mse_loss(y, target)


def build(metric, **options):
    if metric in LEARNT:
        options = {"mask_steps": 3, **options}
    return methods.build("one_shot", metric=metric, **options)


def converted(metric, batches=None, **options):
    model = Net()
    method = build(metric, **options)
    if metric != "magnitude":
        x = correlated(256, 16)
        method.calibrate(model, [{"x": x, "target": x}] if batches is None else batches)
    method.convert(model)
    return model, method


def obs_reference(weight, hessian, damping, grouped):
    """The sweep of the paper, column by column, with the inverse of what is left taken anew."""
    w, columns = weight.clone(), weight.shape[1]
    h = hessian + damping * hessian.diagonal().mean() * torch.eye(columns, dtype=hessian.dtype)
    mask = torch.ones_like(w, dtype=torch.bool)
    for j in range(columns):
        if j % 4 == 0 and j < grouped:
            # What removing one entry would cost now, its own update included: w_p^2 / [H_F^-1]_pp
            # with F the columns from p on.
            cost = [w[:, p] ** 2 / torch.linalg.inv(h[p:, p:])[0, 0] for p in range(j, j + 4)]
            cheapest = torch.stack(cost, dim=1).argsort(dim=1)[:, :2]
            mask[:, j : j + 4].scatter_(1, cheapest, False)
        inverse = torch.linalg.inv(h[j:, j:])
        error = torch.where(mask[:, j], 0.0, w[:, j] / inverse[0, 0])
        w[:, j:] -= error[:, None] * inverse[0]
    return mask, torch.where(mask, w, 0.0)


def test_sparsegpt_equals_the_surgeon_step_by_step():
    """Blocks and the Cholesky factor are a matter of speed; 140 columns make two blocks. The last
    columns can stay dense and are updated."""
    for columns, grouped in ((16, 16), (16, 8), (BLOCK + 12, BLOCK + 12)):
        torch.manual_seed(0)
        weight = torch.randn(6, columns, dtype=torch.float64)
        x = correlated(4 * columns, columns, dtype=torch.float64)
        hessian = x.t() @ x
        mask, updated = prune(weight, hessian, damping=0.01, grouped=grouped)
        expected_mask, expected = obs_reference(weight, hessian, 0.01, grouped)
        assert torch.equal(mask, expected_mask)
        torch.testing.assert_close(updated, expected, rtol=1e-7, atol=1e-9)
        kept = torch.tensor([2] * (grouped // 4) + [4] * ((columns - grouped) // 4))
        assert torch.equal(mask.unflatten(1, (-1, 4)).sum(2), kept.expand(6, -1))


def test_inputs_that_never_fire_and_too_few_tokens():
    """A singular Hessian: four tokens, and a feature that is always zero."""
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        weight, x = torch.randn(4, 8), torch.randn(4, 8)
        x[:, 5] = 0.0
        mask, updated = prune(weight.to(dtype), x.t() @ x)
        assert updated.dtype == dtype
        assert updated.isfinite().all()
        assert not mask[:, 5].any()
        assert int(check24(updated)) == 0


def prox_objective(x, w, penalty):
    """ProxSparse's objective of each group of four, for x and w [..., 4]."""
    products = [x[..., [*c]].abs().prod(-1) for c in itertools.combinations(range(4), 3)]
    return (x - w).square().sum(-1) / 2 + penalty * sum(products)


def test_no_point_of_a_grid_is_better_than_the_proximal_step():
    torch.manual_seed(0)
    w = torch.randn(2, 48, dtype=torch.float64)
    share = torch.linspace(0, 1, 13, dtype=torch.float64)
    grid = torch.cartesian_prod(*[share] * 4)  # a solution shrinks entries and keeps their signs
    counts = set()
    for penalty in (0.1, 0.5, 1.0, 3.0):
        found = prox24(w, penalty)
        assert found.shape == w.shape and not (found * w < 0).any()
        for x, z in zip(found.view(-1, 4), w.view(-1, 4), strict=True):
            least = prox_objective(grid * z, z, penalty).min()
            assert prox_objective(x, z, penalty) <= least + 1e-12
            counts.add(int(x.count_nonzero()))
    assert counts == {2, 3, 4}
    assert torch.equal(prox24(w, 0.0), w)


def test_the_proximal_step_by_hand():
    """Three equal entries x solve x = 1 - x^2 / 2; with penalty 2 the third one is worth less than
    what it costs."""
    w = torch.tensor([[1.0, 0.0, -1.0, 1.0]])
    x = math.sqrt(3) - 1
    torch.testing.assert_close(prox24(w, 0.5), torch.tensor([[x, 0.0, -x, x]]))
    assert prox24(w, 2.0).tolist() == [[1.0, 0.0, -1.0, 0.0]]


def test_the_expected_gumbel_mask_by_hand():
    """At the end pattern 01 is twice as likely as each of the other five: 0 and 1 stay with
    probability 4/7, 2 and 3 with 3/7. Equal logits keep each entry with 1/2 at any time."""
    table, count = patterns(2, 4), 100_000
    assert table[0].tolist() == [1, 1, 0, 0] and table.sum(0).tolist() == [3] * 4
    generator = torch.Generator().manual_seed(0)
    logits = torch.zeros(count, 6)
    for done, first, wanted in ((0.0, 0.0, [1 / 2] * 4), (1.0, math.log(2) / 500, [4 / 7, 3 / 7])):
        logits[:, 0] = first
        mask = soft_mask(logits, table, done, generator)
        torch.testing.assert_close(mask.sum(1), torch.full((count,), 2.0))
        expected = torch.tensor(wanted).repeat_interleave(4 // len(wanted))
        assert (mask.mean(0) - expected).abs().max() < 6 / math.sqrt(count)


def test_learnt_masks_lower_the_loss_and_change_no_weight():
    x = correlated(256, 16)
    dense = Net()
    with torch.no_grad():
        batch = {"x": x, "target": dense.mlp(x)}
    found = {}
    options = {"mask_steps": 150, "mask_learning_rate": 1e-3, "penalty": 0.03, "prior": "magnitude"}
    for metric in ("magnitude", "proxsparse", "maskllm"):
        model, method = converted(metric, [batch], **options)
        assert all(p.grad is None for p in model.parameters()) and model.training
        for i in (0, 2):
            layer = model.mlp[i]
            assert torch.equal(layer.weight, torch.where(layer.mask, dense.mlp[i].weight, 0.0))
        found[metric] = method.loss(model, batch).item()
    assert max(found["proxsparse"], found["maskllm"]) < 0.8 * found["magnitude"]


def test_maskllm_starts_from_its_prior(monkeypatch):
    monkeypatch.setattr(learnt, "PRIOR_STRENGTH", 100.0)  # above all noise
    for metric in ("magnitude", "wanda", "sparsegpt"):
        model, _ = converted("maskllm", prior=metric, mask_learning_rate=0.0)
        own, _ = converted(metric)
        assert torch.equal(model.mlp[0].mask, own.mlp[0].mask)
        # SparseGPT's updates of the first layer, which a prior leaves out, change the second.
        assert torch.equal(model.mlp[2].mask, own.mlp[2].mask) == (metric != "sparsegpt")


def test_wanda_by_hand():
    """|w| times the norm of its input: 4 * 1, 3 * 2, 2 * 4, 1 * 5."""
    model = nn.Module()
    model.mlp = nn.Linear(4, 4, bias=False)
    model.forward = lambda x: model.mlp(x)
    with torch.no_grad():
        model.mlp.weight.copy_(torch.tensor([4.0, -3.0, 2.0, 1.0]).expand(4, 4))
    method = build("wanda", include=["*"])
    # Norms over both batches: (1, 2, 4, 5).
    first, second = torch.diag(torch.tensor([1.0, 2.0, 4.0, 3.0])), torch.zeros(1, 4)
    second[0, 3] = 4.0
    method.calibrate(model, [{"x": first}, {"x": second}])
    method.convert(model)
    assert torch.equal(model.mlp.weight[0], torch.tensor([0.0, -3.0, 2.0, 0.0]))


def test_later_layers_are_measured_behind_pruned_ones():
    """The papers do so; statistics of the dense model would give another second layer."""
    batch = correlated(256, 16)
    model, _ = converted("sparsegpt", [{"x": batch}])
    dense = Net()
    for inputs, same in ((dense.mlp[:2], False), (model.mlp[:2], True)):
        with torch.no_grad():
            h = inputs(batch)
        _, expected = prune(dense.mlp[2].weight, h.t() @ h)
        assert torch.allclose(model.mlp[2].weight, expected, atol=1e-5) is same


@pytest.mark.parametrize("metric", METRICS)
def test_zeros_stay_under_momentum_decay_and_clipping(metric):
    """The gradient is masked before it is clipped: removed weights do not shorten the step."""
    model, method = converted(metric)
    layers, masks = model.mlp[::2], [layer.mask.clone() for layer in model.mlp[::2]]
    for layer, mask, dense in zip(layers, masks, Net().mlp[::2], strict=True):
        assert (mask.unflatten(1, (-1, 4)).sum(-1) == 2).all()
        assert torch.equal(layer.weight != 0, mask) and torch.equal(layer.bias, dense.bias)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    x = correlated(64, 16, seed=1)
    for step in range(4):
        with training_step(method, step, optimizer):
            method.loss(model, {"x": x, "target": x}).backward()
            for layer, mask in zip(layers, masks, strict=True):
                assert not layer.weight.grad[~mask].any() and layer.weight.grad[mask].any()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for layer, mask in zip(layers, masks, strict=True):
        assert torch.equal(layer.mask, mask) and torch.equal(layer.weight != 0, mask)
    assert method.metrics()["flip_rate"] == 0.0
