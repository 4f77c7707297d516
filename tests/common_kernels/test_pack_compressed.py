"""Packing a weight that is stored compressed: the same bytes as packing the expanded matrices."""

import pytest
import torch

from common_kernels import (
    compress_nm,
    double_prune_mask,
    expand_nm,
    nm_mask,
    pack_mask,
    unpack_mask,
)
from common_kernels.pack import cpu

pytest.importorskip("triton", reason="no Triton for this platform")
from common_kernels.pack.compressed_triton import pack_both_compressed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def packed(x, mask, dtype):
    return cpu.pack(x.to(dtype), mask, "cusparselt_sm90")


def same_bytes(got, want):
    assert got.shape == want.shape and got.dtype == want.dtype == torch.uint8
    assert torch.equal(got, want)


@pytest.mark.parametrize("shape", [(64, 64), (128, 192)], ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_both_operands(shape, source, dtype):
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(shape, generator=generator).to(source)
    w[:8, ::3] = 0  # a kept zero keeps its place
    a = nm_mask(torch.rand(shape, generator=generator))
    row_mask = pack_mask(a)
    values = compress_nm(w, row_mask)
    dense = expand_nm(values, row_mask)
    b = double_prune_mask(dense)
    column_mask = pack_mask(compress_nm(b, row_mask))
    arguments = (t.to(DEVICE) for t in (values, row_mask, column_mask))
    got, got_t = pack_both_compressed(*arguments, dtype)
    same_bytes(got.cpu(), packed(dense, unpack_mask(row_mask, shape[1]), dtype))
    same_bytes(got_t.cpu(), packed(dense.t().contiguous(), (a & b).t().contiguous(), dtype))


def test_what_cannot_be_packed_is_refused():
    values, bits = torch.ones(64, 32), torch.zeros(64, 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"\[64, 96\].*multiples of 64"):
        pack_both_compressed(torch.ones(64, 48), bits, bits, torch.bfloat16)
    with pytest.raises(ValueError, match=r"column_mask must be uint8 \[64, 4\].*\[64, 8\]"):
        pack_both_compressed(values, bits, bits, torch.bfloat16)
    with pytest.raises(ValueError, match="4 bytes"):
        pack_both_compressed(values, bits, bits[:, :4], torch.float32)
