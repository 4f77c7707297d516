"""Operands pruned and packed in one read, against the operators that do one thing each."""

from dataclasses import replace

import pytest
import torch

from common_kernels import (
    fake_fp8,
    mvue24,
    nm_mask,
    pack_mask,
    quantize_fp8,
    soft_threshold24,
    transposable_mask24,
)
from common_kernels.fp8.operands import (
    project_quantize24_,
    quantize_and_sample,
    quantize_both,
    rescale,
    scaled_linear,
)
from common_kernels.pack import BUFFERED, Packed24, convert24, unpack24
from common_kernels.pack.operands import (
    pack24_,
    pack_both24_,
    sample_pack24,
)

pytest.importorskip("triton", reason="no Triton for this platform")
from common_kernels.pack import triton
from tests.each import each

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INTERPRETED = DEVICE.type == "cpu"
backends = each("backend", ["cpu", "triton"])
masters = each("master", [torch.float32, torch.bfloat16])
half_types = each("dtype", [torch.bfloat16, torch.float16])
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def weight(rows, columns, dtype=torch.float32, seed=0):
    w = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    w[0, :4], w[1, 4:8] = 1.0, 0.0  # a tie and an empty group
    return w.to(DEVICE, dtype)


def codes(t):
    return t.contiguous().view(torch.uint8)


@backends
@masters
@half_types
@each("shape", [(128, 192)])
def test_a_pruned_weight(backend, master, dtype, shape):
    w, scale = weight(*shape, master), torch.tensor(1.37, device=DEVICE)
    mask = transposable_mask24(w)
    sources = {
        "magnitude": torch.where(nm_mask(w), w, 0.0),
        "soft": soft_threshold24(w),
        "mask": torch.where(mask, w, 0.0),
    }
    for source, pruned in sources.items():
        for factor in (None, scale):
            want = (pruned if factor is None else pruned.float() * factor).to(dtype)
            packed, dense = Packed24.empty(shape, dtype, DEVICE), torch.empty_like(want)
            given = mask if source == "mask" else None
            pack24_(packed, w, source, given, factor, dense, backend=backend)
            assert torch.equal(unpack24(packed), want)
            assert torch.equal(dense, want)
            assert not dense[~nm_mask(w) if given is None else ~mask].signbit().any()
            alone = Packed24.empty(shape, dtype, DEVICE)
            pack24_(alone, w, source, given, factor, backend=backend)
            assert torch.equal(alone.buffer, packed.buffer)
    bits, by_bits = Packed24.empty(shape, dtype, DEVICE), torch.empty_like(dense)
    pack24_(bits, w, "mask", pack_mask(mask), scale, by_bits, backend=backend)
    assert torch.equal(bits.buffer, packed.buffer) and torch.equal(by_bits, dense)


@backends
@masters
@half_types
def test_a_weight_both_ways(backend, master, dtype):
    w = weight(128, 192, master)
    best = transposable_mask24(w)
    other = transposable_mask24(torch.randn_like(w))
    for given, mask in ((None, best), (other, other)):
        packed, transposed = (Packed24.empty(s, dtype, DEVICE) for s in ((128, 192), (192, 128)))
        pack_both24_(packed, transposed, w, given, backend=backend)
        want = torch.where(mask, w, 0.0).to(dtype)
        assert torch.equal(unpack24(packed), want)
        assert torch.equal(unpack24(transposed), want.t())
    by_bits = [torch.empty_like(t.buffer) for t in (packed, transposed)]
    rooms = (replace(t, parts=(b,)) for t, b in zip((packed, transposed), by_bits, strict=True))
    pack_both24_(*rooms, w, pack_mask(other), backend=backend)
    assert torch.equal(by_bits[0], packed.buffer) and torch.equal(by_bits[1], transposed.buffer)


CUTLASS = ("cutlass_sm90", "cutlass_sm90_k128")
cutlass_layouts = each("layout", CUTLASS)


def same_as_reordered(packed, plain):
    """The bytes are those of cuSPARSELt's layout, `plain`, after its metadata are reordered."""
    want = convert24(plain, packed.layout)
    assert torch.equal(packed.values.view(torch.int16), want.values.view(torch.int16))
    assert torch.equal(packed.meta, want.meta)


@backends
@cutlass_layouts
@each("shape", [(64, 128), (192, 256)])
def test_a_weight_in_the_order_of_cutlass(backend, layout, shape):
    w, scale = weight(*shape), torch.tensor(1.37, device=DEVICE)
    mask = transposable_mask24(w)
    for source in ("magnitude", "soft", "mask"):
        packed, plain = (
            Packed24.empty(shape, torch.bfloat16, DEVICE, name) for name in (layout, BUFFERED)
        )
        given = mask if source == "mask" else None
        for out in (packed, plain):
            pack24_(out, w, source, given, scale, backend=backend)
        same_as_reordered(packed, plain)


