"""Ternary training: the rule by hand, its gradients, zeros, and the model that it leaves."""

import pytest
import torch
from torch import nn

import methods
from tests.methods.loop import convert, linear_of, training_step

# Mean magnitude 2; of the second group 1.5 and, at the lower index, 1 are kept.
ROW = [4.0, -3.0, 2.5, -2.0, 1.0, -1.0, 1.0, 1.5]
SPARSE = [2.0, -2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.0]  # 1 / 2 is rounded to even, to 0
DENSE = [2.0, -2.0, 2.0, -2.0, 0.0, 0.0, 0.0, 2.0]


@pytest.mark.parametrize(("sparse", "expected"), [(True, SPARSE), (False, DENSE)])
def test_weights_by_hand(sparse, expected):
    """D counts pruned weights, too: of the kept ones alone it would be 2.375."""
    layer, method = convert("ternary", linear_of(ROW), sparse=sparse, activation_bits=0)
    assert layer.scale == 2 and layer.effective_weight()[0].tolist() == expected
    assert torch.equal(layer(torch.eye(8)), torch.tensor(expected).expand(4, 8).t())
    kept = [True, True, False, False, True, False, False, True]
    assert layer.mask[0].tolist() == (kept if sparse else [True] * 8)
    density = sum(map(bool, expected)) / 8
    found = method.metrics()
    assert found["density"] == density and found.get("illegal_groups") == (0 if sparse else None)
    assert method.capabilities.ends_dense is not sparse


def test_inputs_are_rounded_by_token_in_training_and_evaluation():
    layer, method = convert("ternary", nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, 1.0, 0.0, 0.0]).expand(4, 4))
    methods.refresh(layer)  # D is 0.5
    x = torch.tensor([[127.0, 0.4, 9.0, 9.0], [1.27, 0.016, 0.0, 0.0], [0.0] * 4])
    rounded = torch.tensor([127.0, 1.27 + 0.02, 0.0])
    torch.testing.assert_close(layer(x)[:, 0], 0.5 * rounded)
    with torch.no_grad():
        torch.testing.assert_close(layer.eval()(x)[:, 0], 0.5 * rounded)
        assert method.finalize(layer)(x)[0, 0] == 0.5 * 127.4  # a plain linear does not


def test_gradients_pass_straight_through():
    """Neither masked, nor clipped, nor scaled; the input's is that of the rounded input."""
    torch.manual_seed(0)
    layer, _ = convert("ternary", linear_of([9.0, *ROW[1:]]))
    x, dy = torch.randn(3, 8, requires_grad=True), torch.randn(3, 4)
    layer(x).backward(dy)
    step = x.detach().abs().amax(1, keepdim=True) / 127
    torch.testing.assert_close(layer.weight.grad, dy.t() @ ((x.detach() / step).round() * step))
    torch.testing.assert_close(x.grad, dy @ layer.effective_weight())


def test_zeros_stay_zeros_and_can_leave():
    """A weight of zeros has D = 0, which divides nothing; its gradient moves it."""
    layer, method = convert("ternary", nn.Linear(8, 4, bias=False))
    nn.init.zeros_(layer.weight)
    methods.refresh(layer)
    assert not layer.effective_weight().any() and not layer(torch.ones(2, 8)).any()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    with training_step(method, 0, optimizer):
        layer(torch.ones(1, 8)).sum().backward()
    assert layer.scale == 1 and layer.effective_weight()[0].tolist() == [-1.0, -1.0, 0.0, 0.0] * 2
