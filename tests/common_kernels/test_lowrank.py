"""Y1 + scale * (Y2 @ R) + bias."""

import torch

from common_kernels import lowrank_addmm
from common_kernels.backend import HAS_TRITON
from tests.each import each

INF, NAN = float("inf"), float("nan")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["cpu", *(["triton"] if HAS_TRITON else [])]
every_backend = each("backend", BACKENDS)


def operands(rows, out, rank, dtype, generator):
    z = torch.randn(rows, out + rank, generator=generator).to(DEVICE, dtype)
    r = torch.randn(rank, out, generator=generator).to(DEVICE, dtype)
    return z[:, :out], z[:, out:], r, torch.randn(out, generator=generator).to(DEVICE, dtype)


def test_by_hand():
    y1, y2 = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[10.0, 20.0]])
    r, bias = torch.tensor([[1.0, 0, -1], [0, 1, 1]]), torch.tensor([0.5, 0.25, 0.125])
    assert lowrank_addmm(y1, y2, r).tolist() == [[11, 22, 13]]
    assert lowrank_addmm(y1, y2, r, bias, 0.5).tolist() == [[6.5, 12.25, 8.125]]
    assert y1.tolist() == [[1, 2, 3]]


def test_bf16_does_not_pass_through_fp16():
    """Values above 65504, the largest of fp16."""
    y1, y2 = torch.full((2, 3), 1e6).bfloat16(), torch.full((2, 4), 3e5).bfloat16()
    got = lowrank_addmm(y1, y2, torch.ones(4, 3).bfloat16(), scale=2.0)
    want = y1[0, 0].float() + 2 * 4 * y2[0, 0].float()
    assert torch.equal(got, want.bfloat16().expand(2, 3))


@every_backend
def test_sums_are_not_rounded_to_16_bits_on_the_way(backend):
    """256 + 128 * 2^-6 = 258, where bf16 partial sums would stay at 256; under autocast, too."""
    one = torch.ones(1, 1, device=DEVICE)
    y1, y2 = (256 * one).bfloat16(), (2.0**-6 * one).expand(1, 128).bfloat16()
    r = one.expand(128, 1).bfloat16()
    assert lowrank_addmm(y1, y2, r, backend=backend).item() == 258
    with torch.autocast(DEVICE, torch.bfloat16):
        fine = lowrank_addmm(0 * one, one + 2**-12, one, backend=backend)
    assert fine.item() == 1 + 2**-12


@every_backend
def test_non_finite_values_propagate(backend):
    y1 = torch.tensor([[NAN, 1.0], [INF, 1.0]], device=DEVICE)
    y2, r = torch.zeros(2, 1, device=DEVICE), torch.ones(1, 2, device=DEVICE)
    got = lowrank_addmm(y1, y2, r, backend=backend)
    assert got[0, 0].isnan() and got[1, 0] == INF and (got[:, 1] == 1).all()
    got = lowrank_addmm(0 * r, r[:, :1] * INF, r, backend=backend)
    assert (got == INF).all()


@every_backend
def test_its_gradients_are_those_of_the_formula(backend):
    """Of a model with a low-rank term that is trained further."""
    y1, y2, r, bias = operands(6, 12, 5, torch.float32, torch.Generator().manual_seed(0))
    given = [
        t.contiguous().requires_grad_()
        for t in (y1.reshape(2, 3, 12), y2.reshape(2, 3, 5), r, bias)
    ]
    dy = torch.randn(2, 3, 12, device=DEVICE)
    got = torch.autograd.grad(lowrank_addmm(*given, 0.5, backend=backend), given, dy)
    y1, y2, r, bias = given
    want = torch.autograd.grad(y1 + 0.5 * (y2 @ r) + bias, given, dy)
    torch.testing.assert_close(got, want)
