"""Layout `cusparselt`, which the library packs itself, and one whose order was learnt: the same
matrices as in the layout of a known order, so the same products, bit for bit. On a CPU the library
is emulated, and the order that was learnt is an invented one."""

from dataclasses import replace

import pytest
import torch

from common_kernels import compress_nm, double_prune_bits, nm_mask, pack_mask, transposable_mask24
from common_kernels.adamw import Rates, Rule, Weight24, adamw24_
from common_kernels.fp8.operands import quantize_and_sample
from common_kernels.fp8.weights import quantize24_, quantize_compressed24_
from common_kernels.matmul import Problem, cusparselt, linear24, matmul24, mm24, sample_mm24, table
from common_kernels.matmul.compressed import twice_pruned_mm24
from common_kernels.matmul.table import Trial
from common_kernels.pack import (
    BUFFERED,
    VENDOR,
    Packed24,
    convert24,
    cpu,
    learn,
    pack24,
    unpack24,
)
from common_kernels.pack import cusparselt as loader
from common_kernels.pack.compressed import prune_and_pack24_
from common_kernels.pack.operands import pack24_, pack_both24_, sample_pack24
from common_kernels.pack.weight import Compressed24
from tests.each import each

pytest.importorskip("triton", reason="no Triton for this platform")

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
HOPPER = CUDA and torch.cuda.get_device_capability() == (9, 0)
BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
pytestmark = pytest.mark.skipif(CUDA and not HOPPER, reason="BUFFERED is for 9.0")
LEARNT = learn.layout_on(DEVICE) if HOPPER else "cusparselt_learnt_invented"
ORDERS = {1: "g r r5 r1 g3 r4 r0 g2 g0 r2 g1 r3", 2: "g r g3 r5 r2 r1 r0 r4 g2 r3 g1 g0"}
FORMS = {size: cpu.Form(64, 64, torch.uint8, order) for size, order in ORDERS.items()}
ways = each(("backend", "own"), [("cpu", VENDOR), ("triton", VENDOR), ("triton", LEARNT)])


@pytest.fixture(autouse=True)
def invented(monkeypatch):
    if not HOPPER:
        monkeypatch.setitem(cpu.LAYOUTS, LEARNT, cpu.Layout(FORMS))


def numbers(*shape, seed=0, dtype=torch.float32):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.to(DEVICE, dtype)


def product(packed):
    """With random numbers, by one algorithm for both layouts."""
    (rows, columns), fp8 = packed.shape, packed.dtype.itemsize == 1
    x = numbers(columns, 48, dtype=packed.dtype) if not fp8 else numbers(48, columns)
    x, out = (x.to(packed.dtype), torch.float32) if fp8 else (x, packed.dtype)
    if not CUDA:
        return mm24(packed, x, out, transposed=fp8)
    plan = cusparselt.Plan(Problem(rows, columns, 48, x.dtype, out, fp8, False), 0, 0)
    y = torch.empty(rows, 48, dtype=out, device=DEVICE)
    plan.run(packed.buffer, x, y)
    return y


def both(make, backend, own, other=None if CUDA else "cpu"):
    """Return what `make(layout, backend)` writes in layout `own`, after comparing its products with
    those in the known one. On a CPU that is packed by plain PyTorch, which takes less time."""
    found, want = make(own, backend), make(BUFFERED, other or backend)
    for one, other in zip(found, want, strict=True):
        assert (one.layout, one.shape, one.dtype) == (own, other.shape, other.dtype)
        assert len(one.buffer) >= len(other.buffer)
        assert product(one).count_nonzero() and torch.equal(product(one), product(other))
    return found


@ways
@each("dtype", [BF16, torch.float16, E4M3, E5M2])
@each("shape", [(64, 64), (192, 320)])
def test_a_packed_matrix(dtype, shape, backend, own):
    mask = nm_mask(numbers(*shape)) & (numbers(*shape, seed=1) > -1)  # groups with one or none
    x = numbers(*shape, seed=2).to(dtype)
    for make in (
        lambda layout, backend: [pack24(x, mask, layout, backend=backend)],
        lambda layout, backend: [convert24(pack24(x, mask, backend=backend), layout)],
    ):
        (packed,) = both(make, backend, own)
        if own == VENDOR:
            with pytest.raises(ValueError, match="read by cuSPARSELt's products alone"):
                unpack24(packed)
        else:
            assert torch.equal(unpack24(packed), torch.where(mask, x.float(), 0.0).to(dtype))


