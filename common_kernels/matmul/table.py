"""Tables of measurements: the fastest algorithm of cuSPARSELt, or the fastest of our own kernels,
for each product, and whether it beats the dense product.

A table is a JSON file with a list of products for each device and library version. The one beside
this file was measured by `python -m experiments.bench` on an H200. A product that it lacks is
measured when it is first needed, and kept in `$XDG_CACHE_HOME/sparse24/matmul.json`.

An algorithm is accepted only if its product agrees with that of the masked dense matrix three times
with the same bits: on some GPUs some algorithms occasionally give wrong results.
"""

import functools
import json
import math
import os
import statistics
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from common_kernels.fp8.operands import rescale, scaled_linear
from common_kernels.masks import nm_mask
from common_kernels.matmul import cuda, cuda_build, cusparselt
from common_kernels.matmul.cuda import CudaProductError
from common_kernels.matmul.cusparselt import Problem
from common_kernels.pack import BUFFERED, VENDOR, cpu
from common_kernels.pack.cusparselt import CuSparseLtError, version

SHIPPED = Path(__file__).with_name("measured.json")
# On an H200 with cuSPARSELt 0.8.0 fp16 has 52 algorithms. Those from 36 on raise an illegal
# instruction, which ends the process.
USABLE = {torch.float16: 36}
NONE = -1
CALLS, LONG_MS = 6, 2.0  # calls in a replay; two are enough if one takes this many milliseconds
NEAR_FEW = 1.5  # the factor by which few tokens may differ from those that were measured
CACHED = 2**27  # bytes: less than so much of a weight may stay in the cache
# An algorithm is timed by replays if its launched call takes at most NEAR times as long as the
# fastest call, or as CLEAR_MS, below which a launch may take longer than the kernel.
NEAR, CLEAR_MS = 1.15, 0.2


@dataclass(frozen=True)
class Entry:
    """The fastest correct algorithm of a product, its time and that of the dense product, in ms.

    algorithm: NONE, with an infinite time, if no algorithm is correct.
    wrong: the algorithms whose product differed from that of the masked dense matrix.
    """

    algorithm: int
    ms: float
    dense_ms: float
    wrong: tuple[int, ...] = ()


def entry(problem: Problem, device: int, within: float = math.inf) -> Entry:
    """The table's entry for a product; it is measured now if there is none.

    An entry for another number of tokens is used if the numbers differ by at most a factor of
    `within` and its algorithm is correct for this number too.

    Raises RuntimeError if the product must be measured while a CUDA graph is being captured.
    """
    known = _table(device, problem.layout)
    found = known.get(problem)
    if found is None and (near := _nearest(problem, known, within)) is not None:
        refuse_capture(problem)
        if near.algorithm == NONE or Trial(problem, device).is_right(near.algorithm):
            found = known[problem] = near
    if found is None:
        refuse_capture(problem)
        found = known[problem] = measure(problem, device)
        try:
            save(cache_file(), _key(device, problem.layout), {problem: found})
        except OSError as error:
            warnings.warn(
                f"measurements of sparse products cannot be saved ({error}), so the next process "
                "will repeat them; set XDG_CACHE_HOME to a writable folder",
                stacklevel=2,
            )
    return found


def known(problem: Problem, device: int) -> Entry | None:
    """The table's entry for exactly this product, if there is one."""
    return _table(device, problem.layout).get(problem)


