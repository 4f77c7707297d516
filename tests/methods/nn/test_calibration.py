"""Statistics of layer inputs: by hand, whatever the batches, and what they leave behind."""

import pytest
import torch
from torch import nn

from methods.nn.calibration import collect


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))


def batches(sizes, width=8, seed=0):
    tokens = torch.randn(sum(sizes), width, generator=torch.Generator().manual_seed(seed))
    return [{"input": part} for part in tokens.split(sizes)]


def by_name(net, *names):
    return {name: net.get_submodule(name) for name in names}


def test_by_hand():
    net = nn.Sequential(nn.Linear(2, 2))
    seen = {"input": torch.tensor([[[1.0, 2.0], [3.0, -1.0]]])}
    found = collect(net, by_name(net, "0"), [seen, seen], hessian=True)["0"]
    assert found.count == 4
    assert found.square_sum.tolist() == [20.0, 10.0]
    assert found.hessian.tolist() == [[20.0, -2.0], [-2.0, 10.0]]


def test_a_layer_that_is_called_by_keyword():
    layer = nn.Linear(2, 2)
    seen = [{"input": torch.tensor([[1.0, 3.0]])}]
    assert collect(layer, {"": layer}, seen)[""].square_sum.tolist() == [1.0, 9.0]


def test_any_split_into_batches_gives_the_sums_of_one():
    for sizes in ([1, 2, 3, 94], [25, 25, 25, 25]):
        net = model()
        layers = by_name(net, "0", "2")
        whole = collect(net, layers, batches([100]), hessian=True)
        cut = collect(net, layers, batches(sizes), hessian=True)
        for name, layer in layers.items():
            assert whole[name].count == cut[name].count == 100
            assert whole[name].hessian.shape == (layer.in_features, layer.in_features)
            torch.testing.assert_close(
                cut[name].square_sum, whole[name].square_sum, rtol=1e-5, atol=0
            )
            torch.testing.assert_close(cut[name].hessian, whole[name].hessian, rtol=1e-5, atol=1e-4)
            diagonal = whole[name].hessian.diagonal()
            torch.testing.assert_close(diagonal, whole[name].square_sum, rtol=1e-5, atol=0)


def test_the_sums_of_a_bf16_model_are_those_of_its_inputs_in_fp32():
    """Summed in bf16, 4096 ones would end at 256, where adding one more is lost."""
    net = nn.Sequential(nn.Linear(2, 2)).bfloat16()
    seen = [{"input": torch.ones(512, 2, dtype=torch.bfloat16)}] * 8
    with torch.autocast("cpu", torch.bfloat16):
        found = collect(net, by_name(net, "0"), seen, hessian=True)["0"]
    assert found.square_sum.dtype == found.hessian.dtype == torch.float32
    assert found.square_sum.tolist() == [4096.0, 4096.0]
    assert found.hessian.tolist() == [[4096.0, 4096.0]] * 2


def test_the_model_is_left_as_it_was():
    net = model().train()
    net[2].eval()
    found = collect(net, by_name(net, "2"), batches([10]))
    assert found["2"].hessian is None
    assert [m.training for m in net] == [True, True, False] and net.training
    assert not any(m._forward_pre_hooks for m in net.modules())
    assert all(p.grad is None for p in net.parameters())
    # In eval mode: with dropout on, a second pass would see other inputs.
    again = collect(net, by_name(net, "2"), batches([10]))
    assert torch.equal(found["2"].square_sum, again["2"].square_sum)


def test_what_cannot_be_measured_is_an_error():
    net = model()
    with pytest.raises(ValueError, match="no calibration token reached 0"):
        collect(net, by_name(net, "0"), [])
    with pytest.raises(ValueError, match="inputs of 0 are not finite"):
        collect(net, by_name(net, "0"), [{"input": torch.full((1, 8), torch.inf)}])
