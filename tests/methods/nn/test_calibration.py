"""Statistics of layer inputs: by hand, whatever the batches, and what they leave behind."""

import pytest
import torch
from torch import nn

from methods.nn.calibration import collect


def test_by_hand():
    net = nn.Sequential(nn.Linear(2, 2))
    seen = torch.tensor([[[1.0, 2.0], [3.0, -1.0], [2.0, 0.0]]])
    for cuts in ((3,), (1, 2), (1, 1, 1)):  # whatever the batches
        batches = [{"input": part} for part in seen.split(cuts, dim=1)]
        found = collect(net, {"0": net[0]}, batches, hessian=True)["0"]
        assert found.count == 3
        assert found.square_sum.tolist() == [14.0, 5.0]
        assert found.hessian.tolist() == [[14.0, -1.0], [-1.0, 5.0]]
    seen = [{"input": torch.tensor([[1.0, 3.0]])}]  # a layer that is called by keyword
    alone = collect(net[0], {"": net[0]}, seen)[""]
    assert alone.square_sum.tolist() == [1.0, 9.0] and alone.hessian is None


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
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4)).train()
    net[2].eval()
    seen = [{"input": torch.randn(10, 8)}]
    found, again = (collect(net, {"2": net[2]}, seen)["2"] for _ in range(2))
    assert [m.training for m in net] == [True, True, False] and net.training
    assert not any(m._forward_pre_hooks for m in net.modules())
    assert all(p.grad is None for p in net.parameters())
    # In eval mode: with dropout on, a second pass would see other inputs.
    assert torch.equal(found.square_sum, again.square_sum)


def test_what_cannot_be_measured_is_an_error():
    net = nn.Sequential(nn.Linear(8, 16))
    with pytest.raises(ValueError, match="no calibration token reached 0"):
        collect(net, {"0": net[0]}, [])
