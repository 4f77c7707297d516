"""The layouts of packed matrices: against torch's own packers, by hand, and what is refused."""

import pytest
import torch
from torch.sparse import _semi_structured_conversions as conversions

from common_kernels import nm_mask, transposable_mask24
from common_kernels.pack import VENDOR, Packed24, convert24, cpu, pack24, unpack24
from common_kernels.pack.interop import CLASSES, parts, to_semi_structured
from tests.each import each

FP8 = torch.float8_e4m3fn
EVERY = [torch.float64, torch.float32, torch.bfloat16, torch.float16, FP8, torch.int8]
READABLE = {name: layout for name, layout in cpu.LAYOUTS.items() if name != VENDOR}


def matrix(shape, dtype=torch.float32, seed=0):
    """Random entries, none of them zero, whatever the type."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (20 * torch.where(x.abs() < 0.1, 0.1, x)).to(dtype)


def at_most_two(shape, seed=0):
    """A mask with 0, 1 or 2 kept in a group, at random places."""
    generator = torch.Generator().manual_seed(seed)
    return nm_mask(torch.randn(shape, generator=generator)) & (
        torch.rand(shape, generator=generator) < 0.6
    )


def same(a, b):
    """The same bits, for any type."""
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def masked(x, mask):
    """x where mask, +0 elsewhere, without arithmetic."""
    bits = x.view(cpu.INTEGERS[x.element_size()])
    return torch.where(mask, bits, 0).view(x.dtype)


@each("dtype", [torch.bfloat16, torch.float16, torch.int8])
def test_the_order_of_cutlass_on_ampere_is_torchs(dtype):
    """Also of a transpose, and of groups that are not full: their zeros are those of torch."""
    cases = [(shape, nm_mask(matrix(shape, seed=1))) for shape in ((32, 128), (256, 1024))]
    cases.append(((256, 128), transposable_mask24(matrix((128, 256), seed=1)).t()))
    for shape, mask in (*cases, ((32, 128), at_most_two((32, 128)))):
        x = matrix(shape, dtype)
        pruned = masked(x, mask).contiguous()
        packed = pack24(x, mask, "cutlass_sm80")
        values, meta = conversions.sparse_semi_structured_from_dense_cutlass(pruned)
        assert torch.equal(packed.values, values) and torch.equal(packed.meta, meta)
        same(unpack24(Packed24.of(values, meta, "cutlass_sm80")), pruned)
        dense = conversions.sparse_semi_structured_to_dense_cutlass(packed.values, packed.meta)
        same(dense, pruned)


@each(
    ("layout", "dtype"),
    [
        (name, dtype)
        for name, layout in READABLE.items()
        for dtype in EVERY
        if dtype.itemsize in layout.forms
    ],
)
def test_every_layout_holds_every_bit(layout, dtype):
    """Kept zeros of both signs, NaN with a payload, Inf; pruned NaNs are gone."""
    shape = (64, 256)
    x, mask = matrix(shape, dtype), at_most_two(shape)
    integers = x.view(cpu.INTEGERS[dtype.itemsize])
    if dtype != torch.int8:
        special = torch.tensor([-0.0, 0.0, float("nan")]).to(dtype)
        x[:3, ::2] = special[:, None]
        integers[2, ::4] |= 1  # another payload
        x[3, :] = float("nan")
    packed = pack24(x, mask, layout)
    same(unpack24(packed), masked(x, mask))
    for other in READABLE:
        if dtype.itemsize in READABLE[other].forms:
            converted = convert24(packed, other)
            direct = pack24(x, mask, other)
            same(converted.values, direct.values)
            same(converted.meta, direct.meta)
            assert (converted.layout, converted.shape) == (other, shape)
    assert convert24(packed, layout) is packed


def test_a_mask_that_is_not_24():
    x = matrix((4, 12))
    mask = nm_mask(x)
    mask[2, 4:8] = torch.tensor([True, True, False, True])
    mask[3] = True
    with pytest.raises(ValueError, match=r"keeps 3 of columns 4\.\.7 in row 2.*nm_mask"):
        pack24(x, mask)


@pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor")
@each("layout", CLASSES)
@each("dtype", [torch.bfloat16, torch.float16, torch.int8])
def test_torch_has_our_matrices_and_their_transposes_in_the_same_memory(layout, dtype):
    w = matrix((128, 128), dtype)
    mask = transposable_mask24(matrix((128, 128)))
    own = pack24(w, mask, layout), pack24(w.t(), mask.t(), layout)
    tensor = to_semi_structured(*own)
    assert (type(tensor), tensor.shape, tensor.dtype) == (CLASSES[layout], w.shape, dtype)
    dense = torch.where(mask, w, 0)
    for packed, want, values, meta in (
        (own[0], dense, tensor.packed, tensor.meta),
        (own[1], dense.t(), tensor.packed_t, tensor.meta_t),
    ):
        assert values.data_ptr() == packed.buffer.data_ptr() and values.dtype == dtype
        if layout == "cusparselt_sm90":
            assert meta is None and len(values) == len(want)
            assert values.nbytes == packed.buffer.nbytes
        else:
            assert meta.data_ptr() == packed.meta.data_ptr() and meta.shape == packed.meta.shape
            read = conversions.sparse_semi_structured_to_dense_cutlass(values, meta)
            assert torch.equal(read, want)
    assert to_semi_structured(own[0]).packed_t is None


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def sparse(shape, dtype, choose=nm_mask):
    """A 2:4 matrix with exactly two non-zeros in each group, and its mask."""
    x = matrix(shape).cuda()
    mask = choose(x)
    return torch.where(mask, x, 0).to(dtype), mask


HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.fixture
def other_people_s_operators():
    """They refuse torch's deterministic mode."""
    torch.use_deterministic_algorithms(False)


