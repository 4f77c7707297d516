"""FP8 codes of a weight for both directions in one read: against the definition, and byte for byte
against the operators that do one thing each."""

import pytest
import torch

import common_kernels as ck
from common_kernels.fp8.weights import quantize24_, quantize_compressed24_
from common_kernels.pack import VENDOR, Packed24
from common_kernels.pack.cpu import pack
from tests.common_kernels.conftest import LEARNT
from tests.each import each

pytest.importorskip("triton", reason="no Triton for this platform")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
backends = each("backend", ["cpu", "triton"])
formats = each("fmt", ["e4m3", "e5m2"])  # of the transpose; own: e4m3


LAYOUTS = {
    "packed": "cusparselt_sm90", "cutlass": "cutlass_sm90", "learnt": LEARNT, "vendor": VENDOR,
}  # fmt: skip


def weight(rows=128, columns=192, dtype=torch.float32, seed=0):
    w = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    w[0, :4], w[4:8, 8], w[1, 1] = 1.0, -0.0, -1e-6  # ties, an empty group, what vanishes
    return w.to(DEVICE, dtype)


def room(form, shape, fmt):
    """Uninitialised: `turned` codes are the transpose of a row-major matrix."""
    if form in LAYOUTS:
        return Packed24.empty(shape, DTYPES[fmt], DEVICE, LAYOUTS[form])
    codes = torch.empty(shape if form == "dense" else shape[::-1], dtype=DTYPES[fmt], device=DEVICE)
    return codes if form == "dense" else codes.t()


def written(codes):
    """The bytes."""
    codes = codes.buffer if isinstance(codes, Packed24) else codes.contiguous()
    return codes.view(torch.uint8)


def expected(form, w, mask, fmt):
    codes, scale = ck.quantize_fp8(torch.where(mask, w, 0.0).contiguous(), fmt)
    if form in LAYOUTS:
        layout, mask = LAYOUTS[form], mask.contiguous()
        codes = Packed24(pack(codes, mask, layout), tuple(w.shape), codes.dtype, layout)
    return written(codes), scale


def agree(first, second, scales, wanted):
    for codes, scale, (want, want_scale) in zip((first, second), scales, wanted, strict=True):
        assert torch.equal(written(codes), want) and scale == want_scale


@backends
@formats
@each(
    ("own", "other"),
    [
        ("packed", "packed"), ("packed", "dense"), ("dense", "turned"), ("packed", "cutlass"),
        ("learnt", "learnt"), ("vendor", "vendor"),
    ],
)  # fmt: skip
def test_both_directions_are_those_of_separate_passes(own, other, fmt, backend):
    """They are for a weight under a mask that does not keep the largest entries, and for a
    compressed one whose columns are pruned by an older weight, its largest entry among them."""
    shape = 128 if other == "cutlass" else 64, 128 if own == "cutlass" else 192
    w, mask = weight(*shape), ck.transposable_mask24(weight(*shape, seed=1))
    first, second = room(own, w.shape, "e4m3"), room(other, w.shape[::-1], fmt)
    scales = torch.empty(2, device=DEVICE)
    quantize24_(first, second, scales, w, mask, backend=backend)
    wanted = expected(own, w, mask, "e4m3"), expected(other, w.t(), mask.t(), fmt)
    agree(first, second, scales, wanted)
    row_mask = ck.pack_mask(ck.nm_mask(w))
    values = ck.compress_nm(w, row_mask)
    chosen = ck.double_prune_bits(ck.compress_nm(weight(*shape, seed=1), row_mask), row_mask)
    values.view(-1)[ck.unpack_mask(chosen, 96).view(-1).logical_not().nonzero()[0]] = 30.0
    quantize_compressed24_(first, second, scales, values, row_mask, chosen, backend=backend)
    w, mask = ck.expand_nm(values, row_mask), ck.unpack_mask(row_mask, 192)
    both = ck.expand_nm(ck.unpack_mask(chosen, 96).float(), row_mask) != 0
    agree(first, second, scales, (expected(own, w, mask, "e4m3"),
                                  expected(other, w.t(), both.t(), fmt)))  # fmt: skip
    assert scales[0] < 448 / 29 and scales[1] > 448 / 29 * (1 if fmt == "e4m3" else 128)


@backends
@formats
@each(("own", "known"), [("packed", True), ("cutlass", False), ("dense", False), ("learnt", True),
                         ("vendor", False)])  # fmt: skip
def test_a_projected_weight(own, known, fmt, backend):
    w, beta = weight(64, 128), torch.tensor(1.21, device=DEVICE)
    projected, every = ck.soft_threshold24(w) * beta, torch.ones_like(w.t(), dtype=torch.bool)
    first, second = room(own, w.shape, "e4m3"), room("dense", w.shape[::-1], fmt)
    scales, amax = torch.empty(2, device=DEVICE), projected.abs().max() if known else None
    quantize24_(first, second, scales, w, amax=amax, beta=beta, backend=backend)
    wanted = expected(own, projected, ck.nm_mask(w), "e4m3")
    agree(first, second, scales, (wanted, expected("dense", projected.t(), every, fmt)))


@backends
@each("shape", [(64, 64), (24, 12), (0, 8)])
def test_the_whole_of_a_weight_of_any_shape(backend, shape):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    own, other = room("dense", shape, "e4m3"), room("dense", shape[::-1], "e5m2")
    scales = torch.empty(2, device=DEVICE)
    quantize24_(own, other, scales, w, backend=backend)
    every = torch.ones_like(w, dtype=torch.bool)
    wanted = expected("dense", w, every, "e4m3"), expected("dense", w.t(), every.t(), "e5m2")
    agree(own, other, scales, wanted)
