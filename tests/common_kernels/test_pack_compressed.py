"""Weights that are stored compressed: the column masks and the bytes of the operators that do one
thing each."""

import pytest
import torch

import common_kernels as ck
from common_kernels.pack import BUFFERED, VENDOR, Packed24, cpu
from common_kernels.pack.compressed import Compressed24, packed_one, prune_and_pack24_
from tests.common_kernels.conftest import LEARNT
from tests.each import each

pytest.importorskip("triton", reason="no Triton for this platform")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CUTLASS, K128 = "cutlass_sm90", "cutlass_sm90_k128"
backends = each("backend", ["cpu", "triton"])


def weights(shape, source=torch.float32, seed=0):
    """A row mask, and values with ties, zeros of both signs and infinities."""
    generator = torch.Generator().manual_seed(seed)
    row_mask = ck.pack_mask(ck.nm_mask(torch.rand(shape, generator=generator)))
    w = torch.randn(shape, generator=generator)
    w[:8, ::3] = 0  # a kept zero keeps its place
    w[4:12, 1::3] *= -0.0
    w[8:24] = w[8:24].round()
    w[24:28, :8] = torch.inf
    return row_mask.to(DEVICE), ck.compress_nm(w.to(DEVICE, source), row_mask.to(DEVICE))


def stored(row_mask, values, dtype=torch.bfloat16, layouts=(BUFFERED, BUFFERED), column_mask=None):
    """A `Compressed24`, what is to be written full of other bits; layout None: no room."""
    rows, columns = len(values), 2 * values.shape[1]
    if column_mask is None:
        column_mask = row_mask.new_full((rows, columns // 16), 0xA5)
    outs = [
        None if layout is None else Packed24.empty(shape, dtype, DEVICE, layout)
        for layout, shape in zip(layouts, ((rows, columns), (columns, rows)), strict=True)
    ]
    for out in filter(None, outs):
        out.buffer.fill_(0xA5)
    masks = {"row_mask": row_mask, "column_mask": column_mask}
    return Compressed24(values=values, **masks, packed=outs[0], transposed=outs[1])


def check(weight, column_mask=None):
    """The mask, by default that of the values, and the operands, to the bit, by what they are."""
    values, shape = weight.values, (len(weight.values), 2 * weight.values.shape[1])
    chosen = ck.double_prune_bits(values, weight.row_mask) if column_mask is None else column_mask
    assert torch.equal(weight.column_mask, chosen)
    a = ck.unpack_mask(weight.row_mask, shape[1])
    twice = ck.unpack_mask(weight.column_mask, shape[1] // 2)
    b = ck.expand_nm(twice.float(), weight.row_mask) != 0
    dense = ck.expand_nm(values, weight.row_mask).to(weight.dtype)
    for out, x, mask in (weight.packed, dense, a), (weight.transposed, dense.t(), b.t()):
        if out is not None:
            want = cpu.pack(x.contiguous(), mask.contiguous(), out.layout)
            assert torch.equal(out.buffer, want)


FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
KINDS = [
    ((64, 128), FP32, BF16, (BUFFERED, BUFFERED)),
    ((128, 64), BF16, FP16, (BUFFERED, BUFFERED)),
    ((64, 192), FP16, BF16, (BUFFERED, None)),
    ((80, 64), FP32, BF16, (None, BUFFERED)),  # no whole blocks but for its transpose
    ((128, 128), FP32, BF16, (CUTLASS, K128)),
    ((128, 128), BF16, BF16, (K128, CUTLASS)),
    ((64, 128), FP16, FP16, (BUFFERED, CUTLASS)),
    ((128, 64), FP32, BF16, (None, K128)),
    ((128, 64), FP32, BF16, (LEARNT, LEARNT)),
    ((64, 128), FP32, FP16, (VENDOR, VENDOR)),
]


@backends
@each("strided", [False, True])
def test_weights_of_several_shapes_and_kinds_at_once(backend, strided):
    """Under the masks of their values, which autograd notices, and under masks of other values."""
    together = []
    for seed, (shape, source, dtype, layouts) in enumerate(KINDS[1:3] if strided else KINDS):
        row_mask, values = weights(shape, source, seed)
        values = values.t().contiguous().t() if strided else values
        together.append(stored(row_mask, values, dtype, layouts))
    versions = [w.column_mask._version for w in together]
    prune_and_pack24_(together, backend=backend)
    for weight, version in zip(together, versions, strict=True):
        check(weight)
        assert weight.column_mask._version > version
    masks = [weight.column_mask.clone() for weight in together]
    for weight in together:
        weight.values.neg_().add_(weight.values.roll(1, 0))
    prune_and_pack24_(together, choose=False, backend=backend)
    for weight, mask in zip(together, masks, strict=True):
        check(weight, mask)
        for out, columns in (weight.packed, None), (weight.transposed, mask):
            if out is not None:
                given = weight.values, weight.row_mask, columns, weight.dtype, out.layout
                assert torch.equal(packed_one(*given, backend), out.buffer)