@backends
@each("layouts", [CUTLASS, CUTLASS[::-1], (BUFFERED, CUTLASS[0])])
def test_a_weight_both_ways_in_two_orders(backend, layouts):
    shapes = ((128, 256), (256, 128))
    w = weight(*shapes[0])
    both, plain = (
        [
            Packed24.empty(shape, torch.bfloat16, DEVICE, name)
            for shape, name in zip(shapes, names, strict=True)
        ]
        for names in (layouts, (BUFFERED, BUFFERED))
    )
    pack_both24_(*both, w, backend=backend)
    pack_both24_(*plain, w, backend=backend)
    for got, want in zip(both, plain, strict=True):
        same_as_reordered(got, want)


@backends
@cutlass_layouts
@each("tokens", [64, 100, 256])
def test_a_sample_of_a_gradient_in_the_order_of_cutlass(backend, layout, tokens):
    """Tokens are filled up to whole blocks of the layout."""
    dy, key = weight(tokens, 192, torch.bfloat16), torch.tensor([5, 3], device=DEVICE)
    stride = -(-tokens // 4) * 192
    packed = sample_pack24(dy, key, stride, layout=layout, backend=backend)
    block = 64 if layout == "cutlass_sm90" else 128
    filled = torch.cat([dy, dy.new_zeros(-tokens % block, 192)])
    assert packed.shape == (192, len(filled))
    same_as_reordered(packed, sample_pack24(filled, key, stride, backend=backend))


@backends
def test_codes_in_the_order_of_cutlass(backend):
    """Codes of a masked weight, of a projected one and of a gradient's sample are compared."""
    shape, layout = (64, 256), "cutlass_sm90"
    w, scale = weight(*shape), torch.tensor(1.37, device=DEVICE)
    packed, plain, other, plain_other = (
        Packed24.empty(shape, FP8["e4m3"], DEVICE, name) for name in (layout, BUFFERED) * 2
    )
    transposed = torch.empty(256, 64, dtype=FP8["e5m2"], device=DEVICE)
    for one, two in ((packed, other), (plain, plain_other)):
        if not INTERPRETED or backend == "cpu":  # the interpreter does not cast to FP8 properly
            pack24_(one, w, "mask", nm_mask(w), scale, backend=backend)
        project_quantize24_(two, None, transposed, torch.empty(2, device=DEVICE), w, scale)
    pairs = [(other, plain_other)]
    if not INTERPRETED or backend == "cpu":
        pairs.append((packed, plain))
    dy, key = weight(100, 128), torch.tensor([9, 2], device=DEVICE)
    arguments = {"key": key, "stride": 25 * 128, "fmt": "e5m2", "backend": backend}
    _, sample, _ = quantize_and_sample(dy, **arguments, layout=layout)
    assert sample.shape == (128, 128)
    pairs.append((sample, quantize_and_sample(dy, **arguments)[1]))
    for got, want in pairs:
        reordered = convert24(want, layout)
        assert torch.equal(codes(got.values), codes(reordered.values))
        assert torch.equal(got.meta, reordered.meta)


@backends
@half_types
@each("tokens", [16, 48, 64, 100, 112])
def test_a_sample_of_a_gradient(backend, dtype, tokens):
    """Any number of tokens; the sample is that of the operator, with the same random bits."""
    dy, key = weight(tokens, 128, dtype), torch.tensor([5, 3], device=DEVICE)
    stride = -(-tokens // 4) * 128
    packed = sample_pack24(dy, key, stride, backend=backend)
    filled = torch.cat([dy, dy.new_zeros(-tokens % 16, 128)])
    want = mvue24(filled, 5, 3 * stride, dim=0)
    assert packed.shape == (128, len(filled))
    assert torch.equal(unpack24(packed), want.t())
    assert torch.equal(packed.buffer, sample_pack24(dy, key, stride, backend="cpu").buffer)


@backends
@masters
@each("rows", [64, 100])
@each("second", ["e5m2", "e4m3"])
def test_codes_of_a_matrix_and_of_its_transpose(backend, master, rows, second):
    x = weight(rows, 72, master)
    own, transposed, scale, other = quantize_both(x, "e4m3", second, backend=backend)
    want, want_scale = quantize_fp8(x, "e4m3")
    assert torch.equal(codes(own), codes(want)) and torch.equal(scale, want_scale)
    want, want_scale = quantize_fp8(x, second)
    assert transposed.shape == (72, 128 if rows > 64 else 64)
    assert torch.equal(codes(transposed[:, :rows]), codes(want.t())) and other == want_scale
    assert not codes(transposed)[:, rows:].any()


@backends
@masters
@each("tokens", [64, 100])
def test_codes_of_a_gradient_and_of_its_sample(backend, master, tokens):
    dy, key = weight(tokens, 64, master), torch.tensor([9, 2], device=DEVICE)
    stride = -(-tokens // 4) * 64
    own, packed, scale = quantize_and_sample(dy, key, stride, "e5m2", backend=backend)
    want, want_scale = quantize_fp8(dy, "e5m2")
    assert torch.equal(codes(own), codes(want)) and torch.equal(scale, want_scale)
    filled = torch.cat([dy.float(), dy.new_zeros(-tokens % 64, 64)])
    sample = mvue24(filled, 9, 2 * stride, dim=0)
    assert sample.abs().max() <= 2 * dy.abs().max()  # why half of the scale is enough
    want = (sample * (0.5 * scale)).to(torch.float8_e5m2)
    assert torch.equal(unpack24(packed).float(), want.t().float())


@each("known", [False, True])
@each("dgrad", ["e4m3", "e5m2"])
@masters
def test_codes_of_a_projected_weight(dgrad, master, known):
    w, beta = weight(128, 192, master), torch.tensor(1.21, device=DEVICE)
    projected = soft_threshold24(w).float() * beta
    packed = Packed24.empty((128, 192), FP8["e4m3"], DEVICE)
    own = torch.empty(128, 192, dtype=FP8["e4m3"], device=DEVICE)
    transposed = torch.empty(192, 128, dtype=FP8[dgrad], device=DEVICE)
    scales = torch.empty(2, device=DEVICE)
    amax = projected.abs().max() if known else None
    project_quantize24_(packed, own, transposed, scales, w, beta, amax)
    want, scale = quantize_fp8(projected, "e4m3")
    assert torch.equal(codes(own), codes(want)) and scales[0] == scale
    assert torch.equal(unpack24(packed).float(), want.float())
    want, scale = quantize_fp8(projected, dgrad)
    assert torch.equal(codes(transposed), codes(want.t())) and scales[1] == scale


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


def test_a_product_of_codes():
    x, w = weight(40, 64), weight(32, 64, seed=1)
    (a, sa), (b, sb) = quantize_fp8(x, "e5m2"), quantize_fp8(w, "e4m3")
    bias = torch.linspace(-1, 1, 32, device=DEVICE)
    want = fake_fp8(x, "e5m2") @ fake_fp8(w, "e4m3").t() + bias
    got = scaled_linear(a, b, sa, sb, bias)
    # bf16 results; the FP8 units of a GPU keep some 14 bits of a sum.
    assert (got.float() - want).abs().max() <= 2**-8 * want.abs().max()


def test_what_cannot_be_packed_is_refused():
    w, bf16 = weight(64, 128), torch.bfloat16
    out = Packed24.empty((64, 128), bf16, DEVICE)
    with pytest.raises(ValueError, match=r"\(96, 64\).*rows in multiples of 64"):
        Packed24.empty((96, 64), bf16, DEVICE)
    with pytest.raises(ValueError, match=r"\(64, 96\).*both multiples of 64"):
        pack24_(Packed24.empty((64, 96), bf16, DEVICE), w[:, :96], "magnitude")
    with pytest.raises(ValueError, match=r"has shape \(128, 64\), not \(64, 128\)"):
        pack24_(Packed24.empty((128, 64), bf16, DEVICE), w, "magnitude")
    with pytest.raises(ValueError, match=r"\(64, 64\).*'cutlass_sm90_k128'.*multiples of 128"):
        Packed24.empty((64, 64), bf16, DEVICE, "cutlass_sm90_k128")
    with pytest.raises(ValueError, match="'cutlass_sm80' is not written here"):
        triton.order_of("cutlass_sm80", bf16)
    with pytest.raises(ValueError, match="unknown source 'best'"):
        pack24_(out, w, "best")
    with pytest.raises(ValueError, match="source='mask'"):
        pack24_(out, w, "mask")
    with pytest.raises(ValueError, match=r"dense must be torch\.bfloat16"):
        pack24_(out, w, "magnitude", dense=torch.empty_like(w))
    with pytest.raises(ValueError, match=r"\(64, 8\) are not those of a mask \(64, 128\)"):
        pack24_(out, w, "mask", pack_mask(nm_mask(w[:, :64])))
    with pytest.raises(ValueError, match=r"tokens, a multiple of 64"):
        sample_pack24(weight(64, 96), torch.tensor([0, 0], device=DEVICE))
    with pytest.raises(TypeError, match=r"key must be int64 \[2\]"):
        sample_pack24(w, torch.tensor([0.0, 0.0], device=DEVICE))
    with pytest.raises(ValueError, match="e3m4"):
        quantize_both(w, "e3m4", "e5m2")
