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
    packed = pack24(w, nm_mask(w), "cutlass_sm80")
    with pytest.raises(ValueError, match=r"'neutral': convert24 .* 'cutlass_sm80' or 'cusparselt"):
        to_semi_structured(pack24(w, nm_mask(w)))
    e5m2 = pack24(w.to(torch.float8_e5m2), nm_mask(w), "cusparselt_sm90")
    with pytest.raises(ValueError, match=r"CUSPARSELT takes .*not torch\.float8_e5m2"):
        to_semi_structured(e5m2)
    with pytest.raises(ValueError, match=r"transposed must be \(\(128, 64\), 'cutlass_sm80'"):
        to_semi_structured(packed, packed)


@every_layout
def test_forward_and_backward_equal_the_masked_dense_layer(layout, operators):
    for shape, biased in (((24, 128), True), ((2, 7, 128), False)):
        w, bias = weight().to(BF16).requires_grad_(), torch.randn(64).to(BF16)
        x = torch.randn(shape).to(BF16).requires_grad_()
        bias = bias.requires_grad_() if biased else None
        y = F.linear(x, Sparsify.apply(w, layout), bias)
        dy = torch.randn(y.shape).to(BF16)
        y.backward(dy)
        leaves = [t.detach().double().requires_grad_() for t in (x, w)]
        dense = leaves[1] * transposable_mask24(w.detach())
        expected = F.linear(leaves[0], dense, bias if bias is None else bias.detach().double())
        dense.retain_grad()
        expected.backward(dy.double())
        assert relative(y, expected) < ROUNDING
        assert relative(x.grad, leaves[0].grad) < ROUNDING
        assert relative(w.grad, dense.grad) < ROUNDING  # straight through: not masked
        assert bias is None or torch.equal(bias.grad, dy.flatten(0, -2).sum(0))


@every_layout
def test_compiled_once_for_all_batch_sizes(layout, operators):
    """Metadata in two dims, as ours is: torch's own tile packer does not compile for CUTLASS."""
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    w = weight().to(BF16).requires_grad_()

    def layer(x):
        return F.linear(x, Sparsify.apply(w, layout))

    compiled = torch.compile(layer, fullgraph=True, backend=graphs, dynamic=True)
    for tokens in (8, 24, 16):
        x = torch.randn(2, tokens, 128).to(BF16).requires_grad_()
        found = []
        for run in (compiled, layer):
            y = run(x)
            found.append((y, *torch.autograd.grad(y.float().square().mean(), (x, w))))
        assert all(torch.equal(got, want) for got, want in zip(*found, strict=True))
    assert graphs.frame_count <= 2
    torch._dynamo.reset()
