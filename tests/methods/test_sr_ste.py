"""Masked decay: where it acts, what it passes through."""

import pytest
import torch
from torch import nn

from methods import bi_mask, fst, sr_ste
from tests.methods.loop import convert, linear_of, training_step


def converted(values, **options):
    return convert("sr_ste", linear_of(values), **options)


def run_adam(decay_on, alpha, steps=20, lr=1e-3, weight_decay=0.0):
    """Training with a task gradient of exactly zero; returns the change of each weight."""
    layer, method = converted([4.0, 1.0, 3.0, 2.0], alpha=alpha, decay_on=decay_on)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=lr, eps=1e-12, weight_decay=weight_decay)
    before = layer.weight.detach().clone()
    for step in range(steps):
        with training_step(method, step, optimizer):
            layer.weight.grad = torch.zeros(4, 4)
    return (layer.weight.detach() - before)[0]


def test_on_gradients_passes_through_adam():
    """Pruned weights move by lr per step whatever alpha is; kept ones by weight decay alone."""
    for alpha in (1e-4, 1e-2):
        change = run_adam("gradients", alpha)
        torch.testing.assert_close(change[[1, 3]], torch.full((2,), -20e-3), rtol=2e-2, atol=0)
        assert torch.equal(change[[0, 2]], torch.zeros(2))
    decayed = run_adam("gradients", 1e-4, weight_decay=0.1)
    expected = torch.tensor([4.0, 3.0]) * ((1 - 1e-4) ** 20 - 1)
    torch.testing.assert_close(decayed[[0, 2]], expected, rtol=1e-3, atol=0)


def test_the_default_adds_the_papers_factor_to_the_gradient():
    """SR-STE's own rule, g + 2e-4 (1 - M) W, by hand; FST and Bi-Mask state their own factors."""
    layer, method = converted([4.0, 1.0, 3.0, 2.0])
    before = layer.weight.detach().clone()
    layer.weight.grad = torch.full((4, 4), 0.5)
    method.on_gradients(0)
    expected = torch.tensor([0.5, 0.5 + 2e-4, 0.5, 0.5 + 4e-4]).expand(4, 4)
    torch.testing.assert_close(layer.weight.grad, expected, rtol=0, atol=6e-8)  # an ulp
    assert torch.equal(layer.weight.detach(), before)
    assert fst.Config().alpha == 6e-5 and bi_mask.Config().alpha == 2e-4


def test_on_weights_is_proportional_to_another_alpha_and_to_the_weight():
    for module in (sr_ste, fst, bi_mask):
        assert module.Config(decay_on="weights").alpha == 1.0
        assert module.Config(decay_on="weights", alpha=2e-4).alpha == 2e-4
    change = run_adam("weights", 1e-2)
    expected = torch.tensor([1.0, 2.0]) * ((1 - 1e-3 * 1e-2) ** 20 - 1)
    torch.testing.assert_close(change[[1, 3]], expected, rtol=2e-3, atol=1e-6)
    assert torch.equal(change[[0, 2]], torch.zeros(2))


def test_on_weights_needs_the_optimizer():
    _, method = converted([4.0, 1.0, 3.0, 2.0], decay_on="weights")
    with pytest.raises(ValueError, match=r"on_gradients\(step, optimizer\)"):
        method.on_gradients(0)
    stranger = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ValueError, match="holds the weights of the converted"):
        method.on_gradients(0, stranger)


def test_extended_sr_ste_prunes_the_output_gradient():
    """Both products of the backward pass take the two largest of four consecutive outputs of dY."""
    layer, method = converted([4.0, 1.0, 3.0, 2.0], prune_gradient=True, alpha=6e-6)
    x = torch.tensor([[1.0, 10.0, 100.0, 1000.0], [2.0, 3.0, 5.0, 7.0]], requires_grad=True)
    dy = torch.tensor([[1.0, -4.0, 3.0, 2.0], [5.0, 5.0, 5.0, 0.0]])
    kept = torch.tensor([[0.0, -4.0, 3.0, 0.0], [5.0, 5.0, 0.0, 0.0]])
    method.on_step_begin(0)
    y = layer(x)
    assert torch.equal(y, x.detach() @ torch.tensor([4.0, 0.0, 3.0, 0.0]).expand(4, 4).T)
    y.backward(dy)
    assert torch.equal(layer.weight.grad, kept.T @ x.detach())
    assert torch.equal(x.grad, kept @ torch.tensor([4.0, 0.0, 3.0, 0.0]).expand(4, 4))
