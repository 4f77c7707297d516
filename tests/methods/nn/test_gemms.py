"""The three GEMMs against plain autograd."""

import torch
import torch.nn.functional as F

from common_kernels import mvue24, nm_mask
from methods.nn.gemms import sample_tokens, sparse_linear
from methods.nn.operands import Dense

KEY = torch.tensor([7, 0])


def operands(tokens=24, inputs=16, outputs=12, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, inputs, generator=g).to(dtype)
    weight = torch.randn(outputs, inputs, generator=g).to(dtype)
    bias = torch.randn(outputs, generator=g).to(dtype)
    dy = torch.randn(tokens, outputs, generator=g).to(dtype)
    return x, weight, bias, dy


def operands_of(matrix):
    """The operands of fprop and of dgrad, which are the same matrix."""
    return Dense(matrix), Dense(matrix)


def gradients(loss, *tensors):
    return torch.autograd.grad(loss, tensors)


def test_without_sampling_equals_masked_dense_autograd():
    for shape in ((24, 16), (2, 12, 16), (2, 3, 4, 16)):
        for dtype in (torch.float32, torch.float64):
            x, weight, bias, dy = operands(dtype=dtype)
            x, dy = x.reshape(shape), dy.reshape(*shape[:-1], 12)
            sparse = torch.where(nm_mask(weight.float()), weight, 0.0)
            for tensor in (x, weight, bias):
                tensor.requires_grad_()
            y = sparse_linear(x, weight, *operands_of(sparse), bias, KEY)
            dx, dw, db = gradients((y * dy).sum(), x, weight, bias)
            operand = sparse.clone().requires_grad_()
            y_ref = F.linear(x, operand, bias)
            dx_ref, dw_ref, db_ref = gradients((y_ref * dy).sum(), x, operand, bias)
            # Sums of at most 24 products, taken in another order.
            tolerance = {"rtol": 0, "atol": 24 * 16 * torch.finfo(dtype).eps}
            torch.testing.assert_close(y, y_ref, **tolerance)
            torch.testing.assert_close(dx, dx_ref, **tolerance)
            torch.testing.assert_close(dw, dw_ref, **tolerance)  # of the operand: straight through
            torch.testing.assert_close(db, db_ref, **tolerance)


def test_expanded_scalar_gradient():
    """`y.sum()` hands back a gradient of strides 0, whose value must not be lost."""
    for reduce in ("sum", "mean", "scaled"):
        x, weight, bias, _ = operands()
        x.requires_grad_()
        weight.requires_grad_()
        y = sparse_linear(x, weight, *operands_of(weight.detach()), bias, KEY, mvue="exact")
        loss = {"sum": y.sum(), "mean": y.mean(), "scaled": 3.0 * y.sum()}[reduce]
        factor = {"sum": 1.0, "mean": 1.0 / y.numel(), "scaled": 3.0}[reduce]
        (dx,) = gradients(loss, x)
        expected = factor * weight.detach().sum(0).expand_as(x)
        torch.testing.assert_close(dx, expected, rtol=1e-5, atol=1e-5)


def test_wgrad_operand_is_24_along_tokens():
    for tokens in (4, 20, 68):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            *_, dy = operands(tokens=tokens, dtype=dtype)
            for gradient in (dy, dy.t().contiguous().t()):
                sample = sample_tokens(gradient, KEY, "exact")
                nonzeros = (sample.reshape(tokens // 4, 4, -1) != 0).sum(1)
                assert sample.dtype == dtype
                assert int(nonzeros.max()) == 2


def test_tokens_that_are_no_multiple_of_four():
    x, weight, bias, dy = operands(tokens=22)
    weight.requires_grad_()
    y = sparse_linear(x, weight, *operands_of(weight.detach()), bias, KEY, mvue="exact")
    (dw,) = gradients((y * dy).sum(), weight)
    padded = F.pad(dy, (0, 0, 0, 2))
    sample = mvue24(padded.t().contiguous(), 7, dim=-1)
    assert dw.shape == weight.shape
    # 20 full groups carry other bits there (numbered along the other dim): compare the support.
    assert (sample.reshape(12, 6, 4) != 0).sum(-1).max() == 2


def test_bits_do_not_depend_on_how_the_batch_is_cut():
    *_, dy = operands(tokens=32)
    whole = sample_tokens(dy, torch.tensor([3, 0]), "exact")
    for parts in (2, 4):
        cut = [
            sample_tokens(part, torch.tensor([3, index]), "exact")
            for index, part in enumerate(dy.chunk(parts))
        ]
        assert torch.equal(torch.cat(cut), whole)
    other_seed = sample_tokens(dy, torch.tensor([4, 0]), "exact")
    assert not torch.equal(other_seed, whole)


def test_wgrad_is_unbiased_and_the_rest_does_not_see_the_seed():
    """Mean of dW over 4000 seeds within 5 sigma of the dense one; dX and db bitwise equal."""
    x, weight, bias, dy = operands(tokens=16, inputs=8, outputs=4)
    for tensor in (x, weight, bias):
        tensor.requires_grad_()

    def backward(seed):
        y = sparse_linear(
            x, weight, *operands_of(weight.detach()), bias, torch.tensor([seed, 0]), mvue="exact"
        )
        return gradients((y * dy).sum(), x, weight, bias)

    draws = [backward(seed) for seed in range(4000)]
    dw = torch.stack([d[1].double() for d in draws])
    expected = dy.double().t() @ x.detach().double()
    sigma = dw.std(0) / len(draws) ** 0.5
    assert ((dw.mean(0) - expected).abs() <= 5 * sigma + 1e-6).all()
    assert sigma.max() > 0
    assert all(torch.equal(d[0], draws[0][0]) and torch.equal(d[2], draws[0][2]) for d in draws)
    assert torch.allclose(draws[0][2], dy.sum(0), atol=1e-5)
