"""Weights that are stored compressed: the column masks and the bytes of the operators that do one
thing each."""

import pytest
import torch

from common_kernels import (
    compress_nm,
    double_prune_bits,
    expand_nm,
    nm_mask,
    pack_mask,
    unpack_mask,
)
from common_kernels.launch import table_of
from common_kernels.pack import BUFFERED, Packed24, cpu
from common_kernels.pack.compressed import Compressed24, packed_transposed, prune_and_pack24_
from tests.each import each

pytest.importorskip("triton", reason="no Triton for this platform")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CUTLASS, K128 = "cutlass_sm90", "cutlass_sm90_k128"
FLOATS = torch.float32, torch.bfloat16, torch.float16
backends = each("backend", ["cpu", "triton"])


def weights(shape, source=torch.float32, seed=0):
    """A row mask, and values with ties, zeros of both signs and infinities."""
    generator = torch.Generator().manual_seed(seed)
    row_mask = pack_mask(nm_mask(torch.rand(shape, generator=generator)))
    w = torch.randn(shape, generator=generator)
    w[:8, ::3] = 0  # a kept zero keeps its place
    w[4:12, 1::3] *= -0.0
    w[8:24] = w[8:24].round()
    w[24:28, :8] = torch.inf
    return row_mask.to(DEVICE), compress_nm(w.to(DEVICE, source), row_mask.to(DEVICE))


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
    return Compressed24(
        values=values,
        row_mask=row_mask,
        column_mask=column_mask,
        packed=outs[0],
        transposed=outs[1],
    )


