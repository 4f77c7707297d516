"""A table of all operators and what holds for each: on every backend they do what `reference.py`
defines, in every dtype, layout and shape; they are known to torch; their operands may have any
strides, but lie on one device."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle, product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import common_kernels as ck
from common_kernels.backend import HAS_TRITON
from common_kernels.compressed import reference as compressed
from common_kernels.decay import reference as decay
from common_kernels.fp8 import fp8_numbers, fp8_numbers_and_codes
from common_kernels.fp8 import reference as fp8
from common_kernels.fp8.operands import quantize_and_sample, quantize_both, rescale, scaled_linear
from common_kernels.fp8.weights import quantize24_, quantize_compressed24_
from common_kernels.glu import reference as glu
from common_kernels.lowrank import reference as lowrank
from common_kernels.masks import reference as masks
from common_kernels.matmul import linear24, mm24, sample_mm24
from common_kernels.matmul.pruned import compressed_mm24, pruned_mm24
from common_kernels.mvue import reference as mvue
from common_kernels.pack import BUFFERED
from common_kernels.pack import reference as pack
from common_kernels.pack.compressed import Compressed24, prune_and_pack24_
from common_kernels.pack.operands import pack24_, pack_both24_, sample_pack24
from common_kernels.relu24 import reference as relu24
from common_kernels.relu24 import relu24_backward, relu24_codes, relu24_packed
from common_kernels.soft_threshold import reference as soft_threshold

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BACKENDS = ["cpu", *(["triton"] if HAS_TRITON else [])]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BF16, FP8 = torch.bfloat16, (torch.float8_e4m3fn, torch.float8_e5m2)
inf, nan = torch.inf, torch.nan
LAYOUTS = {
    "dense": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT,
    "strided": lambda x: x.repeat_interleave(2, -1)[..., ::2],
}
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def numbers(shape, dtype=torch.float32, seed=0, special=False):
    """Random numbers with ties, zeros of both signs and a dominant one; on request NaN and Inf."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    flat = x.view(-1)
    flat[::3] = flat[::3].round()
    flat[:4] = torch.tensor([100.0, -1.0, 1.0, 0.5])[: flat.numel()]
    flat[7:9] = torch.tensor([-0.0, 0.0])[: max(0, flat.numel() - 7)]
    if special and flat.numel() > 32:
        flat[20], flat[25:28] = torch.nan, torch.inf
    return x.to(dtype)


def sparse(shape, dtype, special):
    half = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.5
    return (torch.where(half, numbers(shape, dtype, special=special), 0.0),)


def single(shape, dtype, special):
    return (numbers(shape, dtype, special=special),)


def two_masks(shape, dtype, special):
    return tuple(numbers(shape, seed=seed) > level for seed, level in ((0, 0), (1, 0.8)))


def of_decay(shape, dtype, special):
    grad = numbers(shape, dtype, special=special)
    return grad, numbers(shape, seed=1), numbers(shape, seed=2) > 0


def decayed(grad, weight, mask, alpha, backend):
    own = grad.clone(memory_format=torch.preserve_format)
    assert ck.masked_decay_(own, weight, mask, alpha, backend=backend) is own
    return own


@dataclass(frozen=True)
class Operator:
    """operands(shape, dtype, special) makes the tensors; each of `more` follows them in a call."""

    function: Callable
    reference: Callable
    more: tuple[tuple, ...] = ((),)
    operands: Callable = single
    special: bool = True  # the definition holds for NaN and Inf


