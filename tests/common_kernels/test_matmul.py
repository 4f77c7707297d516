"""Products of packed matrices: every backend is the product of the matrix that was packed."""

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from common_kernels import compress_nm, double_prune_bits, nm_mask, pack_mask
from common_kernels.matmul import (
    Problem,
    choice,
    chosen,
    cuda,
    cuda_build,
    emulate,
    fastest,
    is_faster,
    linear24,
    matmul24,
    measured,
    mm24,
    own_layout,
    reference,
    sample_mm24,
    table,
    unavailable,
)
from common_kernels.matmul.pruned import compressed_mm24
from common_kernels.matmul.table import Entry
from common_kernels.pack import BUFFERED, VENDOR, Packed24, cpu, pack24, unpack24
from common_kernels.pack import cusparselt as loader
from common_kernels.pack.compressed import Compressed24, prune_and_pack24_
from common_kernels.pack.cusparselt import CuSparseLtError
from common_kernels.pack.operands import sample_pack24
from tests.common_kernels.conftest import LEARNT
from tests.each import each

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
HOPPER = CUDA and torch.cuda.get_device_capability() == (9, 0)
BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2


def matrix(rows, columns, dtype=BF16, seed=0):
    a = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    mask = nm_mask(a)
    return torch.where(mask, a, 0.0).to(dtype), mask


def dense(rows, columns, dtype=BF16):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(rows, columns, generator=generator).to(DEVICE, dtype)


CUTLASS = "cutlass_sm90"


def packed(a, mask, layout=BUFFERED):
    """In one buffer."""
    return Packed24(cpu.pack(a, mask, layout), tuple(a.shape), a.dtype, layout)


def close(got, want, dtype):
    """One rounding to `dtype`; FP8 units keep some 14 bits of each partial sum."""
    unit = max(torch.finfo(dtype).eps, 2**-10 if got.is_cuda else 0)
    assert got.dtype == dtype and got.shape == want.shape
    assert (got.double() - want.double()).abs().max() <= unit * want.abs().max()


@each(
    ("layout", "dtype"),
    [("neutral", torch.float32), ("neutral", E4M3), *product(
        ("neutral", "cutlass_sm80", "cusparselt_sm90"), (BF16, torch.float16))],
)  # fmt: skip
@each("tokens", [(24,), (3, 5), (0,)])
def test_matmul24(layout, dtype, tokens):
    a, mask = matrix(64, 128, dtype)
    x = dense(torch.Size(tokens).numel(), 128, dtype).view(*tokens, 128)
    out = BF16 if dtype == E4M3 else dtype
    for bias in (None, torch.linspace(-1, 1, 64, device=DEVICE).to(out)):
        want = reference.matmul24(a, x, bias)
        for backend in ("dense", None):
            got = matmul24(pack24(a, mask, layout), x, bias, backend=backend)
            assert got.shape == (*tokens, 64)
            if dtype == torch.float32:  # 129 terms, each rounded to fp32 and added to the others
                terms = reference.matmul24(a.abs(), x.abs(), bias if bias is None else bias.abs())
                assert ((got - want).abs() <= 129 * 2**-24 * terms).all()
            elif got.numel():
                close(got, want, out)


def test_the_choice_of_a_backend_is_told():
    a, mask = matrix(64, 128)
    native = "cusparselt" if HOPPER or not CUDA else "dense"
    with pytest.raises(RuntimeError, match=r"'cusparselt' cannot serve .*not torch.float32"):
        matmul24(pack24(a.float(), mask), dense(8, 128, torch.float32), backend="cusparselt")
    for layout, asked, found in (
        ("neutral", None, "dense"), (BUFFERED, None, native), (BUFFERED, "dense", "dense"),
    ):  # fmt: skip
        assert chosen(pack24(a, mask, layout), asked) == found
    own, x = pack24(a, mask, VENDOR), dense(24, 128)
    want = matmul24(pack24(a, mask), x, backend="dense")
    if HOPPER or not CUDA:
        close(matmul24(own, x), want, BF16)
        compiled = torch.compile(lambda x: linear24(own, x), backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), linear24(own, x))
    with pytest.raises(ValueError, match="read by cuSPARSELt's products alone"):
        unpack24(own)


