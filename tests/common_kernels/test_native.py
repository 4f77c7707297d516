"""The launch in C++ against that in Python. The library that both call notes its arguments."""

import contextlib
import ctypes
import functools
import inspect
import itertools
import shutil
import subprocess
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from common_kernels import compress_nm, matmul, nm_mask, pack_mask, transposable_mask24
from common_kernels.fp8.cpu import FORMATS
from common_kernels.fp8.operands import (
    quantize_and_sample,
    quantize_both,
    rescale,
    scaled_linear,
)
from common_kernels.fp8.weights import quantize24_
from common_kernels.matmul import Problem, cuda, cusparselt, linear24, mm24, native, table
from common_kernels.pack import BUFFERED, Packed24
from common_kernels.pack import cusparselt as loader
from tests.each import each

BF16, STREAMS = torch.bfloat16, itertools.count(4711)
NAMES = ("handle", "plan", "a", "b", "c", "d", "workspace", "stream", "streams", "alpha", "beta")

# The product begins with the bytes of the dense operand, or of the bias.
FAKE = r"""
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#define OK(name) int cusparseLt##name(void) { return 0; }
OK(StructuredDescriptorInit) OK(DenseDescriptorInit) OK(MatmulDescriptorInit)
OK(MatmulAlgSelectionInit) OK(MatmulAlgGetAttribute) OK(MatmulAlgSetAttribute) OK(MatmulPlanInit)
void *bias, *stream;
size_t seen[11];
int status, slow;
int cusparseLtMatmulDescSetAttribute(void *h, void *d, int what, void **value, size_t size) {
  bias = *value; return 0; }
int cusparseLtMatmulGetWorkspace(void *h, void *plan, size_t *size) { *size = 96; return 0; }
const char *cusparseLtGetErrorString(int status) { return "no such luck"; }
int cusparseLtMatmul(void *handle, void *plan, float *alpha, void *a, void *b, float *beta, void *c,
                     void *d, void *space, void **streams, int n) {
  size_t all[] = {(size_t)handle, (size_t)plan, (size_t)a, (size_t)b, (size_t)c, (size_t)d,
                  (size_t)space, (size_t)*streams, n, *alpha, *beta};
  memcpy(seen, all, sizeof all);
  usleep(slow);
  memcpy(d, b, 1024);
  if (bias) memcpy(d, bias, 128);
  return status; }
size_t given[12];  // to our own kernel: its sizes, its addresses, and the stream
int prepare(size_t *sizes, void **plan, long *workspace) {
  if (status == 101) return status;
  *plan = memcpy(malloc(24), sizes, 24);
  *workspace = 128;
  return 0; }
int launch(size_t *plan, size_t *addresses, void *on) {
  memcpy(given, plan, 24);
  memcpy(given + 3, addresses, 64);
  given[11] = (size_t)on;
  memcpy((void *)given[9], (void *)given[5], 1024);
  for (int i = 0; i < 3; ++i)
    if (given[6 + i]) memcpy((char *)given[9] + 256 * i, (void *)given[6 + i], i ? 4 : 128);
  return status; }
long metadata_place(int a, int b, int c, int d) { return 0; }
size_t taken[12];
int cuLaunchKernel(void *function, unsigned blocks, unsigned y, unsigned z, unsigned threads,
                   unsigned ty, unsigned tz, unsigned shared, void *on, void **given, void **more) {
  size_t all[] = {(size_t)function, blocks, threads, shared, (size_t)on, *(size_t *)given[0],
                  *(size_t *)given[1], *(size_t *)given[2], *(size_t *)given[3],
                  *(size_t *)given[4], shared == 99 ? *(size_t *)given[5] : 0,
                  shared == 99 ? *(size_t *)given[7] : 0};
  memcpy(taken, all, sizeof all);
  return y * z * ty * tz == 1 ? status : 7; }
int cuMemsetD32Async(int *where, unsigned value, size_t count, void *on) {
  while (count--) *where++ = value;
  return 0; }
int current_stream(int device, void **out) { *out = stream; return 0; }
"""


