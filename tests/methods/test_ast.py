"""AST: masks, their timing, the three routes of the decay, defects of the released code."""

import math

import pytest
import torch
from torch import nn

import methods
from common_kernels import nm_mask
from methods import ast
from tests.methods.loop import convert, linear_of, training_step


def converted(values=(4.0, 1.0, 3.0, 2.0), **options):
    """One linear [4, 4], all rows equal; nothing but the mask and its decay."""
    return convert("ast", linear_of(values), **{"kl_weight": 0.0, "ramp_steps": 0, **options})


def train(layer, method, grad, steps=1, **options):
    """Steps with a gradient that is given by the step; returns the change of the weights."""
    before = layer.weight.detach().clone()
    optimizer = method.optimizer([layer.weight], **{"lr": 1e-3, "weight_decay": 0.0, **options})
    for step in range(steps):
        with training_step(method, step, optimizer):
            layer.weight.grad = grad(step)
    return layer.weight.detach() - before


def zero(step):
    return torch.zeros(4, 4)


def wanda(layer, batches):
    method = ast.Method(ast.Config(include=["*"], metric="wanda", kl_weight=0.0, ramp_steps=0))
    method.calibrate(layer, batches)
    method.convert(layer)
    return layer.mask


def test_the_wanda_mask_by_hand():
    layer = linear_of([4.0, 3.0, 2.0, 1.0])
    # Norms 1, 1, 2, 5: scores 4, 3, 4, 5.
    inputs = torch.tensor([[1.0, 1.0, 2.0, 3.0], [0.0, 0.0, 0.0, 4.0]])
    assert wanda(layer, [{"input": inputs}])[0].tolist() == [True, False, False, True]
    assert not torch.equal(layer.mask, nm_mask(layer.weight))


def test_the_norms_are_those_of_the_dense_model_and_are_saved():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 4))
    x = torch.randn(32, 16)
    dense_inputs = model[:2](x).detach()
    method = ast.Method(ast.Config(include=["*"], metric="wanda", kl_weight=0.0, ramp_steps=0))
    method.calibrate(model, [{"input": x}])
    method.convert(model)
    expected = dense_inputs.square().mean(0).sqrt()
    torch.testing.assert_close(model[2].input_norm, expected, rtol=1e-5, atol=0)
    assert "2.input_norm" in model.state_dict()


def test_lambda_rises_linearly_and_stays():
    for options, values in (
        ({"alpha": 6e-5, "ramp_steps": 3000}, {1500: 3e-5, 3000: 6e-5, 3001: 6e-5}),
        ({"total_steps": 40000}, {0: 0.0, 2500: 2.5e-5, 10000: 1e-4, 39999: 1e-4}),
        # 0.29 of 100 is 28.999999999999996 in fp64: the nearest step, 29
        ({"ramp_fraction": 0.29, "total_steps": 100}, {28: 28 / 29 * 1e-4, 29: 1e-4}),
        ({"ramp_steps": 0}, {0: 1e-4, 1: 1e-4}),
    ):
        method = ast.Method(ast.Config(**options))
        for step, value in values.items():
            assert method.decay(step) == pytest.approx(value, rel=1e-12, abs=0)


def test_pure_decay_tells_the_routes_apart():
    """After one step with lr 1e-3 from a fresh state, for pruned weights 1 and 2."""
    expected = {
        # lr / (1 - b1), whatever lambda and the weight: u / sqrt(u^2) is a sign.
        "decoupled_first_moment": lambda alpha: [1e-2, 1e-2],
        # lr, as any gradient gives it in Adam's first step.
        "gradient": lambda alpha: [1e-3, 1e-3],
        "decoupled": lambda alpha: [1e-3 * alpha, 2e-3 * alpha],
    }
    for route, sizes in expected.items():
        for alpha in (1e-2, 1e-1):
            layer, method = converted(decay_route=route, alpha=alpha)
            change = train(layer, method, zero)[0]
            assert not change[[0, 2]].any()  # kept ones keep their bits, pruned ones shrink
            want = -torch.tensor(sizes(alpha))
            torch.testing.assert_close(change[[1, 3]], want, rtol=2e-3, atol=0)


def test_the_rule_of_the_paper_step_by_step():
    """Two steps in fp64 scalars, weight decay and both moments included."""
    lr, wd, beta1, beta2, eps, alpha = 1e-2, 0.1, 0.9, 0.95, 1e-8, 0.3
    layer, method = converted(alpha=alpha, refresh_every=0)
    grads = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0))
    options = {"lr": lr, "weight_decay": wd, "betas": (beta1, beta2), "eps": eps}
    train(layer, method, lambda step: grads[step].clone(), steps=2, **options)
    for column, (w, kept) in enumerate([(4.0, 1), (1.0, 0), (3.0, 1), (2.0, 0)]):
        m = v = 0.0
        for t, g in enumerate(grads[:, 0, column].tolist(), start=1):
            w *= 1 - lr * wd
            m = beta1 * m + (1 - beta1) * g
            u = m + alpha * (1 - kept) * w
            v = beta2 * v + (1 - beta2) * u * u
            w -= lr / (1 - beta1**t) * u / (math.sqrt(v / (1 - beta2**t)) + eps)
        assert layer.weight[0, column].item() == pytest.approx(w, rel=1e-5)


def test_weights_without_a_mask_follow_adamw():
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 8)) for _ in range(2))
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    a, b = ast.AdamW([ours], **options), torch.optim.AdamW([theirs], **options)
    for grad in torch.randn(10, 8, generator=torch.Generator().manual_seed(0)):
        ours.grad, theirs.grad, a.masks = grad, grad.clone(), {}
        a.step(), b.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert ast.AdamW([ours]).defaults.items() <= torch.optim.AdamW([ours]).defaults.items()


def test_the_optimizer_that_the_route_needs():
    layer, method = converted()
    assert isinstance(method.optimizer([layer.weight], lr=1e-3, fused=True), ast.AdamW)
    layer.weight.grad = zero(0)
    with pytest.raises(ValueError, match=r"AdamW lacks: .* method\.optimizer\(parameters, lr="):
        method.on_gradients(0, torch.optim.AdamW([layer.weight]))
    optimizer = method.optimizer([layer.weight], lr=1e-3)
    for _ in range(2):  # the masks of the last step are not those of the next one
        with pytest.raises(RuntimeError, match=r"call method\.on_gradients"):
            optimizer.step()
        method.on_gradients(0, optimizer)
        optimizer.step()
    layer, method = converted(decay_route="decoupled")
    assert type(method.optimizer([layer.weight], lr=1e-3)) is torch.optim.AdamW


def test_the_end_has_zeros_of_the_last_mask_in_use():
    """The released checkpoints hold the dense weights, and a mask chosen anew from them can
    differ from the one in use."""
    layer, method = converted(refresh_every=10)
    with torch.no_grad():
        layer.weight[:, 1] = 9.0  # the largest now, but no refresh is due
    method.on_step_end(0)
    method.finalize(layer)
    assert layer.weight[0].tolist() == [4.0, 0.0, 3.0, 0.0]


def test_a_static_mask_never_changes():
    layer, method = converted(refresh_every=0, alpha=0.0, decay_route="gradient")
    mask = layer.mask.clone()
    for step in range(20):
        method.on_step_begin(step)
        with torch.no_grad():
            layer.weight.copy_(torch.randn(4, 4))
        method.on_step_end(step)
    methods.refresh(layer)  # of an averaged copy, say
    assert torch.equal(layer.mask, mask)
    assert torch.equal(layer.sparse_weight, layer.weight.detach() * mask)