def refuse_capture(problem: Problem) -> None:
    """Raise RuntimeError while a CUDA graph is being captured: nothing can be measured then."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{problem} has not been measured yet: run it once before it is captured in a CUDA "
            "graph"
        )


def _nearest(problem: Problem, known: dict[Problem, Entry], within: float) -> Entry | None:
    """The entry of a product that differs only in the number of tokens, with its times scaled to
    this number; None if no number is within a factor of `within`. In wgrad, whose result is not
    transposed, the tokens are the columns of the sparse matrix. A sparse input has them as its
    rows, and as columns where it is transposed."""
    if problem.dense_transposed and problem.result_transposed:
        name = "tokens"
    else:
        of_input = problem.dense_transposed and problem.out_dtype.itemsize == 2
        name = "rows" if of_input else "columns"

    def factor(other: Problem) -> float:
        a, b = getattr(problem, name), getattr(other, name)
        return max(a, b) / min(a, b)

    same = [p for p in known if replace(p, **{name: getattr(problem, name)}) == problem]
    if problem.layout in cuda.LAYOUTS and name == "tokens":  # few tokens have kernels of their own
        few = problem.tokens <= cuda.FEW
        same = [p for p in same if (p.tokens <= cuda.FEW) == few]
        within = min(within, NEAR_FEW) if few else within
    nearest = min(same, key=factor, default=None)
    if nearest is None or factor(nearest) > within:
        return None
    found, share = known[nearest], getattr(problem, name) / getattr(nearest, name)
    return replace(found, ms=share * found.ms, dense_ms=share * found.dense_ms)


class Trial:
    """A product of random matrices and its correct result."""

    def __init__(self, problem: Problem, device: int) -> None:
        self.problem, self.device = problem, device
        p, where = problem, device_of(device)
        generator = torch.Generator(where).manual_seed(0)
        random = functools.partial(torch.randn, device=where, generator=generator)
        a = random(p.rows, p.columns)
        self.kept = nm_mask(a)
        self.a = torch.where(self.kept, a, 0.0).to(p.dtype)
        self.dense = [random(p.dense_shape).to(p.dtype) for _ in range(2)]
        # With few tokens the time is that of reading the weight, which is in no cache when a model
        # runs: copies of it take turns.
        cached = p.tokens <= cuda.FEW and self.a.nbytes < CACHED and p.result_transposed
        self.copies = CALLS if cached else 1
        self.bias = random(p.rows).to(p.out_dtype) if p.biased else None
        self.out = torch.empty(p.result_shape, dtype=p.out_dtype, device=where)
        right = self.product(self.a.float(), self.dense[0].float())
        if self.bias is not None:
            right += self.bias if p.result_transposed else self.bias[:, None]
        # Whether or not TF32 is allowed, the fp32 reference is far more precise than the margin.
        self.right, self.margin = right, margin(p) * right.abs().max()

    @functools.cached_property
    def buffer(self) -> torch.Tensor:
        """The packed matrix. Raises CuSparseLtError if the library cannot pack it."""
        return cpu.pack(self.a, self.kept, self.problem.layout)

    def product(self, a: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        b = dense.t() if self.problem.dense_transposed else dense
        return b.t() @ a.t() if self.problem.result_transposed else a @ b

    def is_right(self, algorithm: int) -> bool:
        try:
            plan, buffer = plan_of(self.problem, algorithm, self.device), self.buffer
            return self.agrees(lambda x: plan.run(buffer, x, self.out, self.bias))
        except (CuSparseLtError, CudaProductError):
            return False

    def agrees(self, run: Callable[[torch.Tensor], None]) -> bool:
        """True if `run(x)` writes the product into `out`, three times with the same bits."""
        first = None
        for _ in range(3):
            self.out.fill_(float("nan"))
            run(self.dense[0])
            error = (self.out.float() - self.right).abs().max()
            if not error <= self.margin or not (first is None or torch.equal(first, self.out)):
                return False
            first = self.out.clone()
        return True

    def once_ms(self, algorithm: int) -> float:
        """Time of the sparse product launched once: the shorter of two."""
        plan = plan_of(self.problem, algorithm, self.device)

        def run() -> None:
            plan.run(self.buffer, self.dense[0], self.out, self.bias)

        return min(elapsed_ms(run), elapsed_ms(run))

    def sparse_ms(self, algorithm: int) -> float:
        """Time of the sparse product; for FP8 with cuSPARSELt, including the separate rescaling. A
        sample, which every product of wgrad packs anew, is packed along where the library does it:
        our packers take no longer than sampling alone."""
        plan = plan_of(self.problem, algorithm, self.device)
        one = torch.ones((), device=self.out.device)
        codes, buffers = self.problem.dtype.itemsize == 1, copies(self.buffer, self.copies)
        packs = self.problem.layout == VENDOR and not self.problem.result_transposed
        sample = self.a.t().contiguous() if packs else None

        def call(i: int) -> None:
            packed = buffers[i % len(buffers)]
            if sample is not None:
                packed = cpu.by_library(sample.t().contiguous())
            given = packed, self.dense[i % 2], self.out, self.bias
            if isinstance(plan, cuda.Plan):
                plan.run(*given, (one, one) if codes else None)
                return
            plan.run(*given)
            if codes:
                rescale(self.out, one, one)

        return replay_ms(call)

    def dense_ms(self) -> float:
        """Time of the dense product, for FP8 operands in FP8 if cuBLAS has it, else in bf16."""
        p, one = self.problem, torch.ones((), device=self.out.device)
        if p.dtype is torch.float8_e4m3fn and p.dense_transposed:
            if not p.result_transposed:  # of a sparse input
                return replay_ms(lambda i: scaled_linear(self.a, self.dense[i % 2], one, one))
            return replay_ms(lambda i: scaled_linear(self.dense[i % 2], self.a, one, one))
        a, *dense = (
            t.to(torch.bfloat16) if p.dtype.itemsize == 1 else t for t in (self.a, *self.dense)
        )
        weights = copies(a, self.copies)
        return replay_ms(lambda i: self.product(weights[i % len(weights)], dense[i % 2]))


def copies(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """The tensor and `count` - 1 clones of it."""
    return [tensor, *(tensor.clone() for _ in range(count - 1))]


def margin(problem: Problem) -> float:
    """The largest error of a correct product, as a fraction of its largest entry: 2^-7, a few
    roundings to bf16.

    FP8 units add 64 columns of a 2:4 matrix at a time and truncate the sum to 14 bits, as dense
    products with fast accumulation do; each such step adds 2^-14.
    """
    cuts = problem.columns / 64 if problem.dtype.itemsize == 1 else 0
    return 2.0**-7 + cuts * 2.0**-14


def plan_of(problem: Problem, algorithm: int, device: int) -> cusparselt.Plan | cuda.Plan:
    """The plan of a product with cuSPARSELt or our own kernels, as its layout says."""
    return (cuda if problem.layout in cuda.LAYOUTS else cusparselt).Plan(problem, algorithm, device)


def device_of(index: int) -> torch.device:
    return torch.device("cuda", index)


def measure(problem: Problem, device: int) -> Entry:
    """Check and time every algorithm, time the dense product, and return the entry."""
    trial = Trial(problem, device)
    try:
        number = min(plan_of(problem, 0, device).algorithms, USABLE.get(problem.dtype, 1000))
    except CuSparseLtError:  # this product is none of the library's on this GPU
        number = 0
    right = [algorithm for algorithm in range(number) if trial.is_right(algorithm)]
    if not right:
        return Entry(NONE, math.inf, trial.dense_ms(), tuple(range(number)))
    once = {algorithm: trial.once_ms(algorithm) for algorithm in right}
    near = NEAR * max(CLEAR_MS, min(once.values()))
    ms = {algorithm: trial.sparse_ms(algorithm) for algorithm in right if once[algorithm] <= near}
    best = min(ms, key=ms.__getitem__)
    wrong = tuple(sorted(set(range(number)) - set(right)))
    return Entry(best, ms[best], trial.dense_ms(), wrong)


def replay_ms(call: Callable[[int], Any], repeats: int = 3) -> float:
    """Median time in ms of a call in a CUDA graph of several, which are given their numbers."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)
        calls = 2 if elapsed_ms(lambda: call(1)) >= LONG_MS else CALLS
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # So that other threads (which pin memory, for example) do not disturb the capture.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for i in range(calls):
                call(i)
    graph.replay()
    return statistics.median(elapsed_ms(graph.replay) / calls for _ in range(repeats))