def seen(fake):
    """The arguments of the last product."""
    return dict(zip(NAMES, (ctypes.c_size_t * len(NAMES)).in_dll(fake, "seen"), strict=True))


@pytest.fixture
def fake(monkeypatch, tmp_path, tmp_path_factory):
    """C++ serves the operator on CPUs, with plans of a fake library, which is returned."""
    if not shutil.which("c++"):
        pytest.skip("there is no C++ compiler")
    command = ["c++", "-x", "c", "-w", "-shared", "-fPIC", "-o", tmp_path / "fake.so", "-"]
    subprocess.run(command, input=FAKE, text=True, check=True)
    fake, plans = ctypes.CDLL(str(tmp_path / "fake.so")), {}
    fake.cusparseLtGetErrorString.restype, fake.plans = ctypes.c_char_p, plans
    fake.cusparseLtMatmul.argtypes = (*(ctypes.c_void_p,) * 10, ctypes.c_int32)

    def plan(fields, device, stream):
        if (fields, stream) not in plans:
            plans[fields, stream] = table.plan_of(Problem(*fields), 0, "cpu")
        return plans[fields, stream]

    stream, current = ctypes.c_void_p.in_dll(fake, "stream"), "_cuda_getCurrentRawStream"
    monkeypatch.setattr(torch._C, current, lambda _: stream.value, raising=False)
    for module in (native, loader):
        monkeypatch.setattr(module, "library", lambda: fake)
    for module in (cusparselt, loader):
        monkeypatch.setattr(module, "handle", lambda device: ctypes.create_string_buffer(16))
    monkeypatch.setattr(cuda, "_library", lambda config: cuda._load(tmp_path / "fake.so"))
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    multiprocessors = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: multiprocessors)
    monkeypatch.setattr(matmul, "_plan", plan)
    monkeypatch.setattr(table, "device_of", lambda index: torch.device("cpu"))
    # One build serves all tests.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp()))
    own = fake.current_stream, fake.cuMemsetD32Async
    registration = ctypes.c_void_p(native.load()(b"CPU", *own))
    now(fake)
    yield fake
    shim = ctypes.CDLL(str(native.TORCH / "lib/libtorch_cpu.so"))
    shim.aoti_torch_delete_library_object(registration)


def now(fake, stream=None, status=0):
    """Set the current stream (a new one has no plans) and the status of the next products."""
    ctypes.c_void_p.in_dll(fake, "stream").value = stream or next(STREAMS)
    ctypes.c_void_p.in_dll(fake, "bias").value = None
    ctypes.c_int.in_dll(fake, "status").value = status


CODES = dict.fromkeys(("codes", "values", "own"), "FMT") | dict.fromkeys(
    ("transposed", "other"), "FMT_T"
)
NOTED, RAN, KEPT = [], [], []  # C++ keeps kernels as long as the process


