"""Hard threshold and straight-through gradient."""

import torch
from torch import nn

from methods import s_ste, ste


def converted(method, values=None):
    layer = nn.Linear(8, 4, bias=False)
    if values is not None:
        with torch.no_grad():
            layer.weight.copy_(values)
    method.convert(layer)
    return layer


def test_forward_and_mask_by_hand():
    values = torch.tensor([[1.0, -4.0, 3.0, 2.0, 1.0, 1.0, 1.0, 1.0]]).expand(4, 8)
    layer = converted(ste.Method(ste.Config(include=["*"])), values)
    # Ties go to the lower index.
    expected = torch.tensor([0.0, -4.0, 3.0, 0.0, 1.0, 1.0, 0.0, 0.0]).expand(4, 8)
    assert torch.equal(layer.effective_weight(), expected)
    x = torch.eye(8)
    assert torch.equal(layer(x), expected.t())
    with torch.no_grad():
        assert torch.equal(layer(x), expected.t())


def test_gradient_is_that_of_the_product_neither_masked_nor_scaled():
    """With loss = <C, Wf> the weight's gradient is C: for hard STE and for S-STE (not beta C)."""
    torch.manual_seed(0)
    c = torch.randn(4, 8)
    for method in (
        ste.Method(ste.Config(include=["*"])),
        s_ste.Method(s_ste.Config(include=["*"], mvue="off")),
    ):
        layer = converted(method)
        # Y = Wf^T for X = I, so <C^T, Y> = <C, Wf>.
        (layer(torch.eye(8)) * c.t()).sum().backward()
        assert torch.equal(layer.weight.grad, c)


def test_masks_follow_the_weights_and_the_end_is_sparse():
    torch.manual_seed(0)
    method = ste.Method(ste.Config(include=["*"]))
    layer = converted(method)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(4, 8))
    method.on_step_end(0)
    assert method.metrics()["density"] == 0.5
    assert method.metrics()["illegal_groups"] == 0
    before = layer.effective_weight().clone()
    method.finalize(layer)
    assert torch.equal(layer.weight, before)
    assert list(layer.state_dict()) == ["weight"]
