"""Packed 2:4 matrices: round trips, and the Triton packers against those of cpu.py, byte for
byte."""

import itertools

import pytest
import torch

from common_kernels import mvue24, nm_mask
from common_kernels.pack import cpu

pytest.importorskip("triton", reason="no Triton for this platform")
from common_kernels.pack import sample_triton, triton
from tests.each import each

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
every_dtype = each("dtype", [torch.bfloat16, torch.float16])


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


@every_dtype
def test_the_sample_of_hard_groups_is_packed(dtype, hard_groups):
    """A group with one entry kept, or none, is stored as any packer stores it."""
    groups = hard_groups(256, dtype).nan_to_num(nan=2.0, posinf=torch.inf, neginf=-torch.inf)
    dy = groups.view(-1, 64, 4).mT.reshape(-1, 64)[-96:].to(DEVICE)
    sample = mvue24(dy, 77, 16, dim=0).t().contiguous()
    got = sample_triton.pack_sample(dy, torch.tensor([77, 16], device=DEVICE), dtype)
    same_bytes(got, packed(sample, sample != 0, dtype))


@pytest.mark.skipif(not CUDA, reason="cuSPARSELt runs on a GPU")
@each("shape", [(64, 64), (256, 512), (512, 192)])
@each("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_the_library_itself_writes_the_same_bytes(shape, dtype):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the order is known for compute capability 9.0")
    w = torch.randn(shape, device="cuda")
    pruned = (w * nm_mask(w)).to(dtype)
    library = torch.ops.aten._cslt_compress(pruned).view(-1).view(torch.uint8)
    same_bytes(triton.pack(w, None, "magnitude", dtype), library)
