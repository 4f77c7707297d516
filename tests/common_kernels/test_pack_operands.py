"""Operands pruned and packed in one read, against the operators that do one thing each."""

from itertools import product

import pytest
import torch

import common_kernels as ck
from common_kernels.fp8.cpu import codes_of, scale_from
from common_kernels.fp8.operands import quantize_and_sample, quantize_both, rescale
from common_kernels.pack import BUFFERED, VENDOR, Packed24, unpack24
from common_kernels.pack.cpu import pack
from common_kernels.pack.operands import (
    pack24_,
    pack_both24_,
    packed_weight,
    pruned_weight,
    sample_pack24,
)

pytest.importorskip("triton", reason="no Triton for this platform")
from common_kernels.pack.sample_triton import pack_sample
from tests.common_kernels.conftest import LEARNT
from tests.each import each

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYOUTS = BUFFERED, "cutlass_sm90", "cutlass_sm90_k128"
backends = each("backend", ["cpu", "triton"])
masters = each("master", [torch.float32, torch.bfloat16])


def weight(rows, columns, dtype=torch.float32, seed=0):
    w = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    w[0, :4], w[1, 4:8] = 1.0, 0.0  # a tie and an empty group
    return w.to(DEVICE, dtype)


def codes(t):
    return t.contiguous().view(torch.uint8)


def holds(packed, want, kept):
    """True if it is the matrix `want`. What the library packs is compared with what it packs."""
    if packed.layout == VENDOR:
        return torch.equal(packed.buffer, pack(want.contiguous(), kept.contiguous(), VENDOR))
    return torch.equal(unpack24(packed).float(), want.float())


BEFORE = None, 0.5, 9.0  # the largest number that was seen; None: the scale is that of x


def delayed(before):
    """A scale from elsewhere: what is larger becomes the largest code; the largest is seen."""
    numbers = (None, None) if before is None else (1.5, before)
    return [n if n is None else torch.tensor(n, device=DEVICE) for n in numbers]


def all_equal(tensors):
    return all(torch.equal(tensor, tensors[0]) for tensor in tensors)


@each(
    ("master", "dtype", "layout"),
    [
        (torch.float32, torch.bfloat16, BUFFERED), (torch.bfloat16, torch.bfloat16, BUFFERED),
        (torch.float32, torch.float16, BUFFERED), (torch.float32, torch.bfloat16, "cutlass_sm80"),
        (torch.bfloat16, torch.bfloat16, LAYOUTS[2]), (torch.float32, torch.float16, LEARNT),
        (torch.float32, torch.bfloat16, VENDOR),
    ],
)  # fmt: skip
def test_a_pruned_weight(master, dtype, layout):
    """The mask as bools and as bits, with a dense operand and without: the same bytes."""
    shape = 64, 128
    w, scale = weight(*shape, master), torch.tensor(1.37, device=DEVICE)
    mask, largest = ck.transposable_mask24(w), ck.nm_mask(w)
    for source, pruned, kept, masks in (
        ("magnitude", torch.where(largest, w, 0.0), largest, [None]),
        ("soft", ck.soft_threshold24(w), largest, [None]),
        ("mask", torch.where(mask, w, 0.0), mask, [mask, ck.pack_mask(mask)]),
    ):
        for factor, filled in ((None, True), (scale, True), (scale, False)):
            want = (pruned if factor is None else pruned.float() * factor).to(dtype)
            written = []
            for backend, given in product(("cpu", "triton"), masks):
                out, dense = Packed24.empty(shape, dtype, DEVICE, layout), torch.empty_like(want)
                pack24_(out, w, source, given, factor, dense if filled else None, backend=backend)
                written.append(out.buffer)
                if filled:
                    assert torch.equal(dense, want) and not dense[~kept].signbit().any()
            assert holds(out, want, kept) and all_equal(written)


@each(
    ("master", "dtype", "layouts"),
    [
        (torch.bfloat16, torch.float16, (BUFFERED, BUFFERED)),
        (torch.float32, torch.bfloat16, (BUFFERED, BUFFERED)),
        (torch.bfloat16, torch.bfloat16, LAYOUTS[1:]),
        (torch.float32, torch.bfloat16, LAYOUTS[:0:-1]),
        (torch.float32, torch.bfloat16, ("cutlass_sm80", BUFFERED)),
        (torch.float32, torch.bfloat16, (LEARNT, LEARNT)),
        (torch.bfloat16, torch.bfloat16, (VENDOR, VENDOR)),
    ],
)
def test_a_weight_both_ways(master, dtype, layouts):
    shape = (128 if LAYOUTS[2] in layouts else 64, 128)
    w, shapes = weight(*shape, master), (shape, shape[::-1])
    best, other = ck.transposable_mask24(w), ck.transposable_mask24(torch.randn_like(w))
    for mask, masks in ((best, [None]), (other, [other, ck.pack_mask(other)])):
        want, written = torch.where(mask, w, 0.0).to(dtype), []
        for backend, given in product(("cpu", "triton"), masks):
            outs = [Packed24.empty(shapes[i], dtype, DEVICE, layouts[i]) for i in (0, 1)]
            pack_both24_(*outs, w, given, backend=backend)
            written.append([out.buffer for out in outs])
            if given is not None:  # each by itself, as inside a product
                of = w, "mask", given, None, dtype
                each_alone = [packed_weight(*of, layouts[i], bool(i), backend) for i in (0, 1)]
                assert all(map(torch.equal, each_alone, written[-1]))
                assert torch.equal(pruned_weight(*of, backend), want)
        assert holds(outs[0], want, mask) and holds(outs[1], want.t(), mask.t())
        assert all(map(all_equal, zip(*written, strict=True)))