@on_gpu
@each("dtype", [torch.bfloat16, torch.float16])
@each("shape", [(128, 128), (256, 512), (384, 1280)])
def test_torchs_tile_packer(shape, dtype, other_people_s_operators):
    """Its choice keeps everything of a matrix that is pruned both ways already."""
    x, mask = sparse(shape, dtype, transposable_mask24)
    found = torch._sparse_semi_structured_tile(x, "largest_abs_values_greedy", use_cutlass=True)
    for values, words, dense, kept in ((*found[:2], x, mask), (*found[2:4], x.t(), mask.t())):
        ours, (rows, columns) = pack24(dense, kept, "cutlass_sm80"), dense.shape
        same(values, ours.values)
        same(words.as_strided((rows, columns // 16), (columns // 16, 1)), ours.meta)
    dense = torch.randn_like(x)
    applied, applied_t = torch._sparse_semi_structured_apply(dense, found[4])
    same(applied, pack24(dense, mask).values)
    same(applied_t, pack24(dense.t(), mask.t()).values)


@pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")
@each("dtype", [torch.bfloat16, torch.float16, FP8, torch.int8])
@each("shape", [(64, 64), (192, 320), (1024, 4096)])
def test_cusparselts_compressor(shape, dtype, other_people_s_operators):
    x, mask = sparse(shape, dtype)
    compressed = torch._cslt_compress(x)
    for backend in ("cpu", "triton"):
        same(parts(pack24(x, mask, "cusparselt_sm90", backend=backend))[0], compressed)
    if dtype.itemsize == 2:
        eye = torch.eye(shape[1], dtype=dtype, device="cuda")
        same(torch._cslt_sparse_mm(compressed, eye) + 0, x)


@on_gpu
@each("layout", ["neutral", "cutlass_sm80", "cusparselt_sm90"])
def test_packing_in_a_cuda_graph(layout, other_people_s_operators):
    x, mask = sparse((128, 256), torch.bfloat16)
    unpack24(pack24(x, mask, layout))  # compiles what is compiled at first use
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dense = unpack24(pack24(x, mask, layout))
    x.mul_(3)
    graph.replay()
    same(dense, x)
