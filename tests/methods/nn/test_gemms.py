"""The three GEMMs against plain autograd."""

import torch
import torch.nn.functional as F

from common_kernels import nm_mask
from methods.nn.gemms import sample_tokens, sparse_linear
from methods.nn.operands import Dense

KEY = torch.tensor([7, 0])


def operands(tokens=24, inputs=16, outputs=12, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    shapes = (tokens, inputs), (outputs, inputs), (outputs,), (tokens, outputs)
    return [torch.randn(*shape, generator=g).to(dtype).requires_grad_() for shape in shapes]


def products(x, weight, bias, dy, sparse=None, key=KEY, mvue=None):
    """y, dX, dW, db; fprop and dgrad multiply by the same matrix."""
    operand = Dense(weight.detach() if sparse is None else sparse)
    y = sparse_linear(x, weight, operand, operand, bias, key, mvue, "")
    return y, *torch.autograd.grad(y, (x, weight, bias), dy)


def test_without_sampling_equals_masked_dense_autograd():
    for shape in ((24, 16), (2, 12, 16), (2, 3, 4, 16)):
        for dtype in (torch.float32, torch.float64):
            x, weight, bias, dy = operands(dtype=dtype)
            x, dy = x.reshape(shape), dy.reshape(*shape[:-1], 12).detach()
            sparse = torch.where(nm_mask(weight.float()), weight, 0.0).detach()
            found = products(x, weight, bias, dy, sparse)
            operand = sparse.clone().requires_grad_()
            y = F.linear(x, operand, bias)
            expected = y, *torch.autograd.grad(y, (x, operand, bias), dy)  # straight through
            # Sums of at most 24 products, taken in another order.
            torch.testing.assert_close(
                found, expected, rtol=0, atol=24 * 16 * torch.finfo(dtype).eps
            )


def test_a_gradient_of_strides_zero():
    """`y.sum()` hands one back, whose value must not be lost."""
    x, weight, bias, dy = operands()
    _, dx, *_ = products(x, weight, bias, torch.tensor(3.0).expand_as(dy), mvue="exact")
    expected = 3.0 * weight.detach().sum(0).expand_as(x)
    torch.testing.assert_close(dx, expected, rtol=1e-5, atol=1e-5)


def test_wgrad_operand_is_24_along_tokens():
    """Tokens that are no multiple of four are filled up with zeros."""
    for tokens in (4, 22, 68):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            dy = operands(tokens, dtype=dtype)[-1].detach()
            padded = F.pad(dy, (0, 0, 0, -tokens % 4))
            for gradient in (dy, dy.t().contiguous().t()):
                sample = sample_tokens(gradient, KEY, "exact")
                assert sample.dtype == dtype
                assert torch.equal(sample, sample_tokens(padded, KEY, "exact")[:tokens])
                nonzeros = (F.pad(sample, (0, 0, 0, -tokens % 4)).unflatten(0, (-1, 4)) != 0).sum(1)
                assert int(nonzeros.max()) == 2
        dw = products(*operands(tokens), mvue="exact")[2]
        x, *_, dy = (tensor.detach() for tensor in operands(tokens))
        torch.testing.assert_close(dw, sample_tokens(dy, KEY, "exact").t() @ x)
