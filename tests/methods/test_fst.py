"""FST: transposable masks, their schedule, the decay, and the dense phase that ends it."""

import math

import torch
from torch import nn

from common_kernels import check24, transposable_mask24
from methods import fst
from tests.methods.loop import convert, training_step


def converted(weight=None, bias=False, **options):
    torch.manual_seed(0)
    layer = nn.Linear(16, 8, bias=bias)
    if weight is not None:
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias)
        layer.weight.data = weight.clone()
    return convert("fst", layer, **{"dense_fraction": 0.0, **options})


def step_of(method, model, step, parts=1, forward=None):
    """One optimizer step on `parts` micro-batches; SGD, so that equal gradients show."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randn(12, 16, generator=torch.Generator().manual_seed(step))
    with training_step(method, step, optimizer):
        for part in x.chunk(parts):
            method.open_micro_batch()
            ((model if forward is None else forward)(part).square().sum() / len(x)).backward()


def test_mask_by_hand():
    """Row by row the first two columns win three times; a column may keep two of them."""
    layer, _ = converted(torch.tensor([[9.0, 8, 1, 1], [9, 8, 1, 1], [5, 4, 2, 1], [1, 1, 1, 1]]))
    kept = [[9.0, 8, 0, 0], [9, 8, 0, 0], [0, 0, 2, 1], [0, 0, 1, 1]]
    assert torch.equal(layer.sparse_weight, torch.tensor(kept))


def test_both_products_have_a_sparse_weight():
    """dX multiplies by the operand of the forward product, which is 2:4 along `out` as well."""
    for algorithm in ("exact", "greedy", "two_approx"):
        layer, _ = converted(torch.randn(32, 64), algorithm=algorithm)
        assert torch.equal(layer.mask, transposable_mask24(layer.weight.detach(), algorithm))
        fprop, dgrad = layer.operands(torch.float32)
        assert int(check24(fprop.matrix, dim=1)) == 0
        assert dgrad is fprop and int(check24(dgrad.matrix, dim=0)) == 0
        if algorithm == "exact":
            assert int(layer.mask.sum()) == 32 * 64 // 2


def test_dense_start():
    """steps - round(fraction * steps); half a step is rounded to the even number."""
    asked = (0, 1, 2, 7, 8, 9, 10, 11, 249_999, 250_000, 300_000)
    for steps, fraction, start in (
        (300_000, 1 / 6, 250_000), (12, 1 / 6, 10), (10, 0.25, 8), (10, 0.28, 7), (10, 1.0, 0),
        (3, 1 / 6, 2), (10, 0.0, math.inf),
    ):  # fmt: skip
        method = fst.Method(fst.Config(total_steps=steps, dense_fraction=fraction))
        assert [step for step in asked if method.dense_at(step)] == [s for s in asked if s >= start]


def test_the_order_and_the_end_of_the_phases():
    """A dense phase has at least one step, also where 0.01 of 12 rounds to 0."""
    for fraction, at, dense_steps in (
        (1 / 12, "end", [11]), (0.25, "end", [9, 10, 11]), (0.25, "start", [0, 1, 2]),
        (0.01, "end", [11]), (0.01, "start", [0]), (0.0, "end", []),
    ):  # fmt: skip
        options = {"dense_fraction": fraction, "dense_phase": at, "total_steps": 12}
        layer, method = converted(alpha=0.1, refresh_every=3, **options)
        phases = []
        for step in range(12):
            step_of(method, layer, step)
            phases.append(method.phase())
        assert [step for step in range(12) if phases[step] == "dense"] == dense_steps
        assert method.capabilities.ends_dense == (11 in dense_steps) and not method.unfinished
        assert method.metrics()["density"] == (1.0 if method.capabilities.ends_dense else 0.5)
        weight = layer.weight.detach().clone()
        method.finalize(layer)
        if 11 in dense_steps:
            assert type(layer) is nn.Linear and torch.equal(layer.weight, weight)
            assert bool(weight.all())
        else:
            assert int(check24(layer.weight, dim=0)) == int(check24(layer.weight, dim=1)) == 0
            assert bool((layer.weight == 0).any())


def test_in_the_dense_phase_there_is_no_decay_and_no_sample():
    layer, method = converted(alpha=0.1, total_steps=4, dense_fraction=0.5)
    x, dy = torch.randn(8, 16), torch.randn(8, 8)
    for step in range(4):
        method.on_step_begin(step)
        method.open_micro_batch()
        layer.weight.grad = None
        layer(x).backward(dy)
        gradient = layer.weight.grad.clone()
        method.on_gradients(step)
        decayed, whole = not torch.equal(layer.weight.grad, gradient), dy.t() @ x
        sampled = bool((gradient - whole).abs().max() > 0.1)
        assert (decayed, sampled) == (step < 2, step < 2)
        method.on_step_end(step)