def test_products_and_what_they_refuse():
    mask, x = nm_mask(numbers(64, 128)), numbers(24, 128, seed=1, dtype=BF16)
    own = pack24(numbers(64, 128, dtype=BF16), mask, VENDOR)
    dense = matmul24(pack24(numbers(64, 128, dtype=BF16), mask), x, backend="dense")
    for backend in ("cusparselt", None) if CUDA else ("cusparselt",):
        got = matmul24(own, x, backend=backend)
        assert (got - dense).abs().max() <= 2**-7 * dense.abs().max()
    compiled = torch.compile(lambda x: linear24(own, x), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), linear24(own, x))


@ways
@each("dtype", [BF16, torch.float16])
def test_operands_of_a_weight(dtype, backend, own):
    w, scale = numbers(128, 192), torch.tensor(1.5, device=DEVICE)
    mask = transposable_mask24(w)

    def one(source, layout, backend, **more):
        out, dense = Packed24.empty((128, 192), dtype, DEVICE, layout), w.to(dtype)
        pack24_(out, w, source, dense=dense, **more, backend=backend)
        outs.append(dense)
        return [out]

    def two(layout, backend):
        shapes = (128, 192), (192, 128)
        outs = [Packed24.empty(shape, dtype, DEVICE, layout) for shape in shapes]
        pack_both24_(*outs, w, mask, backend=backend)
        return outs

    for source, more in (("magnitude", {}), ("soft", {"scale": scale}), ("mask", {"mask": mask})):
        outs: list[torch.Tensor] = []
        both(lambda *how, s=source, m=more: one(s, *how, **m), backend, own)
        assert torch.equal(*outs)
    both(two, backend, own)
    # SLoPe's
    rows = nm_mask(w)
    stored = {"values": compress_nm(w, pack_mask(rows)), "row_mask": pack_mask(rows)}
    stored["column_mask"] = double_prune_bits(*stored.values())

    def slope(layout, backend):
        shapes = (128, 192), (192, 128)
        outs = [Packed24.empty(shape, dtype, DEVICE, layout) for shape in shapes]
        given = Compressed24(**stored, packed=outs[0], transposed=outs[1])
        prune_and_pack24_([given], backend=backend)
        return outs

    _, transposed = both(slope, backend, own)
    x = numbers(32, 128, dtype=dtype)
    got = twice_pruned_mm24(x, *stored.values(), layout=own, backend=backend)
    assert torch.equal(got, linear24(transposed, x))


@ways
@each("tokens", [64, 124])
def test_samples(tokens, backend, own):
    dy, key = numbers(tokens, 64, dtype=BF16), torch.tensor([9, 4], device=DEVICE)
    x = numbers(tokens, 128, seed=1, dtype=BF16)

    def sample(layout, backend):
        return [sample_pack24(dy, key, layout=layout, backend=backend)]

    def codes(layout, backend):
        return [quantize_and_sample(dy, key, 1, "e5m2", layout=layout, backend=backend)[1]]

    (packed,) = both(sample, backend, own)
    got = sample_mm24(dy, x, key, layout=own, backend=backend)
    assert torch.equal(got, mm24(packed, x))
    both(codes, backend, own)


@ways
def test_codes_of_a_weight(backend, own):
    w = numbers(128, 192)
    mask, rows = transposable_mask24(w), nm_mask(w)
    stored = [compress_nm(w, pack_mask(rows)), pack_mask(rows)]
    stored.append(double_prune_bits(*stored))

    def make(write, layout, backend):
        shapes, scales = ((128, 192), (192, 128)), torch.empty(2, device=DEVICE)
        outs = [
            Packed24.empty(s, t, DEVICE, layout) for s, t in zip(shapes, (E4M3, E5M2), strict=True)
        ]
        write(*outs, scales, b=backend)
        seen.append(scales)
        return outs

    for write in (
        lambda *o, b: quantize24_(*o, w, mask, backend=b),
        lambda *o, b: quantize_compressed24_(*o, *stored, backend=b),
    ):
        seen: list[torch.Tensor] = []
        both(lambda *how, write=write: make(write, *how), backend, own)
        assert torch.equal(*seen)

    def projected(layout, backend):
        packed = Packed24.empty((128, 192), E4M3, DEVICE, layout)
        turned, scales = w.t().contiguous().to(E5M2), torch.empty(2, device=DEVICE)
        beta = torch.tensor(1.1, device=DEVICE)
        quantize24_(packed, turned, scales, w, beta=beta, backend=backend)
        return [packed]

    both(projected, backend, own)