def interpret(monkeypatch):
    """Let Triton's interpreter run what C++ launches; return the names of the kernels that ran.

    Kernels have no compiled form here: one is known by its place among those that were asked for.
    """
    launch = pytest.importorskip("common_kernels.launch", reason="no Triton for this platform")
    constant = launch.tl.constexpr, "tl.constexpr"
    kind = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_size_t, *(ctypes.c_uint,) * 7, ctypes.c_void_p,
        ctypes.POINTER(ctypes.POINTER(ctypes.c_int64)), ctypes.c_void_p,
    )  # fmt: skip

    by_triton = getattr(launch.by_triton, "__wrapped__", launch.by_triton)  # once for all cases

    @functools.wraps(by_triton)
    def note(kernel, blocks, device, *args, num_warps=4, maxnreg=None, **options):
        by_triton(kernel, blocks, device, *args, **options)  # as a GPU does
        launch._notes.launched.pop()
        names = inspect.signature(kernel.fn).parameters
        given = dict(zip(names, args, strict=False)) | options
        left_out = {
            name for name, value in given.items()
            if names[name].annotation in constant or (type(value) is int and value == 1)
        }  # fmt: skip
        NOTED.append((kernel, given, left_out))
        parts = [
            types.SimpleNamespace(name=n, is_constexpr=p.annotation in constant)
            for n, p in names.items()
        ]
        source = types.SimpleNamespace(
            signature={n: "constexpr" if n in left_out else "i32" for n in names},
            fn=types.SimpleNamespace(params=parts),
        )
        metadata = types.SimpleNamespace(num_warps=num_warps, shared=0)
        compiled = types.SimpleNamespace(function=len(NOTED), metadata=metadata, src=source)
        kernel[(blocks,)](*args, **options)  # as Triton does, before C++ runs it
        launch._notes.launched.append(launch.Launched(compiled, blocks))

    @kind
    def start(function, blocks, y, z, threads, ty, tz, shared, stream, arguments, extra):
        kernel, given, left_out = NOTED[function - 1]
        numbers, written, values = iter(arguments), [], dict(given)
        for name in (n for n in given if n not in left_out):
            number = next(numbers)[0]
            values[name] = number
            if not isinstance(given[name], torch.Tensor):
                assert number == given[name]
                continue
            shape, dtype = given[name].shape, given[name].dtype
            if name.startswith("meta") and dtype == torch.float32:  # not written to
                values[name] = torch.zeros(1)
                continue
            code = "FMT" in given and name in CODES
            if code:  # the interpreter writes codes in fp32
                dtype = FORMATS[given[CODES[name]]]
            size = max(1, shape.numel()) * dtype.itemsize
            memory = torch.frombuffer(
                (ctypes.c_char * size).from_address(number), dtype=torch.uint8
            )
            values[name] = memory.view(dtype).view(shape)
            if code:
                written.append((values[name], values[name].float()))
                values[name] = written[-1][1]
        kernel[(blocks,)](**values)
        for to, codes in written:
            to.copy_(codes)
        RAN.append(kernel.fn.__name__)
        return 0

    KEPT.append(start)
    RAN.clear()
    monkeypatch.setattr(launch, "by_triton", note)
    monkeypatch.setattr(native, "driver", lambda: types.SimpleNamespace(cuLaunchKernel=start))
    return RAN


def operands(dtype=BF16):
    return Packed24.empty((64, 128), dtype), torch.randn(32, 128).to(dtype), torch.randn(64)


@each("dtype", [BF16, torch.float16, torch.float8_e4m3fn])
@each("form", ["plain", "fp32 bias", "bias", "unaligned", "sum", "transposed sum"])
def test_the_library_is_called_as_from_python(dtype, form, fake):
    (packed, x, bias), out = operands(dtype), BF16 if dtype.itemsize == 1 else dtype
    bias = {"fp32 bias": bias, "bias": bias.to(out)}.get(form)
    if form == "unaligned":
        x = torch.cat([x.view(torch.uint8)] * 2).view(dtype).flatten()[1:4097].view(32, 128)
    now(fake)
    with torch.inference_mode():  # a plan that is made there serves outside, too
        if "sum" in form:
            x = x if form == "transposed sum" else x.view(128, 32)
            y = mm24(packed, x, out, transposed=form == "transposed sum")
        else:
            y = linear24(packed, x, bias, out)
    got, own = seen(fake), {"a": packed.buffer.data_ptr(), "c": y.data_ptr(), "d": y.data_ptr()}
    assert got == {**got, **own, "streams": 1, "alpha": 1, "beta": 0} and got["workspace"]
    assert (got["b"] == x.data_ptr()) == (form != "unaligned") and got["b"] % 16 == 0
    *_, plan = fake.plans.values()
    want = torch.zeros(plan.problem.result_shape, dtype=out)
    plan.run(packed.buffer, x, want, bias)
    assert torch.equal(*(t.view(torch.uint8).flatten()[:1024] for t in (y, want)))
    assert (y.shape, y.dtype) == (want.shape, out)
    other = ("b", "c", "d", "workspace")
    assert {**seen(fake), **{name: got[name] for name in other}} == got


OWN = cuda.LAYOUTS[0]
FORMS = (
    *((BF16, OWN, form) for form in ("plain", "fp32 bias", "bias", "unaligned", "sum")),
    (BF16, cuda.LAYOUTS[1], "bias"),
    *((torch.float8_e4m3fn, OWN, form) for form in ("plain", "fp32 bias", "unaligned")),
    (torch.float8_e5m2, OWN, "transposed sum"),
)


