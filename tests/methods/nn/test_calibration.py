"""Statistics of layer inputs: by hand, whatever the batches, and what they leave behind."""

import pytest
import torch
from torch import nn

from methods.nn.calibration import collect


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))


def measure(net, *names, sizes=(100,)):
    """The statistics of these layers on 100 tokens, in batches of these sizes."""
    tokens = torch.randn(sum(sizes), 8, generator=torch.Generator().manual_seed(0))
    layers = {name: net.get_submodule(name) for name in names}
    return collect(net, layers, [{"input": part} for part in tokens.split(sizes)], hessian=True)


def test_by_hand():
    net = nn.Sequential(nn.Linear(2, 2))
    seen = {"input": torch.tensor([[[1.0, 2.0], [3.0, -1.0]]])}
    found = collect(net, {"0": net[0]}, [seen, seen], hessian=True)["0"]
    assert found.count == 4
    assert found.square_sum.tolist() == [20.0, 10.0]
    assert found.hessian.tolist() == [[20.0, -2.0], [-2.0, 10.0]]
    seen = [{"input": torch.tensor([[1.0, 3.0]])}]  # a layer that is called by keyword
    alone = collect(net[0], {"": net[0]}, seen)[""]
    assert alone.square_sum.tolist() == [1.0, 9.0] and alone.hessian is None


def test_any_split_into_batches_gives_the_sums_of_one():
    net = model()
    whole = measure(net, "0", "2")
    for sizes in ([1, 2, 3, 94], [25, 25, 25, 25]):
        cut = measure(net, "0", "2", sizes=sizes)
        for name, one in whole.items():
            assert one.count == cut[name].count == 100
            torch.testing.assert_close(cut[name].square_sum, one.square_sum, rtol=1e-5, atol=0)
            torch.testing.assert_close(cut[name].hessian, one.hessian, rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(one.hessian.diagonal(), one.square_sum, rtol=1e-5, atol=0)


def test_the_sums_of_a_bf16_model_are_those_of_its_inputs_in_fp32():
    """Summed in bf16, 4096 ones would end at 256, where adding one more is lost."""
    net = nn.Sequential(nn.Linear(2, 2)).bfloat16()
    seen = [{"input": torch.ones(512, 2, dtype=torch.bfloat16)}] * 8
    with torch.autocast("cpu", torch.bfloat16):
        found = collect(net, {"0": net[0]}, seen, hessian=True)["0"]
    assert found.square_sum.dtype == found.hessian.dtype == torch.float32
    assert found.square_sum.tolist() == [4096.0, 4096.0]
    assert found.hessian.tolist() == [[4096.0, 4096.0]] * 2


def test_the_model_is_left_as_it_was():
    net = model().train()
    net[2].eval()
    found = measure(net, "2")
    assert [m.training for m in net] == [True, True, False] and net.training
    assert not any(m._forward_pre_hooks for m in net.modules())
    assert all(p.grad is None for p in net.parameters())
    # In eval mode: with dropout on, a second pass would see other inputs.
    assert torch.equal(found["2"].square_sum, measure(net, "2")["2"].square_sum)


def test_what_cannot_be_measured_is_an_error():
    net = model()
    for seen, told in (
        ([], "no calibration token reached 0"),
        ([{"input": torch.full((1, 8), torch.inf)}], "inputs of 0 are not finite"),
    ):
        with pytest.raises(ValueError, match=told):
            collect(net, {"0": net[0]}, seen)