def elapsed_ms(run: Callable[[], Any], meanwhile: Callable[[], None] | None = None) -> float:
    """The milliseconds that the GPU takes for the work that `run` puts on the current stream;
    `meanwhile` is called while it works."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    if meanwhile is not None:
        meanwhile()
    end.synchronize()
    return start.elapsed_time(end)


@functools.cache
def _table(device: int, layout: str) -> dict[Problem, Entry]:
    key = _key(device, layout)
    return load(SHIPPED, key) | load(cache_file(), key)


def cache_file() -> Path:
    return cuda_build.cache().with_name("matmul.json")


def _key(device: int, layout: str) -> str:
    ours = layout in cuda.LAYOUTS
    by = f"CUTLASS {cuda.version()}" if ours else f"cuSPARSELt {version()}"
    return f"{torch.cuda.get_device_name(device)}, {by}"


def load(path: Path, key: str) -> dict[Problem, Entry]:
    """The table of one device and library version in a file; empty if the file has none. Raises
    ValueError for a damaged file."""
    if not path.exists():
        return {}
    try:
        rows = json.loads(path.read_text()).get(key, [])
        return dict(_from_json(row) for row in rows)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error!r}); delete it to measure again") from error


def save(path: Path, key: str, entries: dict[Problem, Entry]) -> None:
    """Add entries to a file. A lock makes concurrent writers wait, so that no entry is lost, and
    the file is replaced at once, so that readers never see half of it."""
    import fcntl  # missing on Windows, where there are no sparse products

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        everything = json.loads(path.read_text()) if path.exists() else {}
        rows = load(path, key) | entries
        everything[key] = [_to_json(*row) for row in rows.items()]
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(everything, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        Path(file.name).replace(path)


def _to_json(problem: Problem, found: Entry) -> dict[str, Any]:
    row = {**asdict(problem), **asdict(found)}
    return {k: str(v)[6:] if isinstance(v, torch.dtype) else v for k, v in row.items()}


def _from_json(row: dict[str, Any]) -> tuple[Problem, Entry]:
    row = {"layout": BUFFERED, **row, "wrong": tuple(row["wrong"])}
    for name in ("dtype", "out_dtype"):
        row[name] = getattr(torch, row[name])
    parts = [{f.name: row[f.name] for f in fields(cls)} for cls in (Problem, Entry)]
    return Problem(**parts[0]), Entry(**parts[1])
