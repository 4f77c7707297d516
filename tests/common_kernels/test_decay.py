import pytest
import torch

from common_kernels import masked_decay_
from tests.each import each

INF, NAN = float("inf"), float("nan")
MASK = torch.tensor([True, False, True, False])


def test_by_hand():
    grad = torch.ones(4)
    got = masked_decay_(grad, torch.tensor([1.0, 2, 3, 4]), MASK, 0.03)
    assert got is grad
    assert torch.allclose(grad, torch.tensor([1, 1.06, 1, 1.12]), rtol=2**-23, atol=0)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@each("alpha", [0.03, -0.03, 0.0])
def test_kept_entries_keep_their_bits(alpha):
    grad = torch.tensor([-0.0, 0.0, NAN, INF, 1e-45, -3.0])
    weight = torch.tensor([INF, NAN, 1.0, -INF, 2.0, 3.0])
    after = masked_decay_(grad.clone(), weight, torch.ones(6, dtype=torch.bool), alpha)
    assert same_bits(after, grad)


def test_zero_alpha_changes_no_bit():
    grad = torch.tensor([-0.0, 1.0, NAN, -0.0])
    weight = torch.tensor([INF, NAN, 1.0, 2.0])
    assert same_bits(masked_decay_(grad.clone(), weight, MASK, 0.0), grad)


def test_errors_and_empty_tensors():
    empty = torch.empty(0, 4)
    assert masked_decay_(empty, empty, empty.bool(), 1.0) is empty
    with pytest.raises(ValueError, match=r"grad and weight.*\(4,\) and \(8,\)"):
        masked_decay_(torch.ones(4), torch.ones(8), MASK, 1.0)
    with pytest.raises(ValueError, match=r"grad and mask.*\(8,\) and \(4,\)"):
        masked_decay_(torch.ones(8), torch.ones(8), MASK, 1.0)
    with pytest.raises(TypeError, match=r"mask must be bool, not torch\.int32"):
        masked_decay_(torch.ones(4), torch.ones(4), MASK.int(), 1.0)
    with pytest.raises(TypeError, match=r"grad must be.*float64"):
        masked_decay_(torch.ones(4).double(), torch.ones(4), MASK, 1.0)