def test_cusparselt_serves_every_gpu_that_the_library_knows(monkeypatch):
    def knows(index):
        if capability == (11, 0):
            raise CuSparseLtError("cusparseLtInit: architecture mismatch")

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("common_kernels.backend.capability", lambda device: capability)
    monkeypatch.setattr(loader, "library", lambda: None)
    monkeypatch.setattr(loader, "handle", knows)
    monkeypatch.setattr(choice.learn, "layout_on", lambda device: None)  # no order is learnt
    for capability, bf16, fp8 in (
        ((7, 5), "8.0 or later", "8.9 or later"), ((8, 0), "", "8.9 or later, this GPU has (8, 0)"),
        ((8, 9), "", ""), ((9, 0), "", ""), ((12, 0), "", ""), ((11, 0), "mismatch", "mismatch"),
    ):  # fmt: skip
        for dtype, reason in ((BF16, bf16), (E5M2, fp8)):
            found = unavailable("cusparselt", "cuda", dtype)
            assert found is None if not reason else reason in found
        assert "9.x" in str(unavailable("cuda", "cuda", BF16)) or capability == (9, 0)
        choice._library_layout.cache_clear()
        known = capability == (9, 0)
        assert choice.library_layout(torch.device("cuda")) == (BUFFERED if known else VENDOR)
        if not bf16:
            assert choice.layouts_on(torch.device("cuda"))[1:] == (cuda.LAYOUTS if known else ())
    choice._library_layout.cache_clear()


sparse_gpu = pytest.mark.skipif(CUDA and not HOPPER, reason="the layout is for 9.0")


def unserved(layout):
    """True where no kernel takes the layout: that which was learnt is invented."""
    return CUDA if layout == LEARNT else "cutlass" in layout and unavailable("cuda", DEVICE, BF16)


SCALES = torch.tensor(3.0, device=DEVICE), torch.tensor(1e-3, device=DEVICE)


@sparse_gpu
@each(
    ("layout", "dtype"),
    [
        *((BUFFERED, dtype) for dtype in (BF16, torch.float16, E4M3, E5M2)),
        (CUTLASS, BF16), (CUTLASS, E4M3), (CUTLASS, E5M2), (cuda.LAYOUTS[1], BF16),
    ],
)  # fmt: skip
@each(
    ("rows", "columns", "tokens"),
    [
        *((64, 128, tokens) for tokens in (1, 30, 64)),
        *[(320, 384, 200), (1024, 4096, 4096)] * HOPPER,
    ],
)
def test_x_times_a_transposed(layout, dtype, rows, columns, tokens):
    """In each layout, with a bias, of an operand that begins anywhere; products of codes are
    divided by both scales."""
    if unserved(layout):
        return
    a, mask = matrix(rows, columns, dtype)
    x, bias = dense(tokens + 1, columns, dtype)[1:], torch.linspace(-1, 1, rows, device=DEVICE)
    codes = dtype.itemsize == 1
    for scales in (None, SCALES) if codes else (None,):
        product = x.float() @ a.float().t() / (3e-3 if scales else 1.0)
        # Our own kernels write products of codes in bf16 only.
        outs = (dtype,) if not codes else (BF16,) if layout == CUTLASS else (BF16, torch.float32)
        for out in outs:
            for b in (None, bias.to(out)):
                got = linear24(packed(a, mask, layout), x, b, out, scales=scales)
                assert got.dtype == out
                want = product if b is None else product + b.float()
                rounded = BF16 if codes else out
                close(got.to(rounded), want, rounded)


