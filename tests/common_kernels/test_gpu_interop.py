"""Our packed matrices against other people's packers and products, on a GPU."""

import pytest
import torch

from common_kernels import nm_mask, transposable_mask24
from common_kernels.pack import convert24, pack24, unpack24
from common_kernels.pack.interop import cslt_form
from tests.cpu_operators import swizzle_mask

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor"),
]
hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="the order is that of compute capability 9.0",
)
SHAPES = [(128, 128), (256, 512), (384, 1280)]
FP8 = torch.float8_e4m3fn
half_precision = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
every_shape = pytest.mark.parametrize("shape", SHAPES)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Not here: other people's operators refuse torch's deterministic mode."""


def sparse(shape, dtype, transposable=False):
    """A 2:4 matrix with exactly two non-zeros in each group, and its mask."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).cuda()
    x = 20 * torch.where(x.abs() < 0.1, 0.1, x)
    mask = transposable_mask24(x) if transposable else nm_mask(x)
    return torch.where(mask, x, 0).to(dtype), mask


def same(a, b):
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def matrix_order(meta, rows, columns):
    """The tile packers' metadata [rows, 2, columns / 32] in two dims, on the same memory."""
    return meta.as_strided((rows, columns // 16), (columns // 16, 1))


def tiles_equal_ours(found, x, mask):
    packed, meta, packed_t, meta_t, bits = found
    for values, words, dense, kept in (
        (packed, meta, x, mask),
        (packed_t, meta_t, x.t(), mask.t()),
    ):
        ours = pack24(dense, kept, "cutlass_sm80")
        same(values, ours.values)
        same(matrix_order(words, *dense.shape), ours.meta)
    assert torch.equal(bits.flatten(), swizzle_mask(mask).flatten())


@half_precision
@every_shape
def test_torchs_tile_packer(shape, dtype):
    """Its choice keeps everything of a matrix that is pruned both ways already."""
    x, mask = sparse(shape, dtype, transposable=True)
    found = torch._sparse_semi_structured_tile(x, "largest_abs_values_greedy", use_cutlass=True)
    tiles_equal_ours(found, x, mask)
    dense = torch.randn_like(x)
    applied, applied_t = torch._sparse_semi_structured_apply(dense, found[4])
    same(applied, pack24(dense, mask).values)
    same(applied_t, pack24(dense.t(), mask.t()).values)
    assert torch.equal(torch._sparse_semi_structured_apply_dense(dense, found[4]), dense * mask)


@hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP8, torch.int8])
@pytest.mark.parametrize("shape", [(64, 64), (192, 320), (1024, 4096)])
def test_cusparselts_compressor(shape, dtype):
    x, mask = sparse(shape, dtype)
    compressed = torch._cslt_compress(x)
    for backend in ("cpu", "triton"):
        packed = pack24(x, mask, "cusparselt_sm90", backend=backend)
        same(cslt_form(packed), compressed)
    same(cslt_form(convert24(pack24(x, mask), "cusparselt_sm90")), compressed)
    same(unpack24(packed), x)
    if dtype.itemsize == 2:
        eye = torch.eye(shape[1], dtype=dtype, device="cuda")
        same(torch._cslt_sparse_mm(compressed, eye) + 0, x)


@pytest.mark.parametrize("layout", ["neutral", "cutlass_sm80", "cusparselt_sm90"])
def test_packing_in_a_cuda_graph(layout):
    x, mask = sparse((128, 256), torch.bfloat16)
    unpack24(pack24(x, mask, layout))  # compiles what is compiled at first use
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dense = unpack24(pack24(x, mask, layout))
    x.mul_(3)
    graph.replay()
    same(dense, x)