EXACT = {
    "nm_mask": Operator(
        ck.nm_mask, masks.nm_mask,
        ((2, 4, -1), (2, 4, -2), (1, 2, -1), (3, 4, -2), (2, 8, -2), (4, 8, -1), (0, 4), (4, 4)),
    ),
    "double_prune_mask": Operator(
        ck.double_prune_mask, lambda w: masks.nm_mask(w, dim=0), operands=sparse
    ),
    "transposable_mask24": Operator(
        ck.transposable_mask24, masks.transposable_mask24,
        (("exact",), ("greedy",), ("two_approx",)), special=False,
    ),
    "check_nm": Operator(
        ck.check_nm, masks.check_nm,
        ((2, 4, -1), (2, 4, -2), (0, 1, -1), (1, 2, -2), (3, 4, -1), (4, 8, -1)), sparse,
    ),
    "flip_rate": Operator(ck.flip_rate, masks.flip_rate, operands=two_masks),
    "soft_threshold24": Operator(ck.soft_threshold24, soft_threshold.soft_threshold24),
    "mvue24": Operator(
        lambda x, seed, offset, dim, backend: ck.mvue24(x, seed, offset, dim=dim, backend=backend),
        lambda x, seed, offset, dim: mvue.mvue24(x, seed, offset, dim=dim),
        (
            (7, 0, -1), (2**40 + 3, 10**10 + 1, -2), (12345678901234, (1 << 35) + 4, -1),
            (7, 6, -1), (7, 7, -2),  # groups that begin at each word of a counter
        ),
        special=False,
    ),
    "masked_decay_": Operator(decayed, decay.masked_decay, ((0.37,), (-0.1,), (0.0,)), of_decay),
    "quantize_fp8": Operator(
        ck.quantize_fp8, fp8.quantize_fp8, (("e4m3",), ("e5m2",)), special=False
    ),
    "fake_fp8": Operator(ck.fake_fp8, fp8.fake_fp8, (("e4m3",), ("e5m2",)), special=False),
    "fp8_numbers": Operator(fp8_numbers, fp8.quantize_fp8, (("e4m3",),), special=False),
    "fp8_numbers_and_codes": Operator(
        fp8_numbers_and_codes,
        lambda x, fmt, kept: (*fp8.quantize_fp8(x, fmt), *fp8.quantize_fp8(x, kept)),
        (("e4m3", "e4m3"), ("e4m3", "e5m2")), special=False,
    ),
}  # fmt: skip


def results(found):
    return list(found) if isinstance(found, tuple) else [found]


def same_bits(got, want):
    """Equal in every bit but those of a NaN, and in shape, dtype and strides."""
    assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
    if got.is_floating_point():
        got, want = got.float(), want.float()
        assert torch.equal(got.isnan(), want.isnan())
        got, want = (x.nan_to_num(nan=0.0).view(torch.int32) for x in (got, want))
    assert torch.equal(got, want)


@every_backend
@pytest.mark.parametrize("name", EXACT)
def test_the_definition(name, backend):
    """Values of the definition, NaN beside NaN, and the input's strides; layouts take turns."""
    operator, layouts = EXACT[name], cycle(LAYOUTS.values())
    for dtype in DTYPES:
        operands = operator.operands((16, 24), dtype, operator.special)
        for more in operator.more:
            layout = next(layouts)
            laid_out = [layout(t).to(DEVICE) for t in operands]
            found = results(operator.function(*laid_out, *more, backend=backend))
            wanted = results(operator.reference(*operands, *more))
            for got, want in zip(found, wanted, strict=True):
                want = torch.as_tensor(want, dtype=torch.float32)
                rtol = 2**-23 * (name == "flip_rate")
                torch.testing.assert_close(
                    got.cpu().float(), want, rtol=rtol, atol=0, equal_nan=True
                )
                assert not got.ndim or got.stride() == torch.empty_like(laid_out[0]).stride()


