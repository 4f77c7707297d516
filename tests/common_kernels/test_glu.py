"""GEGLU and SwiGLU: against torch in fp64, forward and backward, in any layout, and at limits."""

import pytest
import torch
import torch.nn.functional as F

from common_kernels import geglu, swiglu
from common_kernels.backend import HAS_TRITON
from tests.each import each

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["cpu", *(["triton"] if HAS_TRITON else [])]
FUNCTIONS = {
    "geglu": (geglu, lambda g: F.gelu(g, approximate="tanh")),
    "swiglu": (swiglu, F.silu),
}
INF, NAN = float("inf"), float("nan")
every_function = each("name", FUNCTIONS)
every_backend = each("backend", BACKENDS)


@every_function
@every_backend
@each("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gate_that_is_closed_closes(name, backend, dtype):
    """value * gate overflows where the activation is zero: 0 * Inf would be NaN."""
    big = min(1e20, torch.finfo(dtype).max)
    x = torch.tensor([[big, -big], [-big, -big]], dtype=dtype, device=DEVICE, requires_grad=True)
    y = FUNCTIONS[name][0](x, backend=backend)
    value, gate = x.detach().chunk(2, -1)
    want = value * FUNCTIONS[name][1](gate)
    assert torch.equal(y, want) and torch.equal(y.signbit(), want.signbit())
    y.sum().backward()
    assert not x.grad.any()


@every_backend
def test_by_hand(backend):
    """Values first, then gates; sigmoid(ln 3) = 3/4."""
    gate = torch.tensor(3.0).log()
    x = torch.stack([torch.tensor(8.0), gate]).view(1, 2).to(DEVICE)
    torch.testing.assert_close(swiglu(x, backend=backend).cpu(), (6 * gate).view(1, 1))
    x = torch.tensor([[5.0, 7.0, 0.0, 100.0]], device=DEVICE)
    assert geglu(x, backend=backend).tolist() == [[0.0, 700.0]]
    assert swiglu(x, backend=backend).tolist() == [[0.0, 700.0]]


@every_function
@every_backend
def test_nan_and_infinity_propagate_and_huge_gates_do_not_make_any(name, backend):
    x = torch.tensor(
        [[1.0, NAN], [NAN, 1.0], [INF, 1.0], [2.0, INF], [1.0, 1e30], [1.0, -1e30]], device=DEVICE
    ).requires_grad_()
    y = FUNCTIONS[name][0](x, backend=backend)
    y.sum().backward()
    assert x.grad is not None
    assert y[:2].isnan().all() and (y[2:4] == INF).all()
    assert x.grad[:1].isnan().all() and x.grad[1, 1].isnan() and x.grad[2, 1] == INF
    assert y[4] == 1e30 and y[5] == 0
    assert x.grad[4].tolist() == x.grad.new_tensor([1e30, 1.0]).tolist()
    assert x.grad[5].tolist() == [0.0, 0.0]


def test_a_second_derivative_is_refused():
    x = torch.randn(2, 4).requires_grad_()
    (dx,) = torch.autograd.grad(geglu(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="glu_backward"):
        dx.sum().backward()