@each(("dtype", "layout", "form"), FORMS)
def test_our_own_kernels_are_called_as_from_python(dtype, layout, form, fake):
    packed, x = Packed24.empty((64, 128), dtype, layout=layout), torch.randn(32, 128).to(dtype)
    bias = {"fp32 bias": torch.randn(64), "bias": torch.randn(64).to(BF16)}.get(form)
    if form == "unaligned":
        x = torch.cat([x.view(torch.uint8)] * 2).view(dtype).flatten()[1:4097].view(32, 128)
    scales = torch.tensor([3.0, 0.7]).unbind() if dtype.itemsize == 1 else None

    def seen():
        return [*(ctypes.c_size_t * 12).in_dll(fake, "given")]

    now(fake)
    if "sum" in form:
        x = x if scales else x.view(128, 32)
        y = mm24(packed, x, transposed=bool(scales), scales=scales, factor=2)
        scales = scales and (scales[0] / 2, scales[1])
    else:
        y = linear24(packed, x, bias, scales=scales)
    got = seen()
    (problem, stream), plan = [*fake.plans.items()][-1]
    assert problem[-2:] == (bias is not None and not scales, layout) and got[11] == stream
    assert got[3:5] == [packed.buffer.data_ptr(), packed.buffer.data_ptr() + plan.values]
    assert got[9] == y.data_ptr() and got[5] % 16 == 0 and got[10]
    assert (got[5] == x.data_ptr()) == (form != "unaligned")
    want = torch.zeros(y.shape, dtype=y.dtype)
    plan.run(packed.buffer, x, want, None if bias is None else bias.to(BF16), scales)
    sizes = [64 | 32 << 32, 128 | 1 << 32, 1 | 132 << 32]  # raster and swizzle are 1
    assert got[:3] == seen()[:3] == sizes and [*map(bool, got)] == [*map(bool, seen())]
    assert torch.equal(*(t.view(torch.uint8).flatten()[:1024] for t in (y, want)))
    for status in (101, 203):  # of the plan, of the launch
        now(fake, status=status)
        refused = rf"^kernel \w+ refused Problem\(.*{layout}.*: status {status}$"
        with pytest.raises(RuntimeError, match=refused):
            torch.ops.sparse24.matmul24_launched(
                packed.buffer, layout, 64, 128, x, bias, *(scales or (None, None)), *problem[5:7],
                problem[4],
            )  # fmt: skip


def bits(*tensors):
    return [t.contiguous().view(torch.uint8) if t.ndim else t for t in tensors]


def same(found, wanted):
    pairs = [*zip(bits(*found), bits(*wanted), strict=True)]
    return all(torch.equal(a, b) and a.shape == b.shape for a, b in pairs)