@pytest.mark.skipif(not HAS_TRITON, reason="no Triton for this platform")
@pytest.mark.parametrize("name", EXACT)
def test_the_backends_agree_in_every_bit(name):
    """In several blocks, groups that meet the end of a row in one, leading dims, without entries.
    Dtypes and layouts take turns, so that each meets each."""
    operator, layouts = EXACT[name], cycle(LAYOUTS.values())
    for shape in ((36, 48), (3, 8, 20), (4, 4), (16, 700), (4, 1028), (0, 8), (8, 0)):
        if (name == "double_prune_mask" and len(shape) > 2) or (
            "transposable" in name and DEVICE.type == "cpu" and max(shape) > 500
        ):
            continue  # slow under the interpreter
        for dtype in {(16, 700): DTYPES[1:], (4, 1028): DTYPES[:1]}.get(shape, DTYPES):
            layout = next(layouts)
            operands = [layout(t).to(DEVICE) for t in operator.operands(shape, dtype, True)]
            for more in operator.more:
                m = 4 if name == "mvue24" else more[1] if len(more) == 3 else 1
                if "two_approx" in more or (m > 1 and shape[more[2]] % m):
                    continue  # it has no kernel
                found = (
                    results(operator.function(*operands, *more, backend=backend))
                    for backend in ("triton", "cpu")
                )
                for got, want in zip(*found, strict=True):
                    same_bits(got, want)
        next(layouts)


def near(got, want, terms, roundings):
    """One rounding to got's dtype, and some in fp32 of the terms that were added up."""
    info = torch.finfo(got.dtype)
    bound = info.eps / 2 * want.abs() + info.tiny + roundings * terms
    assert ((got.detach().cpu().double() - want).abs() <= bound).all()


@every_backend
def test_the_definition_of_what_rounds(backend):
    for dtype in DTYPES:
        x = numbers((12, 20), dtype)
        on = x.to(DEVICE)
        for gamma in (0.25, 1.0):  # interpolated in another order by either path
            got = ck.soft_threshold24(on, gamma, backend=backend)
            want = soft_threshold.soft_threshold24(x, gamma)
            near(got, want.double(), x.double().abs().max() + want.double().abs() / 2**-24
                 * torch.finfo(dtype).eps / 4, 4 * 2**-24)  # fmt: skip


