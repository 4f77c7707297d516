"""Hard threshold and straight-through gradient."""

import pytest
import torch
from torch import nn

import methods
from common_kernels import check_nm
from methods import s_ste, ste
from methods.nn.linear import MaskedLinear
from tests.methods.loop import linear_of, training_step


def test_forward_and_mask_by_hand():
    layer = linear_of([1.0, -4.0, 3.0, 2.0, 1.0, 1.0, 1.0, 1.0])
    ste.Method(ste.Config(include=["*"])).convert(layer)
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
        layer = nn.Linear(8, 4, bias=False)
        method.convert(layer)
        # Y = Wf^T for X = I, so <C^T, Y> = <C, Wf>.
        (layer(torch.eye(8)) * c.t()).sum().backward()
        assert torch.equal(layer.weight.grad, c)


@pytest.mark.parametrize("fused", [False, True])
def test_any_pattern_is_chosen_kept_and_counted(fused):
    """Also by FusedAdamW, whose own pass knows 2:4 alone."""
    for name, options, (n, m) in (
        ("ste", {}, (4, 8)),
        ("sr_ste", {"alpha": 1e-2}, (1, 4)),
        ("one_shot", {"metric": "magnitude"}, (3, 12)),
        ("one_shot", {"metric": "wanda"}, (4, 8)),
        ("one_shot", {"metric": "sparsegpt"}, (3, 12)),
    ):
        torch.manual_seed(0)
        model = nn.ModuleDict({"fc": nn.Linear(24, 24)})
        model.forward = lambda x, fc=model["fc"]: (None, fc(x).square().sum())
        x = torch.randn(64, 24)
        method = methods.build(name, include=["fc"], n=n, m=m, **options)
        method.calibrate(model, [{"x": x}])
        method.convert(model)
        kind = methods.FusedAdamW if fused else torch.optim.AdamW
        optimizer = kind(model.parameters(), lr=0.1)
        for step in range(2):
            with training_step(method, step, optimizer):
                method.loss(model, {"x": x}).backward()
        measured = method.metrics()
        assert (measured["density"], measured["illegal_groups"]) == (n / m, 0), (name, n, m)
        assert method.pattern("fc") == (n, m)
        assert f"method={name}, pattern={n}:{m}, phase=sparse" in repr(model)
        method.finalize(model)
        assert int(check_nm(model["fc"].weight, n, m)) == 0
    with pytest.raises(ValueError, match="fp8=paper needs the pattern 2:4, not 4:8"):
        ste.Config(fp8="paper", n=4, m=8)


def test_illegal_groups_are_counted_by_the_layers_own_pattern():
    """A method of one's own has to override nothing else (docs/extending.md)."""

    class Own(MaskedLinear):
        def setup(self, name, config, dtype):
            super().setup(name, config, dtype)
            self.pattern = 4, 8

    class Method(ste.Method):
        Linear = Own

    method = Method(ste.Config(include=["*"]))
    model = nn.Linear(64, 64)
    method.convert(model)
    model.mask.zero_().view(64, 8, 8)[..., :4] = True
    model.refresh()
    assert method.metrics()["illegal_groups"] == 0 and method.pattern("") == (4, 8)