@each(
    ("dtype", "layout", "block", "tokens"),
    [
        (torch.float16, BUFFERED, 16, 48),
        *((torch.bfloat16, BUFFERED, 16, tokens) for tokens in (16, 64, 100, 112)),
        *((torch.bfloat16, LAYOUTS[1], 64, tokens) for tokens in (64, 100)),
        *((torch.bfloat16, LAYOUTS[2], 128, tokens) for tokens in (64, 100, 256)),
        (torch.bfloat16, LEARNT, 64, 124),
        (torch.bfloat16, VENDOR, 16, 124),
    ],
)
def test_a_sample_of_a_gradient(dtype, layout, block, tokens):
    """Any number of tokens, which is filled up to whole blocks of the layout; the sample is that of
    the operator, with the same random bits."""
    dy, key = weight(tokens, 192, dtype), torch.tensor([5, 3], device=DEVICE)
    stride = -(-tokens // 4) * 192
    packed, other = (
        sample_pack24(dy, key, stride, layout=layout, backend=name) for name in ("triton", "cpu")
    )
    filled = torch.cat([dy, dy.new_zeros(-tokens % block, 192)])
    assert packed.shape == (192, len(filled))
    sample = ck.mvue24(filled, 5, 3 * stride, dim=0).t()
    assert holds(packed, sample, sample != 0) and torch.equal(packed.buffer, other.buffer)


def test_a_sample_of_hard_groups(hard_groups):
    """A group with one entry kept, or none, is stored as any packer stores it."""
    for dtype in (torch.bfloat16, torch.float16):
        groups = hard_groups(256, dtype).nan_to_num(nan=2.0, posinf=torch.inf, neginf=-torch.inf)
        dy = groups.view(-1, 64, 4).mT.reshape(-1, 64)[-96:].to(DEVICE)
        sample = ck.mvue24(dy, 77, 16, dim=0).t().contiguous()
        got = pack_sample(dy, torch.tensor([77, 16], device=DEVICE), dtype)
        assert torch.equal(got, pack(sample.to(dtype), sample != 0, BUFFERED))


@backends
@masters
@each(("tokens", "layout"), [(64, BUFFERED), (100, LAYOUTS[1]), (124, LEARNT), (64, VENDOR)])
def test_codes_of_a_gradient_and_of_its_sample(backend, master, tokens, layout):
    dy, key = weight(tokens, 64, master), torch.tensor([9, 2], device=DEVICE)
    stride = -(-tokens // 4) * 64
    arguments = {"layout": layout, "backend": backend}
    for before in BEFORE:
        amax, seen = delayed(before)
        own, packed, scale = quantize_and_sample(dy, key, stride, "e5m2", amax, seen, **arguments)
        largest = dy.abs().max().float()
        assert scale == scale_from(largest if amax is None else amax, "e5m2")
        assert seen is None or seen == max(before, largest)
        assert torch.equal(codes(own), codes(codes_of(dy, scale, "e5m2")))
        filled = torch.cat([dy.float(), dy.new_zeros(-tokens % 64, 64)])
        sample = ck.mvue24(filled, 9, 2 * stride, dim=0)
        assert sample.abs().max() <= 2 * largest  # why half of the scale is enough
        want = codes_of(sample, 0.5 * scale, "e5m2")
        assert holds(packed, want.t(), sample.t() != 0)


@backends
@masters
@each("rows", [64, 100])
@each("second", ["e5m2", "e4m3"])
def test_codes_of_a_matrix_and_of_its_transpose(backend, master, rows, second):
    x = weight(rows, 72, master)
    for before in BEFORE:
        amax, seen = delayed(before)
        own, turned, *scales = quantize_both(x, "e4m3", second, amax, seen, backend=backend)
        largest = x.abs().max().float()
        given = largest if amax is None else amax
        assert scales == [scale_from(given, "e4m3"), scale_from(given, second)]
        assert seen is None or seen == max(before, largest)
        assert torch.equal(codes(own), codes(codes_of(x, scales[0], "e4m3")))
        assert turned.shape == (72, 128 if rows > 64 else 64)
        assert torch.equal(codes(turned[:, :rows]), codes(codes_of(x, scales[1], second).t()))
        assert not codes(turned)[:, rows:].any()


@backends
@each("dtype", [torch.float32, torch.bfloat16])
def test_rescaling(backend, dtype):
    y, bias = weight(48, 80, dtype), weight(2, 80)[0]
    scale, other = torch.tensor(3.0, device=DEVICE), torch.tensor(0.7, device=DEVICE)
    for b, out in ((None, None), (bias, None), (bias, torch.bfloat16)):
        want = y.double() * 2.0 / (scale.double() * other.double())
        want = want if b is None else want + b.double()
        got = rescale(y, scale, other, 2.0, b, out, backend=backend)
        unit = torch.finfo(out or dtype).eps
        assert got.dtype == (out or dtype) and got.data_ptr() != y.data_ptr()
        assert ((got.double() - want).abs() <= unit * want.abs() + 4e-7).all()