@every_backend
@pytest.mark.parametrize("name", ["geglu", "swiglu"])
def test_gated_activations_forward_and_backward(name, backend):
    """Rows that end anywhere in a kernel's block, in every layout, closed gates among them. exp at
    an argument z adds 2 + |z| exp(-|z|) roundings at most."""
    layouts = {**LAYOUTS, "columns": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1)}
    turns = cycle(layouts.values())
    for shape in ((7, 6), (3, 5, 34), (1030, 2), (2, 2100)):
        for dtype, layout in ((dtype, next(turns)) for dtype in DTYPES):
            x = (3 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).clamp(-6, 6)
            x[..., -1].view(-1)[:6] = torch.tensor([-50.0, 50, -1e4, 1e4, 0.0, -0.0])[
                : x[..., -1].numel()
            ]
            x, dy = x.to(dtype), numbers((*shape[:-1], shape[-1] // 2), dtype, 1).clamp(-6, 6)
            exact = x.double().requires_grad_()
            want = getattr(glu, name)(exact)
            want.backward(dy.double())
            on = layout(x).to(DEVICE).detach().requires_grad_()
            got = getattr(ck, name)(on, backend=backend)
            got.backward(dy.to(DEVICE))
            assert exact.grad is not None and on.grad is not None
            like = torch.empty_like(on)
            order = sorted(range(like.ndim), key=like.stride, reverse=True)
            assert got.permute(order).is_contiguous() and on.grad.stride() == like.stride()
            value, gate = x.double().abs().chunk(2, -1)
            near(got, want.detach(), value * (1 + gate), 16 * 2**-24)
            terms = torch.cat([1 + gate, value * (1 + gate)], -1) * dy.double().abs().repeat(
                *[1] * (dy.ndim - 1), 2
            )
            near(on.grad, exact.grad, terms, 16 * 2**-24)
    big, closed = 1e20, -1e20  # value * gate overflows where the activation is zero
    rows = [[big, closed], [closed, closed], [1.0, 1e30], [1.0, nan], [nan, 1.0], [inf, 1.0],
            [2.0, inf]]  # fmt: skip
    x = torch.tensor(rows, device=DEVICE, requires_grad=True)
    y = getattr(ck, name)(x, backend=backend)
    y.sum().backward()
    assert x.grad is not None and not y[:2].any() and not x.grad[:2].any() and y[2] == 1e30
    assert y[3:5].isnan().all() and (y[5:] == inf).all() and x.grad[3].isnan().all()


@every_backend
def test_squared_relu_of_which_two_of_four_stay(backend):
    """To the last bit, forward and backward, NaN, Inf and groups without a positive entry too."""
    turns = cycle(LAYOUTS.values())
    for shape in ((3, 4), (5, 2, 12), (70, 36), (0, 8)):
        for dtype, prune in product(DTYPES, (True, False)):
            z, dh = numbers(shape, dtype, special=True), numbers(shape, dtype, 1)
            want = relu24.relu24(z, prune)
            on = next(turns)(z).to(DEVICE).detach().requires_grad_()
            got = ck.relu24(on, prune, backend=backend)
            got.backward(dh.to(DEVICE))
            same_bits(got.detach().cpu(), want)
            dz = on.grad.cpu().clone(memory_format=torch.contiguous_format)
            same_bits(dz, relu24.relu24_backward(dh, want))


@every_backend
def test_lowrank(backend):
    """Slices of one tensor, with one rounding of rank + 3 fp32 terms, of which tensor cores
    truncate the last two bits; as two parts, whose sum is exact here, y2 is the same."""
    unit = 2**-24 if backend == "cpu" else 2**-22
    for rows, out, rank in ((9, 12, 4), (70, 130, 40), (5, 6, 0), (0, 6, 4), (3, 0, 4)):
        for dtype in DTYPES:
            z, r = numbers((2, rows, out + rank), dtype), numbers((out, rank), dtype, 1).t()
            for bias, scale in ((numbers((out,), dtype, 2), 0.25), (None, -2.0)):
                given = z[..., :out], z[..., out:], r, bias
                on = [t if t is None else t.to(DEVICE) for t in given]
                got = ck.lowrank_addmm(*on, scale, backend=backend)
                sizes = [t if t is None else t.double().abs() for t in given]
                assert got.dtype == dtype and got.is_contiguous()
                near(got, lowrank.lowrank_addmm(*given, scale),
                     lowrank.lowrank_addmm(*sizes, abs(scale)), (rank + 3) * unit)  # fmt: skip
                on[1] = torch.stack([2 * on[1], -on[1]], -2)
                same_bits(ck.lowrank_addmm(*on, scale, backend=backend), got)
    shapes = (2, 3, 12), (2, 3, 5), (5, 12), (12,)
    given = [numbers(shape, seed=n).to(DEVICE).requires_grad_() for n, shape in enumerate(shapes)]
    dy, (y1, y2, r, bias) = numbers((2, 3, 12), seed=4).to(DEVICE), given
    got = torch.autograd.grad(ck.lowrank_addmm(*given, 0.5, backend=backend), given, dy)
    want = torch.autograd.grad(y1 + 0.5 * (y2 @ r) + bias, given, dy)
    torch.testing.assert_close(got, want)
    parts = y1, torch.stack([y2, y2], 2), r, bias
    got = torch.autograd.grad(ck.lowrank_addmm(*parts, 0.25, backend=backend), given, dy)
    torch.testing.assert_close(got, want)
    one = torch.ones(1, 1, device=DEVICE)
    assert ck.lowrank_addmm(nan * one, 0 * one, one, backend=backend).isnan()


@every_backend
def test_the_compressed_form(backend):
    """Groups within bytes, of whole bytes and across them; rows that end within a byte; groups too
    large for a thread. Every bit is kept, and every kept zero stays."""
    patterns = (
        (1, 2, 16), (2, 4, 48), (2, 8, 32), (4, 8, 16), (2, 16, 48), (2, 32, 64), (1, 1, 8),
        (2, 4, 12), (3, 7, 21), (3, 4, 8), (2, 30, 60), (4, 64, 64), (8, 8, 16),
    )  # fmt: skip
    casts = cycle(DTYPES[1:] + DTYPES)
    for (n, m, columns), dtype in zip(patterns, cycle(DTYPES)):
        rows = -(-150 // m) * m
        x, mask = numbers((rows, columns), dtype), numbers((rows, columns), seed=1)
        mask = masks.nm_mask(mask, n, m)
        x[:m, ::2], x[m:, 1::5] = 2.0**-149, 0.0  # as small as a kept zero counts, or zero
        bits = ck.pack_mask(mask.to(DEVICE), backend=backend)
        same_bits(bits.cpu(), compressed.pack_mask(mask))
        same_bits(ck.unpack_mask(bits, columns, backend=backend).cpu(), mask)
        values = ck.compress_nm(x.to(DEVICE), bits, n, m, backend=backend)
        same_bits(values.cpu(), compressed.compress_nm(x, bits.cpu(), n, m))
        other = next(casts)
        cast = ck.compress_nm(x.to(DEVICE), bits, n, m, dtype=other, backend=backend)
        same_bits(cast, values.to(other))
        both = values.cpu(), bits.cpu()
        dense = ck.expand_nm(values, bits, n, m, backend=backend)
        same_bits(dense.cpu(), compressed.expand_nm(*both, n, m))
        second = ck.double_prune_bits(values, bits, n, m, backend=backend)
        same_bits(second.cpu(), compressed.double_prune_bits(*both, n, m))
    for shape in ((0, 8), (3, 0)):
        x = torch.ones(shape, device=DEVICE)
        bits = ck.pack_mask(x.bool(), backend=backend)
        assert ck.unpack_mask(bits, shape[1], backend=backend).shape == shape
        values = ck.compress_nm(x, bits, backend=backend)
        assert ck.expand_nm(values, bits, backend=backend).shape == shape


@every_backend
@pytest.mark.parametrize("layout", pack.LAYOUTS)
def test_packed_matrices(layout, backend):
    """Groups with two, one and no entry kept."""
    for dtype in (torch.float32, BF16, torch.int8):
        if dtype.itemsize not in ck.pack.cpu.LAYOUTS[layout].forms:
            continue
        shapes = [(64, 256)] + [(64, 48)] * ((layout, dtype) == ("cusparselt_sm90", BF16))
        for shape in shapes:
            x = (20 * numbers(shape, seed=3)).to(dtype)
            mask = masks.nm_mask(numbers(shape)) & (numbers(shape, seed=1) > -0.5)
            packed = ck.pack24(x.to(DEVICE), mask.to(DEVICE), layout, backend=backend)
            values, nibbles = pack.compress(x, mask)
            same_bits(packed.values.cpu(), values)
            meta = packed.meta.cpu().flatten().view(torch.uint8)
            same_bits(meta, pack.metadata(nibbles, layout, dtype.itemsize))
            same_bits(ck.unpack24(packed).cpu(), torch.where(mask, x, 0))


def in_place(function):
    """`function`, which writes to some of its operands, as one that returns the new ones."""

    def call(backend, *operands):
        own = [x.clone(memory_format=torch.preserve_format) for x in operands]
        function(*own, backend=backend)
        return own

    return call


def pure(function, *more):
    def call(backend, *operands):
        found = function(*operands, *more, backend=backend)
        return [t.buffer if isinstance(t, ck.Packed24) else t for t in results(found)]

    return call


def without_backend(function):
    return lambda backend, *operands: function(*operands)


def cases():
    """name -> (call(backend, *operands), operands by name)"""
    w, x = numbers((128, 64)).to(DEVICE), numbers((64, 64), BF16, 1).to(DEVICE)
    mask, both = ck.nm_mask(w), ck.transposable_mask24(w)
    bits = ck.pack_mask(mask)
    values = ck.compress_nm(w, bits)
    columns = ck.double_prune_bits(values, bits)
    packed = ck.pack24(w.to(BF16), mask, "cusparselt_sm90")
    fragments = ck.fragments24(packed)
    integers = ck.fragments24(ck.quantize24(packed, 4))
    bias, wide_bias = numbers((64,), BF16).to(DEVICE), numbers((128,), BF16).to(DEVICE)
    one, seen, scales = (torch.tensor(n, device=DEVICE) for n in (1.5, 0.5, [0.0, 0.0]))
    key = torch.tensor([3, 4], device=DEVICE)
    buffer = torch.zeros(128 * 72, dtype=torch.uint8, device=DEVICE)
    room, dense = buffer[: 128 * 40], torch.zeros(128, 64, dtype=BF16, device=DEVICE)
    codes, other = (torch.zeros(s, device=DEVICE) for s in ((128, 64), (64, 128)))
    codes, other = codes.to(FP8[0]), other.to(FP8[1])
    stored = {"values": values, "row_mask": bits, "column_mask": columns}

    def of(buffer, rows=128, dtype=BF16):
        """The matrix [rows, 8192 / rows] in these bytes."""
        return ck.Packed24(buffer, (rows, 128 * 64 // rows), dtype, "cusparselt_sm90")

    def delayed(function, *more):
        """With an amax and what was seen, which is written."""
        return in_place(
            lambda x, *o, backend: function(x, *o[:-2], *more, *o[-2:], backend=backend)
        )

    return {
        "nm_mask": (pure(ck.nm_mask), {"x": w}),
        "transposable": (pure(ck.transposable_mask24), {"w": w[:16]}),
        "check24": (pure(ck.check24), {"x": w}),
        "flip_rate": (pure(ck.flip_rate), {"old": mask, "new": both}),
        "soft_threshold24": (pure(ck.soft_threshold24), {"x": w}),
        "mvue24": (pure(ck.mvue24), {"x": w, "seed": key[0], "offset": key[1]}),
        "masked_decay_": (
            in_place(lambda g, w, m, backend: ck.masked_decay_(g, w, m, 0.1, backend=backend)),
            {"grad": numbers((128, 64), seed=2).to(DEVICE), "weight": w, "mask": mask},
        ),
        "fake_fp8": (pure(ck.fake_fp8, "e4m3"), {"x": w}),
        "quantize_fp8": (pure(ck.quantize_fp8, "e5m2"), {"x": w}),
        "fp8_numbers": (pure(fp8_numbers, "e4m3"), {"x": w}),
        "fp8_numbers_and_codes": (pure(fp8_numbers_and_codes, "e4m3", "e5m2"), {"x": w}),
        "pack_mask": (pure(ck.pack_mask), {"mask": mask}),
        "unpack_mask": (pure(ck.unpack_mask, 64), {"bits": bits}),
        "compress_nm": (pure(ck.compress_nm), {"x": w, "bits": bits}),
        "expand_nm": (pure(ck.expand_nm), {"values": values, "bits": bits}),
        "double_prune_bits": (pure(ck.double_prune_bits), {"values": values, "bits": bits}),
        "pack24": (pure(ck.pack24, "cusparselt_sm90"), {"x": w.to(BF16), "mask": mask}),
        "convert24": (
            without_backend(lambda b: ck.unpack24(ck.convert24(of(b), "neutral"))),
            {"buffer": packed.buffer},
        ),
        "geglu": (pure(ck.geglu), {"x": w}),
        "swiglu": (pure(ck.swiglu), {"x": w}),
        "geglu, backward": (
            lambda backend, x: torch.ops.sparse24.glu_backward(x[:, :32], x, "gelu", backend),
            {"x": w},
        ),
        "relu24_codes": (  # first, as the kernel is compiled for it with all that it has
            delayed(
                lambda dh, h, *more, backend: relu24_codes(
                    dh, h, "e5m2", "cusparselt_sm90", *more, backend=backend
                )
            ),
            {"dh": w.to(BF16), "h": torch.where(mask, w.abs(), 0.0).to(BF16), "amax": one,
             "seen": seen},
        ),
        "relu24_packed": (pure(relu24_packed, "cutlass_sm90"), {"z": w.to(BF16)}),
        "relu24_backward": (
            pure(relu24_backward, "cusparselt_sm90"),
            {"dh": w.to(BF16), "h": torch.where(mask, w.abs(), 0.0).to(BF16)},
        ),
        "relu24": (pure(ck.relu24), {"z": w}),
        "lowrank_addmm": (
            pure(ck.lowrank_addmm),
            {"y1": w, "y2": numbers((128, 8)).to(DEVICE), "r": numbers((8, 64)).to(DEVICE),
             "bias": bias},
        ),
        "matmul24": (
            without_backend(lambda *o: ck.matmul24(packed, *o, backend="dense")),
            {"x": x, "bias": wide_bias},
        ),
        "linear24": (
            without_backend(lambda buffer, *o: linear24(of(buffer), *o)),
            {"buffer": packed.buffer, "x": x, "bias": wide_bias},
        ),
        "linear24, differentiable": (
            without_backend(lambda buffer, x: linear24(of(buffer), x.detach().requires_grad_())),
            {"buffer": packed.buffer, "x": x},
        ),
        "mm24 of codes": (
            without_backend(lambda buffer, x, *scales: mm24(
                of(buffer, dtype=FP8[0]), x, transposed=True, scales=scales, factor=2)),
            {"buffer": room, "x": w[:32].to(FP8[0]), "scale": one, "other": one},
        ),
        "mm24": (
            without_backend(lambda buffer, x: mm24(of(buffer), x)),
            {"buffer": packed.buffer, "x": x},
        ),
        "few_tokens24": (
            lambda backend, values, *o: ck.few_tokens24(
                replace(fragments, values=values), *o, backend=backend),
            {"values": fragments.values, "x": x[:5], "bias": wide_bias},
        ),
        "few_tokens24 of integers": (
            lambda backend, values, scales, *o: ck.few_tokens24(
                replace(integers, values=values, scales=scales), *o, backend=backend),
            {"values": integers.values, "scales": integers.scales, "x": x[:5], "bias": wide_bias},
        ),
        "pack24_": (
            in_place(lambda buffer, w, mask, scale, dense, backend: pack24_(
                of(buffer), w, "mask", mask, scale, dense, backend=backend)),
            {"buffer": buffer, "w": w, "mask": mask, "scale": one, "dense": dense},
        ),
        "pack_both24_": (
            in_place(lambda buffer, transposed, *o, backend: pack_both24_(
                of(buffer), of(transposed, 64), *o, backend=backend)),
            {"buffer": buffer, "transposed": buffer, "w": w, "mask": both},
        ),
        "prune_and_pack24_": (
            in_place(lambda buffer, transposed, *o, backend: prune_and_pack24_(
                [Compressed24(**dict(zip(stored, o, strict=True)), packed=of(buffer),
                              transposed=of(transposed, 64))], backend=backend)),
            {"buffer": buffer, "transposed": buffer, **stored},
        ),
        "sample_pack24": (pure(sample_pack24), {"dy": x, "key": key}),
        "sample_mm24": (pure(sample_mm24), {"dy": x, "x": x, "key": key}),
        "compressed_mm24": (
            pure(compressed_mm24), {"x": numbers((32, 128), BF16).to(DEVICE), **stored}
        ),
        "pruned_mm24": (
            lambda backend, x, w, scale, bias: pruned_mm24(
                x, w, "soft", None, scale, bias, dtype=BF16, layout=BUFFERED, backend=backend),
            {"x": x, "w": w, "scale": one, "bias": wide_bias},
        ),
        "quantize_both": (pure(quantize_both, "e4m3", "e5m2"), {"x": w}),
        "quantize_and_sample": (pure(quantize_and_sample, 1, "e5m2"), {"dy": w, "key": key}),
        "quantize24_": (
            in_place(lambda buffer, *o, backend: quantize24_(
                of(buffer, dtype=FP8[0]), *o, backend=backend)),
            {"buffer": room, "codes": other, "scales": scales, "w": w, "mask": mask},
        ),
        "quantize_compressed24_": (
            in_place(lambda buffer, *o, backend: quantize_compressed24_(
                of(buffer, dtype=FP8[0]), *o, backend=backend)),
            {"buffer": room, "codes": other, "scales": scales, **stored},
        ),
        "rescale": (
            pure(lambda y, scale, other, bias, backend: rescale(
                y, scale, other, 1.0, bias, backend=backend)),
            {"y": w, "scale": one, "other": one, "bias": bias},
        ),
        "scaled_linear": (
            without_backend(scaled_linear),
            {"x": w.to(FP8[0]), "w": w.to(FP8[0]), "x_scale": one, "w_scale": one},
        ),
    }  # fmt: skip


CASES = cases()


def turned(x):
    """x as a transposed view, if it is a matrix."""
    if x.ndim != 2:
        return x
    return torch.empty_strided(x.shape, (1, len(x)), dtype=x.dtype, device=x.device).copy_(x)


@pytest.mark.parametrize("name", CASES)
def test_strides_make_no_difference(name):
    call, operands = CASES[name]
    for backend in BACKENDS:
        views = results(call(backend, *map(turned, operands.values())))
        plain = results(call(backend, *operands.values()))
        for a, b in zip(*(x if isinstance(x[0], torch.Tensor) else x[0] for x in (views, plain)),
                        strict=True):  # fmt: skip
            same = (t.contiguous().view(torch.uint8) if t.ndim else t for t in (a, b))
            assert torch.equal(*same)


def test_operands_lie_on_one_device():
    """With one of them on `meta` the others' results were uninitialised memory. Seeds are numbers:
    on the CPU they go with any device."""
    for name, (call, operands) in CASES.items():
        for key in operands if len(operands) > 1 else ():
            if (name, key) == ("mvue24", "x"):
                continue
            moved = {k: x.to("meta") if k == key else x for k, x in operands.items()}
            for backend in BACKENDS:
                with pytest.raises(ValueError, match=r"on meta|and \w+ on .*: move them to one"):
                    call(backend, *moved.values())


class Recorded(TorchDispatchMode):
    """Keeps each operator of ours that is called, with its arguments as they are then."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.namespace == "sparse24":
            own = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
            self.calls.append((operator, own))
        return operator(*args, **(kwargs or {}))


@pytest.mark.skipif(DEVICE.type != "cpu", reason="its CPU side; on a GPU the fakes are the same")
def test_opcheck():
    """Schema, fakes and autograd of every registered operator, also of turned tensors."""
    schema, fakes, autograd = "test_schema", "test_faketensor", "test_autograd_registration"
    checked = set()
    for call, operands in CASES.values():
        for change in (lambda x: x, turned):
            with Recorded() as seen:
                call("cpu", *map(change, operands.values()))
            for operator, args in seen.calls:
                tensors = [a for a in args if isinstance(a, torch.Tensor)]
                made = operator(*[a.clone() if isinstance(a, torch.Tensor) else a for a in args])
                # opcheck compares with allclose and multiplies what is mutated: FP8 has neither.
                codes = any(getattr(t, "dtype", None) in FP8 for t in (*tensors, *results(made)))
                tests = [fakes] if codes else [schema, fakes]
                if change is not turned and not codes:
                    tests.append("test_aot_dispatch_dynamic")
                torch.library.opcheck(operator, args, test_utils=tests)
                for a in tensors:
                    a.requires_grad_(a.dtype in DTYPES)
                torch.library.opcheck(operator, args, test_utils=autograd)
                checked.add(operator.name())
    names = {n for n in torch._C._dispatch_get_all_op_names() if n.startswith("sparse24::")}
    # What C++ calls to make a plan or a kernel, and what it calls alone.
    others = {
        "plan24", "place24", "kernels24", "launch24", "sample_mm24_launched", "quantize_both24",
        "quantize_and_sample24", "quantize_both24_", "quantize_and_sample24_", "compress24",
        "quantize_weight24_",
    }  # fmt: skip
    assert checked == names - {f"sparse24::{name}" for name in others}