def check(weight):
    """The mask and the operands, to the bit, by what they are."""
    values, shape = weight.values, (len(weight.values), 2 * weight.values.shape[1])
    assert torch.equal(weight.column_mask, double_prune_bits(values, weight.row_mask))
    a, dense = unpack_mask(weight.row_mask, shape[1]), expand_nm(values, weight.row_mask)
    b = expand_nm(unpack_mask(weight.column_mask, shape[1] // 2).float(), weight.row_mask) != 0
    dense = dense.to(weight.dtype)
    for out, x, mask in (weight.packed, dense, a), (weight.transposed, dense.t(), b.t()):
        if out is not None:
            want = cpu.pack(x.contiguous(), mask.contiguous(), out.layout)
            assert torch.equal(out.buffer, want)


@backends
@each(
    ("source", "dtype", "layouts"),
    [
        *((s, d, (BUFFERED, BUFFERED)) for s in FLOATS for d in FLOATS[1:]),
        *((torch.float32, torch.bfloat16, layouts) for layouts in (
            (CUTLASS, CUTLASS), (K128, CUTLASS), (CUTLASS, K128), (BUFFERED, CUTLASS),
            (BUFFERED, None), (None, BUFFERED), (None, K128))),
    ],
)  # fmt: skip
def test_mask_and_operands(backend, source, dtype, layouts):
    weight = stored(*weights((128, 256), source), dtype, layouts)
    operands = (out.buffer for out in (weight.packed, weight.transposed) if out is not None)
    written = weight.column_mask, *operands
    versions = [tensor._version for tensor in written]
    prune_and_pack24_([weight], backend=backend)
    check(weight)
    for tensor, version in zip(written, versions, strict=True):
        assert tensor._version > version


@backends
def test_packing_under_the_mask_that_there_is(backend):
    row_mask, values = weights((128, 128))
    column_mask = double_prune_bits(values, row_mask)
    weight = stored(row_mask, values, column_mask=column_mask.clone())
    prune_and_pack24_([weight], choose=False, backend=backend)
    assert torch.equal(weight.column_mask, column_mask)
    check(weight)
    values.neg_().add_(values.roll(1, 0))  # the mask is not that of these values
    prune_and_pack24_([weight], choose=False, backend=backend)
    got = weight.transposed.buffer.clone()
    assert torch.equal(weight.column_mask, column_mask)
    dense = expand_nm(torch.where(unpack_mask(column_mask, 64), values, 0.0), row_mask)
    kept = expand_nm(unpack_mask(column_mask, 64).float(), row_mask) != 0
    want = cpu.pack(dense.t().contiguous().bfloat16(), kept.t().contiguous(), BUFFERED)
    assert torch.equal(got, want)


@backends
@each(
    ("layout", "source"),
    [(BUFFERED, torch.float32), (CUTLASS, torch.bfloat16), (K128, torch.float32)],
)
def test_one_operand_of_one_weight(backend, layout, source):
    """Under a mask that is that of other values, of strides of any kind."""
    row_mask, values = weights((128, 192), source)
    column_mask = double_prune_bits(values, row_mask)
    values.neg_().add_(values.roll(1, 0))
    for strided in (values, values.t().contiguous().t()):
        weight = stored(row_mask, strided, layouts=(None, layout), column_mask=column_mask)
        prune_and_pack24_([weight], choose=False, backend=backend)
        given = strided, row_mask, column_mask, torch.bfloat16, layout
        assert torch.equal(packed_transposed(*given, backend), weight.transposed.buffer)


@backends
def test_a_weight_that_is_not_made_of_whole_blocks(backend):
    """Its transpose alone has a place in cuSPARSELt's layout."""
    weight = stored(*weights((80, 64)), layouts=(None, BUFFERED))
    prune_and_pack24_([weight], backend=backend)
    check(weight)
    given = weight.values, weight.row_mask, weight.column_mask, torch.bfloat16, BUFFERED
    assert torch.equal(packed_transposed(*given, backend), weight.transposed.buffer)


@backends
def test_weights_of_several_shapes_and_kinds_at_once(backend):
    shapes = ((64, 128), (128, 64), (64, 128))
    together = [stored(*weights(shape, seed=i)) for i, shape in enumerate(shapes)]
    together.append(stored(*weights((64, 128), torch.bfloat16), torch.float16, (BUFFERED, None)))
    row_mask, values = weights((64, 128))
    strided = values.t().contiguous().t()
    together.append(stored(row_mask, strided))
    prune_and_pack24_(together, backend=backend)
    for weight in together:
        check(weight)
    prune_and_pack24_([], backend=backend)


def test_weights_of_several_devices_at_once():
    here, nowhere = (stored(*weights((64, 128))) for _ in range(2))
    names = ("values", "row_mask", "column_mask")
    nowhere = Compressed24(
        **{name: getattr(nowhere, name).to("meta") for name in names},
        packed=Packed24.empty((64, 128), torch.bfloat16, torch.device("meta")),
    )
    prune_and_pack24_([nowhere, here])
    check(here)


def test_tables_of_addresses_are_remembered():
    table = table_of(DEVICE, [1, 2, 3])
    assert table.tolist() == [1, 2, 3] and table_of(DEVICE, [1, 2, 3]) is table
    assert table_of(DEVICE, [1, 2, 4]).tolist() == [1, 2, 4]


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_a_captured_pass_follows_the_values():
    together = [stored(*weights((128, 256), seed=i)) for i in range(2)]
    prune_and_pack24_(together)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prune_and_pack24_(together)
    for weight in together:
        weight.values.mul_(-2).add_(weight.values.roll(1, 0))
    graph.replay()
    for weight in together:
        check(weight)


def test_what_cannot_be_packed_is_refused():
    row_mask, values = weights((64, 128))
    out, back = (Packed24.empty(s, torch.bfloat16, DEVICE) for s in ((64, 128), (128, 64)))
    given = {"values": values, "row_mask": row_mask, "column_mask": row_mask[:, :8]}
    for changed, said in (
        ({"column_mask": row_mask}, r"column_mask must be uint8 \[64, 8\].*\[64, 16\]"),
        ({"row_mask": row_mask.int()}, r"row_mask must be uint8 \[64, 16\], not torch.int32"),
        ({"packed": None}, "operands of no type: give one or both"),
        ({"transposed": Packed24.empty((128, 64), torch.float16, DEVICE)}, "bfloat16 and torch.fl"),
        ({"packed": Packed24.empty((64, 128), torch.float8_e5m2, DEVICE)}, "16-bit type"),
        ({"packed": back}, r"has shape \(128, 64\), not \(64, 128\)"),
        ({"values": values[0]}, "values must have two dims"),
        ({"row_mask": row_mask.to("meta")}, "on meta"),
    ):
        with pytest.raises(ValueError, match=said):
            Compressed24(**{"packed": out, **given, **changed})