@ways
@each(("choose", "source"), [("exact", "mask"), ("rows", "mask"), (None, "soft")])
def test_the_fused_optimizer(choose, source, backend, own):
    """Weights of one shape, whose operands one kernel would pack, and one that packs one operand
    and keeps it dense, too. The dense ones come from the same kernel."""
    results: dict[str, list[torch.Tensor]] = {}

    def step(layout, backend):
        weights = []
        for seed in (0, 1):
            tensors = [numbers(64, 128, seed=10 * seed + i) for i in range(4)]
            names = ("weight", "grad", "exp_avg", "exp_avg_sq")
            fields = dict(zip(names, tensors, strict=True))
            fields["exp_avg_sq"] = fields["exp_avg_sq"].square()
            mask = transposable_mask24(tensors[3])
            ways = seed == 0 and choose == "exact"
            given = Weight24(
                **fields, step=torch.tensor(3.0, device=DEVICE), mask=mask,
                scale=torch.tensor(1.25, device=DEVICE),
                packed=Packed24.empty((64, 128), BF16, DEVICE, layout),
                transposed=Packed24.empty((128, 64), BF16, DEVICE, layout) if ways else None,
            )  # fmt: skip
            if seed:
                given = replace(given, dense=torch.empty(64, 128, dtype=BF16, device=DEVICE))
            weights.append(given)
        versions = [w.packed.buffer._version for w in weights]
        adamw24_(weights, Rates(lr=0.01), Rule(alpha=0.1, choose=choose, source=source),
                 backend=backend)  # fmt: skip
        assert all(w.packed.buffer._version > v for w, v in zip(weights, versions, strict=True))
        results[layout] = [w.weight for w in weights] + [w.mask for w in weights]
        results[layout] += [weights[1].dense, weights[0].step]
        return [p for w in weights for p in (w.packed, w.transposed) if p is not None]

    both(step, backend, own, backend)
    assert all(map(torch.equal, *results.values()))


@pytest.mark.skipif(CUDA, reason="a GPU has the real library")
def test_a_library_that_cannot_pack_or_plan_leaves_products_dense(monkeypatch):
    class Plan:
        algorithms = 3

        def __init__(self, *_):
            if not plans:
                raise cusparselt.CuSparseLtError("cusparseLtMatmulPlanInit: not supported")

    def no(*_):
        raise cusparselt.CuSparseLtError("cusparseLtSpMMACompress2: not supported")

    monkeypatch.setattr(table, "plan_of", Plan)
    monkeypatch.setattr(table, "device_of", lambda index: DEVICE)
    monkeypatch.setattr(Trial, "dense_ms", lambda self: 3.5)
    monkeypatch.setattr(cpu, "by_library", no)
    problem = Problem(64, 128, 32, BF16, BF16, True, True, layout=VENDOR)
    for plans in ([], [1]):  # noqa: B007
        found = table.measure(problem, 0)
        assert (found.algorithm, found.dense_ms) == (table.NONE, 3.5) and found.ms > 3.5


def test_wgrad_is_timed_with_the_packing_of_its_sample(monkeypatch):
    """Each micro-batch samples anew; our packers sample and pack in one."""
    packed, run = [], []
    monkeypatch.setattr(table, "replay_ms", lambda call: call(0))
    monkeypatch.setattr(table, "device_of", lambda index: DEVICE)
    monkeypatch.setattr(
        table, "plan_of", lambda *_: type("", (), {"run": lambda *o: run.append(o)})()
    )
    of, real = Problem(64, 128, 32, BF16, BF16, False, False), cpu.by_library
    monkeypatch.setattr(cpu, "by_library", lambda x: packed.append(x.shape) or real(x))
    for problem, times in (
        (replace(of, layout=VENDOR), 2), (of, 0),
        (replace(of, dense_transposed=True, result_transposed=True, layout=VENDOR), 1),
    ):  # fmt: skip
        packed.clear()
        Trial(problem, 0).sparse_ms(0)
        assert packed == [(64, 128)] * times


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_too_little_room_is_an_error():
    x = torch.zeros(64, 64, dtype=BF16, device=DEVICE)
    with pytest.raises(cusparselt.CuSparseLtError, match=r"needs \d+ bytes for torch.bfloat16"):
        loader.compress(x, torch.empty(64 * 64, dtype=torch.uint8, device=DEVICE))