@sparse_gpu
@each("layout", [BUFFERED, CUTLASS])
@each("columns", [48, 64, 100, 128])
def test_a_times_x_summed_over_any_tokens(layout, columns):
    """The rows of x that A has beyond those given count as zeros; so do codes that end within a
    block of the layout, whose products are divided by both scales."""
    if unserved(layout):
        return
    block = 16 if layout == BUFFERED else 64
    filled = -(-columns // block) * block
    a, mask = matrix(64, filled)
    x = dense(columns, 96)
    close(mm24(packed(a, mask, layout), x), a.float()[:, :columns] @ x.float(), BF16)
    a, mask = matrix(64, 128, E5M2)
    x = dense(96, columns, E5M2)
    for scales, out in ((SCALES, torch.float32), (SCALES, BF16), (None, torch.float32)):
        got = mm24(packed(a, mask, layout), x, out, transposed=True, scales=scales)
        want = a.float()[:, :columns] @ x.float().t() / (3e-3 if scales else 1.0)
        close(got, want, out)


@each("layout", [BUFFERED, CUTLASS, VENDOR, LEARNT])
@each("tokens", [64, 100, 30])
def test_one_operator_does_what_two_do(layout, tokens):
    """To the bit: a sample, and a compressed weight, that are packed for the product."""
    if unserved(layout):
        return
    dy, x, key = dense(tokens, 128), dense(tokens, 64), torch.tensor([5, 3], device=DEVICE)
    sample = sample_pack24(dy, key, 25 * 128, layout=layout)
    assert torch.equal(sample_mm24(dy, x, key, 25 * 128, layout=layout), mm24(sample, x))
    a, mask = matrix(64, 128, torch.float32)
    row_mask = pack_mask(mask)
    values = compress_nm(a, row_mask)
    weight = values, row_mask, double_prune_bits(values, row_mask)
    stored = dict(zip(("values", "row_mask", "column_mask"), weight, strict=True))
    out = Packed24.empty((128, 64), BF16, DEVICE, layout)
    prune_and_pack24_([Compressed24(**stored, transposed=out)], choose=False)
    assert torch.equal(compressed_mm24(x, *weight, layout=layout), linear24(out, x))


PROBLEM = Problem(64, 128, 96, BF16, BF16, True, True)
WGRAD = Problem(64, 112, 64, BF16, BF16, False, False)


class FakePlan:
    """A library of four algorithms: 0 is wrong, 1 is wrong now and then, 3 is refused."""

    runs = 0

    def __init__(self, problem, algorithm, device):
        if algorithm == 3:
            raise CuSparseLtError("no")
        self.problem, self.algorithm, self.algorithms = problem, algorithm, 4

    def run(self, buffer, dense, out, bias=None):
        out.copy_(emulate(buffer, dense, bias, None, self.problem))
        FakePlan.runs += 1
        if self.algorithm == 0 or (self.algorithm == 1 and FakePlan.runs % 3 == 0):
            out[5, 7] += 40


no_library = pytest.mark.skipif(CUDA, reason="a GPU has the real library")


@pytest.fixture
def fake_library(monkeypatch, tmp_path):
    """The table of a GPU that is not there: its kernels are emulated, their times made up."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(table, "plan_of", FakePlan)
    monkeypatch.setattr(table, "_key", lambda device, layout: f"a GPU, {layout}")
    monkeypatch.setattr(table, "device_of", lambda index: torch.device("cpu"))
    monkeypatch.setattr(table.Trial, "sparse_ms", lambda self, algorithm: 1.0 + algorithm)
    monkeypatch.setattr(table.Trial, "once_ms", lambda self, algorithm: 0.1)
    monkeypatch.setattr(table.Trial, "dense_ms", lambda self: 3.5)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    table._table.cache_clear()
    yield
    table._table.cache_clear()


@no_library
def test_a_wrong_algorithm_is_never_chosen(fake_library):
    """Fast as it may be; nor one that is wrong only now and then."""
    found = table.entry(PROBLEM, 0)
    assert found.algorithm == 2 and found.wrong == (0, 1, 3)
    assert (found.ms, found.dense_ms) == (3.0, 3.5)


@no_library
def test_one_measurement_is_kept_and_serves_all_numbers_of_tokens(fake_library, monkeypatch):
    """The times are those of as many more tokens."""
    for of, tokens_are in ((PROBLEM, "tokens"), (replace(WGRAD, columns=96), "columns")):
        first = table.entry(of, 0)
        table._table.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(table, "measure", lambda *args: pytest.fail("measured again"))
            assert table.entry(of, 0) == first  # from the file
            for tokens in (64, 512, 16):
                found = table.entry(replace(of, **{tokens_are: tokens}), 0)
                times = 3.0 * tokens / 96, 3.5 * tokens / 96
                assert found.algorithm == first.algorithm
                assert (found.ms, found.dense_ms) == pytest.approx(times)
            with pytest.raises(pytest.fail.Exception):
                table.entry(replace(of, **{tokens_are: 1024}), 0, within=1.5)


@no_library
def test_where_nothing_is_right_can_be_written_or_may_be_measured(
    fake_library, monkeypatch, tmp_path
):
    monkeypatch.setattr(table.Trial, "is_right", lambda self, algorithm: False)
    found = table.entry(PROBLEM, 0)
    assert found.algorithm == table.NONE and found.ms > found.dense_ms  # it stays dense
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    table._table.cache_clear()
    with pytest.warns(UserWarning, match="set XDG_CACHE_HOME"):
        table.entry(PROBLEM, 0)
    table._table.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="run it once before it is captured"):
        table.entry(PROBLEM, 0)


def test_wgrad_is_timed_with_the_packing_of_its_sample(monkeypatch):
    """Each micro-batch samples anew; our packers sample and pack in one."""
    packed, real = [], cpu.by_library
    plan = SimpleNamespace(run=lambda *_: None)
    monkeypatch.setattr(table, "replay_ms", lambda call: call(0))
    monkeypatch.setattr(table, "device_of", lambda index: DEVICE)
    monkeypatch.setattr(table, "plan_of", lambda *_: plan)
    monkeypatch.setattr(cpu, "by_library", lambda x: packed.append(x.shape) or real(x))
    of = Problem(64, 128, 32, BF16, BF16, False, False)
    forward = {"dense_transposed": True, "result_transposed": True}
    for problem, times in ((replace(of, layout=VENDOR), 2), (of, 0),
                           (replace(of, **forward, layout=VENDOR), 1)):  # fmt: skip
        packed.clear()
        table.Trial(problem, 0).sparse_ms(0)
        assert packed == [(64, 128)] * times


@pytest.fixture
def gpu_of_tables(monkeypatch):
    """A GPU whose products are measured in times that are given: {layout: (sparse, dense)}."""
    times = {}

    def entry(problem, index, within=0.0):
        if problem.layout not in times:
            raise cuda_build.BuildError("nvcc cannot compile a: a.cu(3): error: no such luck")
        return Entry(0, *times[problem.layout])

    monkeypatch.setattr(table, "entry", entry)
    monkeypatch.setattr(table, "known", lambda problem, index: entry(problem, index))
    monkeypatch.setattr(choice, "unavailable", lambda *_: None)
    monkeypatch.setattr(choice, "library_layout", lambda device: BUFFERED)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    choice._do_without.cache_clear()
    yield times
    choice._do_without.cache_clear()


def test_the_layout_that_is_fastest_beside_the_dense_product_is_taken(gpu_of_tables):
    """The GPU may have run at another clock for each; tokens are filled up only where every kernel
    needs more."""
    device, (narrow, wide) = torch.device("cuda", 0), cuda.LAYOUTS
    gpu_of_tables |= {BUFFERED: (2.0, 3.0), narrow: (1.5, 2.0), wide: (1.1, 2.0)}
    assert fastest(PROBLEM, device) == measured(PROBLEM, device) == (wide, 1.1, 2.0)
    assert fastest(PROBLEM, device, cuda.LAYOUTS[:1]) == (narrow, 1.5, 2.0)
    half = replace(PROBLEM, dtype=torch.float16, out_dtype=torch.float16)  # no kernel of ours
    assert own_layout(PROBLEM, device) == wide and own_layout(half, device) == BUFFERED
    assert fastest(WGRAD, device).layout == BUFFERED
    assert is_faster(PROBLEM, device)
    gpu_of_tables[narrow] = (1.0, 3.0)
    for tokens, layout in ((112, BUFFERED), (128, narrow), (104, narrow)):  # 104: no multiple of 16
        problem = replace(WGRAD, columns=tokens)
        assert fastest(problem, device).layout == measured(problem, device).layout == layout
    assert fastest(WGRAD, device, cuda.LAYOUTS).layout == narrow  # by name


def test_without_a_compiler_products_are_cusparselt_s_and_that_is_said_once(
    gpu_of_tables, monkeypatch
):
    """There is none, or the one that there is cannot compile."""
    device, said = torch.device("cuda", 0), []
    monkeypatch.setattr(choice.warnings, "warn", lambda text, **_: said.append(text))
    gpu_of_tables[BUFFERED] = (2.0, 3.0)
    missing = "nvcc cannot be found"
    for why in ("no such luck", missing):
        if why == missing:
            monkeypatch.setattr(choice, "unavailable", lambda name, *_: missing * (name == "cuda"))
        for problem in (PROBLEM, WGRAD):
            assert fastest(problem, device) == (BUFFERED, 2.0, 3.0)
        assert said.pop().endswith(f"{why}: sparse products use cuSPARSELt only") and not said


def test_the_table_survives_a_file(tmp_path):
    path = tmp_path / "deep" / "matmul.json"
    fp8 = Problem(64, 128, 96, E5M2, torch.float32, True, False, layout="cutlass_sm90")
    first = {PROBLEM: Entry(3, 0.5, 0.75, (1, 2)), fp8: Entry(0, 1.0, 2.0)}
    table.save(path, "a GPU", first)
    table.save(path, "a GPU", {PROBLEM: Entry(4, 0.25, 0.75)})
    assert table.load(path, "a GPU") == first | {PROBLEM: Entry(4, 0.25, 0.75)}
    assert table.load(path, "another GPU") == table.load(tmp_path / "none.json", "a GPU") == {}
    # What several save at once is all kept: a lock holds between threads as between processes.
    path, problems = tmp_path / "matmul.json", [replace(PROBLEM, tokens=8 * n) for n in range(1, 9)]
    with ThreadPoolExecutor(len(problems)) as pool:
        list(pool.map(lambda p: table.save(path, "a GPU", {p: Entry(3, 0.5, 0.75)}), problems))
    assert table.load(path, "a GPU").keys() == set(problems)
    for text in ("{", "[]", '{"a GPU": [{"rows": 1}]}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"matmul.json is damaged .* delete it"):
            table.load(path, "a GPU")


def test_the_shipped_table_can_be_read():
    for key in json.loads(table.SHIPPED.read_text()):
        entries = table.load(table.SHIPPED, key)
        assert entries
        for problem, found in entries.items():
            assert found.algorithm not in found.wrong, problem
            assert found.ms > 0 and found.dense_ms > 0


def test_the_margin_of_a_right_product_holds_for_sums_cut_to_14_bits():
    """Sums as FP8 units make them: 64 columns at a time, each sum cut to 14 bits."""
    terms = torch.rand(1000, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    total = torch.zeros(1000, dtype=torch.float64)
    for step in range(256):
        total += terms[:, step]
        fraction, exponent = torch.frexp(total)
        total = torch.ldexp(torch.floor(fraction * 2**14) / 2**14, exponent)
    truth = terms.sum(1)
    error = ((total - truth).abs().max() / truth.max()).item()
    fp8 = Problem(512, 256 * 64, 640, E4M3, BF16, True, True, False)
    assert 2.0**-8 < error < table.margin(fp8) == 2.0**-7 + 2.0**-6
    assert table.margin(replace(fp8, dtype=BF16)) == 2.0**-7


on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")
PROBLEMS = {  # dtypes, whether the dense operand and the result are transposed, and a bias
    "bf16 Y with bias": (640, BF16, BF16, True, True, True),
    "bf16 dX": (640, BF16, BF16, True, True, False),
    "fp16 Y": (640, torch.float16, torch.float16, True, True, True),
    "bf16 dW": (640, BF16, BF16, False, False, False),
    "fp8 Y": (640, E4M3, BF16, True, True, False),
    "fp8 dW": (640, E5M2, torch.float32, True, False, False),
    **{
        f"bf16 Y of {n} tokens, our own": (n, BF16, BF16, True, True, True, "cutlass_sm90_k128")
        for n in (8, 24, 128)
    },
}


@on_hopper
@pytest.mark.parametrize("name", PROBLEMS)
def test_every_algorithm_that_may_be_chosen(name):
    """Twenty times each, against fp64, with the same bits."""
    p = Problem(512, 768, *PROBLEMS[name])
    trial = table.Trial(p, 0)
    b = trial.dense[0].double()
    want = trial.a.double() @ (b.t() if p.dense_transposed else b)
    if p.biased:
        want += trial.bias.double()[:, None]
    number = table.plan_of(p, 0, 0).algorithms
    for algorithm in range(min(number, table.USABLE.get(p.dtype, number))):
        try:
            plan = table.plan_of(p, algorithm, 0)
        except CuSparseLtError:
            continue
        first = None
        for _ in range(20):
            out = torch.full(p.result_shape, float("nan"), dtype=p.out_dtype, device="cuda")
            plan.run(trial.buffer, trial.dense[0], out, trial.bias)
            close(out.t() if p.result_transposed else out, want, p.out_dtype)
            assert first is None or torch.equal(first, out), algorithm
            first = out


@on_hopper
def test_products_in_a_cuda_graph():
    a, mask = matrix(256, 512)
    sparse, x = packed(a, mask), dense(128, 512)
    bias = torch.linspace(-1, 1, 256, device=DEVICE).to(BF16)
    want = linear24(sparse, x, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear24(sparse, x, bias)
    y.fill_(float("nan"))
    graph.replay()
    assert torch.equal(y, want)
    x.mul_(2)
    bias.zero_()
    graph.replay()
    close(y, x.float() @ a.float().t(), BF16)
