"""All operators take operands of one device, with any strides, and whole numbers as seeds."""

import pytest
import torch

import common_kernels as ck
from common_kernels.backend import HAS_TRITON
from common_kernels.fp8.operands import (
    project_quantize24_,
    quantize_and_sample,
    quantize_both,
    rescale,
    scaled_linear,
)
from common_kernels.fp8.weights import quantize24_, quantize_compressed24_
from common_kernels.matmul import linear24, mm24, sample_mm24
from common_kernels.matmul.compressed import twice_pruned_mm24
from common_kernels.pack.compressed import Compressed24, prune_and_pack24_
from common_kernels.pack.operands import pack24_, pack_both24_, sample_pack24

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16 = torch.bfloat16
FP8 = torch.float8_e4m3fn, torch.float8_e5m2


def numbers(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def in_place(function):
    """`function`, which writes to some of its operands, as one that returns the new ones."""

    def call(backend, *operands):
        own = [x.clone(memory_format=torch.preserve_format) for x in operands]
        function(*own, backend=backend)
        return own

    return call


def pure(function, *more):
    return lambda backend, *operands: function(*operands, *more, backend=backend)


def without_backend(function):
    return lambda backend, *operands: function(*operands)


def cases():
    """name -> (call(backend, *operands), operands by name)"""
    w, x = numbers(128, 64), numbers(64, 64, dtype=BF16, seed=1)
    mask, both = ck.nm_mask(w), ck.transposable_mask24(w)
    bits = ck.pack_mask(mask)
    values = ck.compress_nm(w, bits)
    columns = ck.double_prune_bits(values, bits)
    packed = ck.pack24(w.to(BF16), mask, "cusparselt_sm90")
    one, bias = torch.tensor(1.5, device=DEVICE), numbers(64, dtype=BF16)
    key = torch.tensor([3, 4], device=DEVICE)
    buffer = torch.zeros(128 * 72, dtype=torch.uint8, device=DEVICE)
    dense = torch.zeros(128, 64, dtype=BF16, device=DEVICE)
    codes = torch.zeros(128, 64, device=DEVICE).to(FP8[0])
    other = torch.zeros(64, 128, device=DEVICE).to(FP8[1])
    scales = torch.zeros(2, device=DEVICE)
    both_ways = {"buffer": buffer, "transposed": buffer}

    def of(buffer, rows=128, dtype=BF16):
        """The matrix [rows, 8192 / rows] in these bytes."""
        return ck.Packed24((buffer,), (rows, 128 * 64 // rows), dtype)

    return {
        "nm_mask": (pure(ck.nm_mask), {"x": w}),
        "nm_mask of columns": (pure(ck.nm_mask, 2, 8, 0), {"x": w}),
        "transposable": (pure(ck.transposable_mask24), {"w": w}),
        "greedy": (pure(ck.transposable_mask24, "greedy"), {"w": w}),
        "check24": (pure(ck.check24), {"x": w}),
        "flip_rate": (pure(ck.flip_rate), {"old": mask, "new": both}),
        "soft_threshold24": (pure(ck.soft_threshold24), {"x": w}),
        "mvue24": (pure(ck.mvue24), {"x": w, "seed": key[0], "offset": key[1]}),
        "masked_decay_": (
            lambda backend, *o: in_place(lambda g, w, m, backend: ck.masked_decay_(
                g, w, m, 0.1, backend=backend))(backend, *o),
            {"grad": numbers(128, 64, seed=2), "weight": w, "mask": mask},
        ),
        "fake_fp8": (pure(ck.fake_fp8, "e4m3"), {"x": w}),
        "quantize_fp8": (pure(ck.quantize_fp8, "e5m2"), {"x": w}),
        "pack_mask": (pure(ck.pack_mask), {"mask": mask}),
        "unpack_mask": (pure(ck.unpack_mask, 64), {"bits": bits}),
        "compress_nm": (pure(ck.compress_nm), {"x": w, "bits": bits}),
        "expand_nm": (pure(ck.expand_nm), {"values": values, "bits": bits}),
        "double_prune_bits": (pure(ck.double_prune_bits), {"values": values, "bits": bits}),
        "pack24": (
            lambda backend, *o: ck.pack24(*o, "cusparselt_sm90", backend=backend).buffer,
            {"x": w.to(BF16), "mask": mask},
        ),
        "geglu": (pure(ck.geglu), {"x": w}),
        "swiglu": (pure(ck.swiglu), {"x": w}),
        "lowrank_addmm": (
            pure(ck.lowrank_addmm),
            {"y1": w, "y2": numbers(128, 8), "r": numbers(8, 64), "bias": bias},
        ),
        "matmul24": (
            lambda backend, *o: ck.matmul24(packed, *o, backend="dense"),
            {"x": x, "bias": numbers(128, dtype=BF16)},
        ),
        "linear24": (
            without_backend(lambda buffer, *o: linear24(of(buffer), *o)),
            {"buffer": packed.buffer, "x": x, "bias": numbers(128, dtype=BF16)},
        ),
        "mm24": (
            without_backend(lambda buffer, x: mm24(of(buffer), x)),
            {"buffer": packed.buffer, "x": x},
        ),
        "pack24_": (
            in_place(lambda buffer, w, mask, scale, dense, backend: pack24_(
                of(buffer), w, "mask", mask, scale, dense, backend=backend)),
            {"buffer": buffer, "w": w, "mask": mask, "scale": one, "dense": dense},
        ),
        "pack_both24_": (
            in_place(lambda buffer, transposed, *o, backend: pack_both24_(
                of(buffer), of(transposed, 64), *o, backend=backend)),
            {**both_ways, "w": w, "mask": both},
        ),
        "prune_and_pack24_": (
            in_place(lambda buffer, transposed, *o, backend: prune_and_pack24_(
                [Compressed24(**dict(zip(("values", "row_mask", "column_mask"), o, strict=True)),
                              packed=of(buffer), transposed=of(transposed, 64))],
                backend=backend)),
            {**both_ways, "values": values, "row_mask": bits, "column_mask": columns},
        ),
        "sample_pack24": (
            lambda backend, *o: sample_pack24(*o, backend=backend).buffer, {"dy": x, "key": key}
        ),
        "sample_mm24": (pure(sample_mm24), {"dy": x, "x": x, "key": key}),
        "twice_pruned_mm24": (
            pure(twice_pruned_mm24),
            {"x": numbers(32, 128, dtype=BF16), "values": values, "row_mask": bits,
             "column_mask": columns},
        ),
        "quantize_both": (pure(quantize_both, "e4m3", "e5m2"), {"x": w}),
        "quantize_and_sample": (
            lambda backend, *o: [
                part.buffer if isinstance(part, ck.Packed24) else part
                for part in quantize_and_sample(*o, 1, "e5m2", backend=backend)
            ],
            {"dy": w, "key": key},
        ),
        "project_quantize24_": (
            in_place(lambda buffer, *o, backend: project_quantize24_(
                of(buffer, dtype=FP8[0]), *o, backend=backend)),
            {"buffer": buffer[: 128 * 40], "codes": codes, "transposed_codes": other,
             "scales": scales, "w": w, "beta": one},
        ),
        "quantize24_": (
            in_place(lambda buffer, *o, backend: quantize24_(
                of(buffer, dtype=FP8[0]), *o, backend=backend)),
            {"buffer": buffer[: 128 * 40], "codes": other, "scales": scales, "w": w,
             "mask": mask},
        ),
        "quantize_compressed24_": (
            in_place(lambda buffer, *o, backend: quantize_compressed24_(
                of(buffer, dtype=FP8[0]), *o, backend=backend)),
            {"buffer": buffer[: 128 * 40], "codes": other, "scales": scales, "values": values,
             "row_mask": bits, "column_mask": columns},
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
every_operator = pytest.mark.parametrize("name", CASES)
every_backend = pytest.mark.parametrize("backend", ["cpu", *(["triton"] if HAS_TRITON else [])])


def flat(result):
    results = result if isinstance(result, tuple | list) else [result]
    return [r.contiguous().view(torch.uint8) if r.ndim else r for r in results]


@every_operator
@every_backend
def test_strides_make_no_difference(name, backend):
    """Every matrix may be a transposed view."""
    call, operands = CASES[name]

    def view(x):
        if x.ndim != 2:
            return x
        laid_out = torch.empty_strided(x.shape, (1, len(x)), dtype=x.dtype, device=x.device)
        return laid_out.copy_(x)

    views = [view(x) for x in operands.values()]
    got, want = flat(call(backend, *views)), flat(call(backend, *operands.values()))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("name", "key"),
    [(n, k) for n, (_, o) in CASES.items() for k in o if len(o) > 1 and (n, k) != ("mvue24", "x")],
)
@every_backend
def test_operands_lie_on_one_device(name, key, backend):
    """With one of them on `meta` the others' results were uninitialised memory.

    Seeds are numbers: on the CPU they go with any device.
    """
    call, operands = CASES[name]
    moved = {k: x.to("meta") if k == key else x for k, x in operands.items()}
    with pytest.raises(ValueError, match=r"on meta|and \w+ on .*: move them to one device"):
        call(backend, *moved.values())


@pytest.mark.parametrize("bad", [1.0, True, "1", None])
def test_seeds_and_offsets_are_whole_numbers(bad):
    x = torch.ones(8)
    for name, arguments in {"seed": (bad,), "offset": (0, bad)}.items():
        with pytest.raises(TypeError, match=f"{name} must be an int or a 0-dim int64 tensor, not"):
            ck.mvue24(x, *arguments)
    with pytest.raises(TypeError, match="seed must be an int"):
        ck.philox4x32(bad, torch.arange(4))


def test_writing_into_what_requires_grad_is_refused_as_by_torch():
    weight, mask = torch.ones(2, 4), torch.zeros(2, 4, dtype=torch.bool)
    leaf = torch.zeros(2, 4, requires_grad=True)
    for tensor, kind in (
        (leaf, "a leaf"),
        (leaf * 1, "a tensor"),
        (leaf.view(4, 2).t(), "a tensor"),
    ):
        operands = [t.expand(tensor.shape) if t.shape == tensor.shape else t.view(4, 2).t()
                    for t in (weight, mask)]  # fmt: skip
        with pytest.raises(RuntimeError, match=rf"masked_decay_ writes into {kind} that requires"):
            ck.masked_decay_(tensor, *operands, 0.5)
    assert not leaf.any()
    with torch.no_grad():
        ck.masked_decay_(leaf, weight, mask, 0.5)
    assert (leaf == 0.5).all() and leaf.grad_fn is None
