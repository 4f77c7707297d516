"""torch's 2:4 tensors over our packed matrices; its operators run on a CPU here."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from common_kernels import nm_mask, transposable_mask24
from common_kernels.pack import pack24, unpack24
from common_kernels.pack.interop import CLASSES, to_semi_structured
from tests.cpu_operators import from_cslt, register_cpu_operators

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor")
every_layout = pytest.mark.parametrize("layout", CLASSES)
BF16 = torch.bfloat16
ROUNDING = 2**-9  # of one number to bf16


@pytest.fixture
def operators():
    torch.manual_seed(0)
    library = register_cpu_operators()
    yield
    del library
    gc.collect()


def weight(seed=0):
    return torch.randn(64, 128, generator=torch.Generator().manual_seed(seed))


def relative(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


class Sparsify(torch.autograd.Function):
    """w -> torch's tensor of w under its transposable mask; straight-through."""

    @staticmethod
    def forward(ctx, w, layout):
        w = w.detach()
        mask = transposable_mask24(w)
        return to_semi_structured(pack24(w, mask, layout), pack24(w.t(), mask.t(), layout))

    @staticmethod
    def backward(ctx, grad):
        return grad, None


torch._dynamo.allow_in_graph(Sparsify)


def test_torch_reads_our_matrices_from_the_same_memory(operators):
    mask = nm_mask(weight(seed=1))
    for dtype in (BF16, torch.float16, torch.int8):
        w = (20 * weight()).to(dtype)
        packed = pack24(w, mask, "cutlass_sm80")
        tensor = to_semi_structured(packed)
        assert (tensor.shape, tensor.dtype) == (w.shape, dtype)
        assert torch.equal(tensor.to_dense(), torch.where(mask, w, 0))
        assert tensor.packed.data_ptr() == packed.values.data_ptr()
        assert tensor.meta.data_ptr() == packed.meta.data_ptr()
        packed = pack24(w, mask, "cusparselt_sm90")
        tensor = to_semi_structured(packed)
        assert tensor.packed.data_ptr() == packed.buffer.data_ptr()
        assert torch.equal(unpack24(from_cslt(tensor.packed, 128)), torch.where(mask, w, 0))


def test_what_has_no_tensor_of_torchs():
    w = weight().to(BF16)
    with pytest.raises(ValueError, match=r"'neutral': convert24 .* 'cutlass_sm80' or 'cusparselt"):
        to_semi_structured(pack24(w, nm_mask(w)))
    e5m2 = pack24(w.to(torch.float8_e5m2), nm_mask(w), "cusparselt_sm90")
    with pytest.raises(ValueError, match=r"CUSPARSELT takes .*not torch\.float8_e5m2"):
        to_semi_structured(e5m2)


@every_layout
def test_products_and_gradients_equal_those_of_the_masked_dense_layer(layout, operators):
    """Also compiled, once for all batch sizes: metadata in two dims, as ours is, compile for
    CUTLASS, as those of torch's own tile packer do not."""
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda x, w, bias: F.linear(x, Sparsify.apply(w, layout), bias),
        fullgraph=True, backend=graphs, dynamic=True,
    )  # fmt: skip
    w, bias = (t.to(BF16).requires_grad_() for t in (weight(), torch.randn(64)))
    for shape in ((2, 8, 128), (3, 24, 128), (2, 7, 128)):
        x, dy = torch.randn(shape).to(BF16).requires_grad_(), torch.randn(*shape[:2], 64).to(BF16)
        y = F.linear(x, Sparsify.apply(w, layout), bias)
        found = y, *torch.autograd.grad(y, (x, w, bias), dy)
        again = compiled(x, w, bias)
        again = again, *torch.autograd.grad(again, (x, w, bias), dy)
        assert all(map(torch.equal, again, found))
        leaves = [t.detach().double().requires_grad_() for t in (x, w, bias)]
        dense = leaves[1] * transposable_mask24(w.detach())
        want = F.linear(leaves[0], dense, leaves[2])
        wanted = want, *torch.autograd.grad(want, (leaves[0], dense), dy.double())
        for got, exact in zip(found, wanted, strict=False):  # of w straight through: not masked
            assert relative(got, exact) < ROUNDING
        assert torch.equal(found[3], dy.flatten(0, -2).sum(0))
    assert graphs.frame_count <= 2
    torch._dynamo.reset()
