"""Packed 2:4 matrices: round trips, and the Triton packers against those of cpu.py, byte for
byte."""

import itertools

import pytest
import torch

from common_kernels import mvue24, nm_mask, soft_threshold24, transposable_mask24
from common_kernels.pack import cpu

pytest.importorskip("triton", reason="no Triton for this platform")
from common_kernels.pack import sample_triton, triton

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def packed(x, mask, dtype):
    return cpu.pack(x.to(dtype), mask, "cusparselt_sm90")


def same_bytes(got, want):
    assert got.shape == want.shape and got.dtype == want.dtype == torch.uint8
    assert torch.equal(got, want)


def test_every_mask_with_up_to_two_kept_entries_survives_the_round_trip():
    """Kept entries that are zero, too, keep their place: positions come from the mask."""
    masks = [m for m in itertools.product([False, True], repeat=4) if sum(m) <= 2]
    mask = torch.tensor(masks).repeat(16, 1).view(16, -1)
    x = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0))
    x[0] = 0
    values, nibbles = cpu.compress(x, mask)
    assert values.shape == (16, mask.shape[1] // 2) and nibbles.shape == (16, mask.shape[1] // 4)
    assert torch.equal(cpu.expand(values, nibbles), x * mask)
    first, second = nibbles & 3, nibbles >> 2
    assert (first < second).all()
    full = mask.unflatten(-1, (-1, 4)).sum(-1) == 2
    for position in (first, second):
        kept = mask.unflatten(-1, (-1, 4)).gather(-1, position.long().unsqueeze(-1)).squeeze(-1)
        assert kept[full].all()


@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize("shape", [(64, 64), (128, 192), (320, 128)])
def test_the_metadata_order_is_a_permutation(itemsize, shape):
    order = cpu.cusparselt_sm90_order(*shape, itemsize).flatten()
    assert torch.equal(order.sort().values, torch.arange(shape[0] * shape[1] // 4))


@every_dtype
@pytest.mark.parametrize("shape", [(64, 64), (128, 192), (64, 256)])
def test_packers(shape, dtype):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    w[0, :4] = torch.tensor([1.0, 1.0, 1.0, 1.0])
    mask, both = nm_mask(w), transposable_mask24(w)
    same_bytes(triton.pack(w, None, "magnitude", dtype), packed(w, mask, dtype))
    same_bytes(triton.pack(w, both, "mask", dtype), packed(w, both, dtype))
    scale = torch.tensor(1.5, device=DEVICE)
    soft = 1.5 * soft_threshold24(w)
    same_bytes(triton.pack(w, None, "soft", dtype, scale), packed(soft, mask, dtype))
    for given in (both, None):
        forward, transposed = triton.pack_both(w, given, dtype)
        same_bytes(forward, packed(w, both, dtype))
        same_bytes(transposed, packed(w.t().contiguous(), both.t().contiguous(), dtype))


@every_dtype
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("shape", [(128, 64), (352, 128)])
def test_the_sample_of_a_gradient_is_packed_transposed(shape, single, dtype):
    dy = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    dy = dy if single else dy.to(dtype)
    key = torch.tensor([77, 16], device=DEVICE)
    sample = mvue24(dy, 77, 16, dim=0).t().contiguous()
    same_bytes(sample_triton.pack_sample(dy, key, dtype), packed(sample, sample != 0, dtype))


@every_dtype
def test_the_sample_of_hard_groups_is_packed(dtype, hard_groups):
    """A group with one entry kept, or none, is stored as any packer stores it."""
    groups = hard_groups(256, dtype).nan_to_num(nan=2.0, posinf=torch.inf, neginf=-torch.inf)
    dy = groups.view(-1, 64, 4).mT.reshape(-1, 64)[-96:].to(DEVICE)
    sample = mvue24(dy, 77, 16, dim=0).t().contiguous()
    got = sample_triton.pack_sample(dy, torch.tensor([77, 16], device=DEVICE), dtype)
    same_bytes(got, packed(sample, sample != 0, dtype))


def test_what_the_packers_cannot_pack_is_refused():
    w = torch.randn(64, 128, device=DEVICE)
    with pytest.raises(ValueError, match=r"\(96, 64\).*multiples of 64"):
        triton.pack(torch.randn(96, 64, device=DEVICE), None, "magnitude", torch.bfloat16)
    with pytest.raises(ValueError, match="contiguous"):
        triton.pack_both(torch.randn(128, 64, device=DEVICE).t(), None, torch.bfloat16)
    with pytest.raises(ValueError, match="contiguous"):
        mask = nm_mask(torch.randn(128, 64, device=DEVICE).t())
        triton.pack(w, mask, "mask", torch.bfloat16)
    with pytest.raises(ValueError, match="4 bytes"):
        sample_triton.pack_sample(
            w, torch.zeros(2, dtype=torch.int64, device=DEVICE), torch.float32
        )


@pytest.mark.skipif(not CUDA, reason="cuSPARSELt runs on a GPU")
@pytest.mark.parametrize("shape", [(64, 64), (256, 512), (512, 192)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_the_library_itself_writes_the_same_bytes(shape, dtype):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the order is known for compute capability 9.0")
    w = torch.randn(shape, device="cuda")
    pruned = (w * nm_mask(w)).to(dtype)
    library = torch.ops.aten._cslt_compress(pruned).view(-1).view(torch.uint8)
    same_bytes(triton.pack(w, None, "magnitude", dtype), library)