@each("tokens", [64, 48, 40])
def test_a_sample_is_launched_before_its_product(tokens, fake, monkeypatch):
    """Its kernel is asked for once; the buffer that it fills goes to the library."""
    dy, x = torch.randn(2, tokens // 2, 192).to(BF16), torch.randn(2, tokens // 2, 128).to(BF16)
    key = torch.tensor([1, 2])
    ran = interpret(monkeypatch)
    for stream in (5, 6):
        now(fake, stream + 100 * tokens)
        dw = matmul.sample_mm24(dy, x, key, 12, backend="triton")
        assert (seen(fake)["b"] == x.data_ptr()) == (tokens != 40) and dw.shape == (192, 128)
        assert dw.dtype == BF16 and torch.equal(dw[:4], x.view(-1, 128)[:4])
    assert ran == 2 * ["sample_kernel"]
    problem = 192, max(tokens, 48), 128, BF16, BF16, False, False, False, BUFFERED
    assert [*fake.plans][-2:] == [(problem, 100 * tokens + stream) for stream in (5, 6)]
    assert not matmul.sample_mm24(dy[:0], x[:0], key, backend="triton").any()


@each(
    ("dtype", "formats", "layout"),
    [(BF16, ("e4m3", "e5m2"), BUFFERED), (torch.float32, ("e5m2", "e5m2"), "cutlass_sm90")],
)
def test_codes_are_those_of_python(dtype, formats, layout, fake, monkeypatch):
    """The codes of a matrix and its transpose, and of a gradient and its sample, are equal in every
    bit; also those of views, and of nothing."""
    x, key = torch.randn(2, 50, 128).to(dtype), torch.tensor([3, 4])
    given = [x, x[:, 3:20], x[..., 64:], x[:0], x[:1, :1]]
    sample = functools.partial(quantize_and_sample, key=key, stride=8, fmt="e5m2", layout=layout)
    amax = torch.tensor([2.5, 1.5, 0.7])

    def made(t, place, backend=None):
        """Without delayed scaling if there is no place."""
        seen = torch.zeros(3)
        scaling = {} if place is None else {"amax": amax[place], "seen": seen[place]}
        both = quantize_both(t, *formats, **scaling, backend=backend)
        codes, packed, scale = sample(t, **scaling, backend=backend)
        return *both, codes, packed.buffer, scale, seen, torch.tensor(packed.shape)

    cases = [(t, place) for t in given for place in (None, 0, 1)]
    wanted = [made(*case) for case in cases]
    ran = interpret(monkeypatch)
    for _ in range(2):
        for case, want in zip(cases, wanted, strict=True):
            assert same(made(*case, "triton"), want)
    assert {*ran} == {"amax_kernel", "quantize_both_kernel", "quantize_and_sample_kernel"}


@each(("n", "m"), [(2, 4), (1, 4), (2, 8)])
def test_kept_entries_are_those_of_python(n, m, fake, monkeypatch):
    x = torch.randn(3, 5, 64)
    bits = pack_mask(nm_mask(x, n, m))
    given = [(x.to(a), b) for a, b in ((BF16, torch.float32), (BF16, BF16), (torch.float32,) * 2)]
    wanted = [compress_nm(t, bits, n, m, dtype=dtype) for t, dtype in given]
    ran = interpret(monkeypatch)
    for (t, dtype), want in zip(given, wanted, strict=True):
        assert same([compress_nm(t, bits, n, m, dtype=dtype, backend="triton")], [want])
    assert ran == 3 * ["compress_kernel"]


@each("linear", [True, False])
def test_a_product_of_codes_is_rescaled_as_in_python(linear, fake, monkeypatch):
    shape, tokens = ((64, 128), 8) if linear else ((64, 256), 4)  # a product of 1024 bytes
    packed = Packed24.empty(shape, torch.float8_e5m2)
    dense = torch.randn(tokens, shape[1] // 2).to(BF16).view(torch.float8_e5m2)
    scales, dtype = torch.tensor([3.0, 0.7]).unbind(), BF16 if linear else torch.float32
    given = packed.buffer, packed.layout, *shape, dense
    now(fake)
    y = torch.ops.sparse24.matmul24_launched(*given, None, None, None, True, linear, dtype)
    assert y.nbytes == 1024
    ran, bias = interpret(monkeypatch), torch.randn(64)
    forms = (dtype, None, 1), (torch.float16, None, 2), (dtype, bias, 2), (BF16, bias.half(), 1)
    for out, b, factor in forms if linear else forms[:2]:
        got = torch.ops.sparse24.matmul24_of_codes(*given, b, *scales, factor, linear, out)
        want = rescale(y, *scales, float(factor), b, out, backend="cpu")
        torch.testing.assert_close(got, want, rtol=torch.finfo(out).eps, atol=0)
    assert {*ran} == {"rescale_kernel"} and len(ran) == (4 if linear else 2)


@each(
    ("layout", "kind", "known"),
    [
        ("", "soft", True), (BUFFERED, "soft", False), ("", "mask", False),
        (BUFFERED, "mask", True), ("", "whole", True), ("", "whole", False),
    ],
)  # fmt: skip
def test_codes_of_a_weight_are_those_of_python(layout, kind, known, fake, monkeypatch):
    w, beta, amax = torch.randn(64, 128), torch.tensor(1.5), torch.tensor(4.0) if known else None
    mask, dtypes = transposable_mask24(w), (torch.float8_e4m3fn, torch.float8_e5m2)

    def written(backend, other):
        own = Packed24.empty((64, 128), dtypes[0], layout=layout) if layout else torch.empty(
            64, 128, dtype=dtypes[0])  # fmt: skip
        turned = torch.empty(128, 64, dtype=dtypes[other])
        if not other:
            turned = torch.empty(64, 128, dtype=dtypes[1]).t() if known else turned
        scales = torch.empty(2)
        how = {"mask": mask} if kind == "mask" else {"beta": beta} if kind == "soft" else {}
        quantize24_(own, turned, scales, w, amax=amax, backend=backend, **how)
        return (own.buffer if layout else own), turned, scales

    wanted = [written("cpu", other) for other in (0, 1)]
    interpret(monkeypatch)
    for other in (0, 1, 0, 1):
        assert same(written("triton", other), wanted[other])


def test_a_dense_product_of_codes_takes_the_reciprocals_of_both_scales(fake, monkeypatch):
    x, w = torch.randn(2, 16, 64).to(torch.float8_e5m2), torch.randn(32, 64)
    w, (scale, other) = w.to(torch.float8_e4m3fn), torch.tensor([3.0, 0.7]).unbind()
    ran = interpret(monkeypatch)
    got = scaled_linear(x, w, scale, other)
    inverse = scale.reciprocal(), other.reciprocal()
    want = torch._scaled_mm(x.view(32, 64), w.t(), *inverse, out_dtype=BF16)
    assert torch.equal(got, want.view(2, 16, 32)) and ran == ["inverse_kernel"]


def test_each_stream_has_its_plan_and_makes_it_once(fake):
    packed, x, _ = operands()
    for stream in (1, 2, 1, 2):
        now(fake, stream)
        linear24(packed, x)
        assert seen(fake)["stream"] == stream
    assert not linear24(packed, x[:0]).numel()
    assert [stream for _, stream in fake.plans] == [1, 2]


def test_threads_on_one_stream_keep_their_bias(fake):
    packed, x, _ = operands()

    def in_cpp(value):
        return linear24(packed, x, torch.full((64,), float(value)))[0, 0].item()

    def in_python(value):
        out = torch.empty(plan.problem.result_shape, dtype=BF16)
        plan.run(packed.buffer, x, out, torch.full((64,), float(value)))
        return out.flatten()[0].item()

    now(fake)
    assert in_cpp(1) == 1  # the plan is there
    *_, plan = fake.plans.values()
    ctypes.c_int.in_dll(fake, "slow").value = 2000  # microseconds; the library is this test's own
    for product in (in_cpp, in_python):
        with ThreadPoolExecutor(2) as pool:
            assert [*pool.map(product, range(20))] == [*range(20)]


def test_errors_keep_their_message(fake):
    packed, x, _ = operands()
    now(fake, status=3)
    with pytest.raises(RuntimeError, match=r"^cusparseLtMatmul: no such luck$"):
        linear24(packed, x)


def test_compiled_and_differentiated_as_before(fake):
    packed, x, bias = operands()
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(linear24, backend="aot_eager", fullgraph=True, dynamic=True)
        for given in (x, x[:24].requires_grad_()):
            y = compiled(packed, given, bias)
            assert torch.equal(y[0], bias.to(BF16)) and y.shape == (len(given), 64)
            assert seen(fake)["b"] == given.data_ptr()
    plans = len(fake.plans)
    with pytest.raises(RuntimeError, match="autograd"):
        linear24(packed, x.requires_grad_()).float().sum().backward()
    assert len(fake.plans) == plans


def test_without_a_compiler_python_goes_on_and_says_so(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.delenv("SPARSE24_NATIVE", raising=False)
    start = native.start.__wrapped__
    with pytest.warns(UserWarning, match=r"'no-such-compiler' cannot be found.*from Python"):
        start()
    monkeypatch.setenv("SPARSE24_NATIVE", "0")
    start()
