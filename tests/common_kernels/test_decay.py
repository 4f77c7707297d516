import torch

from common_kernels import masked_decay_

MASK = torch.tensor([True, False, True, False])


def test_by_hand():
    grad = torch.ones(4)
    got = masked_decay_(grad, torch.tensor([1.0, 2, 3, 4]), MASK, 0.03)
    assert got is grad
    assert torch.allclose(grad, torch.tensor([1, 1.06, 1, 1.12]), rtol=2**-23, atol=0)


def test_what_is_kept_or_has_no_decay_keeps_its_bits():
    inf, nan, kept = torch.inf, torch.nan, torch.ones(6, dtype=torch.bool)
    grad = torch.tensor([-0.0, 0.0, nan, inf, 1e-45, -3.0])
    weight = torch.tensor([inf, nan, 1.0, -inf, 2.0, 3.0])
    for mask, alpha in ((kept, 0.03), (kept, -0.03), (~kept, 0.0)):
        after = masked_decay_(grad.clone(), weight, mask, alpha)
        assert torch.equal(after.view(torch.int32), grad.view(torch.int32))
