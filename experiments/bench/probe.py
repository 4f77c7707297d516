"""Probe the 2:4 support of this GPU, driver and cuSPARSELt: `python -m experiments.bench probe`.

It determines on the hardware what the packing formats and the choice of a GEMM are based on: which
of torch's 2:4 operators run, in which order cuSPARSELt keeps its metadata, which algorithms give
correct products, and how fast they are compared with the dense product of the same shape.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common_kernels import nm_mask, transposable_mask24
from common_kernels.pack.cpu import cusparselt_sm90_order
from experiments.bench.timing import in_turns

aten = torch.ops.aten
FP8 = torch.float8_e4m3fn
# (tokens, inputs, outputs) of the linears in this project's benchmarks.
SHAPES = (
    *((t, k, n) for t in (2048, 8192, 16384) for k, n in ((4096, 4096), (4096, 14336))),
    (8192, 14336, 4096),
    (8192, 8192, 28672),
    (13008, 1024, 4096),  # ViT-L
    (13008, 4096, 1024),
    (16384, 1280, 5120),  # GPT-2 774M
    (16384, 5120, 1280),
)


def run(save: Callable[[dict[str, Any]], None]) -> None:
    """Run all probes and return their results by name; a probe that fails has its error as result.

    Args:
        save: called with the results so far after every probe, because some errors end the process.
    """
    record: dict[str, Any] = {}
    for name, probe in {
        "versions": versions,
        "operators": operators,
        "tile_packer": tile_packer,
        "layouts": layouts,
        "bandwidth": bandwidth,
        "launch": launch,
    }.items():
        start = time.perf_counter()
        record[name] = attempt(probe)
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
        save(record)
    record["products"] = []
    for tokens, inputs, outputs in SHAPES:
        start = time.perf_counter()
        record["products"].append(attempt(product, tokens, inputs, outputs))
        print(f"{tokens} x {inputs} x {outputs}: {time.perf_counter() - start:.1f} s", flush=True)
        save(record)


def attempt(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except Exception as error:  # a refusal is a result here
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}


def versions() -> dict[str, Any]:
    import triton

    return {
        "device": torch.cuda.get_device_name(),
        "capability": torch.cuda.get_device_capability(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "cusparselt": torch.backends.cusparselt.version(),
    }


def sparse(
    rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, both_ways: bool = False
) -> Tensor:
    w = torch.randn(rows, columns, device="cuda")
    w *= transposable_mask24(w) if both_ways else nm_mask(w)
    return w.to(dtype)


# --- which operators run -------------------------------------------------------------------------


def operators() -> dict[str, Any]:
    """The shapes of the results of torch's 2:4 operators, or their errors."""
    from torch.sparse import to_sparse_semi_structured
    from torch.sparse._semi_structured_conversions import (
        sparse_semi_structured_from_dense_cutlass as from_dense,
    )

    w, x = sparse(256, 256), torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
    packed, meta = from_dense(w)
    compressed = aten._cslt_compress(w)
    flat = compressed.flatten()
    wrapped = to_sparse_semi_structured(w)
    one = torch.ones((), device="cuda")
    w8, x8 = w.to(FP8), x.to(FP8)
    calls: dict[str, Callable[[], Any]] = {
        "_sparse_semi_structured_mm": lambda: aten._sparse_semi_structured_mm(packed, meta, x),
        "_sparse_semi_structured_linear": lambda: aten._sparse_semi_structured_linear(
            x, packed, meta
        ),
        "_sparse_semi_structured_tile cutlass": lambda: aten._sparse_semi_structured_tile(w),
        "_sparse_semi_structured_tile cusparselt": lambda: aten._sparse_semi_structured_tile(
            w, "", False
        ),
        "_cslt_compress": lambda: compressed,
        "_cslt_compress fp8": lambda: aten._cslt_compress(w8),
        "_cslt_sparse_mm": lambda: aten._cslt_sparse_mm(compressed, x.t()),
        "_cslt_sparse_mm of a flat operand": lambda: aten._cslt_sparse_mm(flat, x.t()),
        "_cslt_sparse_mm row-major operand": lambda: aten._cslt_sparse_mm(compressed, x),
        "_cslt_sparse_mm transposed result": lambda: aten._cslt_sparse_mm(
            compressed, x.t(), transpose_result=True
        ),
        "_cslt_sparse_mm alpha": lambda: aten._cslt_sparse_mm(compressed, x.t(), alpha=one),
        "_cslt_sparse_mm fp8 -> bf16": lambda: aten._cslt_sparse_mm(
            aten._cslt_compress(w8), x8.t(), alpha=one, out_dtype=torch.bfloat16
        ),
        "_cslt_sparse_mm fp8 row-major operand": lambda: aten._cslt_sparse_mm(
            aten._cslt_compress(w8), x8, out_dtype=torch.bfloat16
        ),
        "mm_search": lambda: torch._C._cusparselt.mm_search(  # type: ignore[attr-defined]
            compressed, x.t(), None, None, None, False
        ),
        "torch subclass linear": lambda: F.linear(x, wrapped),
    }
    return {name: attempt(lambda call=call: describe(call())) for name, call in calls.items()}


def describe(value: Any) -> Any:
    if isinstance(value, Tensor):
        return [str(value.dtype), list(value.shape), list(value.stride())]
    if isinstance(value, tuple | list):
        return [describe(v) for v in value]
    return value


def tile_packer() -> dict[str, Any]:
    """The relative errors of products with matrices that torch's tile packer packed for cuSPARSELt,
    and of a product with its 1-D packing."""
    from torch.sparse import SparseSemiStructuredTensorCUSPARSELT as Wrapper

    w = sparse(256, 256, both_ways=True)
    x = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
    name = "largest_abs_values_greedy"
    wrapped = Wrapper.prune_dense_static_sort(w, name)
    packed = aten._sparse_semi_structured_tile(w, name, False)[0]
    return {
        "relative error of pruned @ x": attempt(lambda: relative_error(wrapped @ x, w @ x)),
        "relative error of pruned.t() @ x": attempt(
            lambda: relative_error(wrapped.t() @ x, w.t() @ x)
        ),
        "packed as returned": attempt(lambda: describe(aten._cslt_sparse_mm(packed, x))),
    }


def relative_error(value: Tensor, truth: Tensor) -> float:
    return ((value.double() - truth.double()).norm() / truth.double().norm()).item()


# --- the order of cuSPARSELt's metadata ----------------------------------------------------------


def layouts() -> dict[str, Any]:
    """The order of cuSPARSELt's metadata, for several dtypes and shapes."""
    shapes = ((64, 64), (128, 128), (256, 512), (512, 256), (96, 160), (32, 32), (320, 192))
    return {
        f"{str(dtype).removeprefix('torch.')} {rows}x{columns}": attempt(
            layout, rows, columns, dtype
        )
        for dtype in (torch.float16, torch.bfloat16, FP8, torch.int8)
        for rows, columns in shapes
    }


def layout(rows: int, columns: int, dtype: torch.dtype) -> dict[str, Any]:
    """Find the address of each group's positions: number the groups, encode each bit of the numbers
    as the groups' patterns, and read it back from the metadata.

    A bit 0 keeps the entries 0 and 1 of its group (nibble 4), a bit 1 keeps 2 and 3 (nibble 14).
    """
    groups = rows * columns // 4
    number = torch.arange(groups, device="cuda")
    values = torch.arange(1, 2 * groups + 1, device="cuda").remainder(96).add(1)  # 1...96
    found, compressed = None, None
    for bit in range(groups.bit_length()):  # one more than it takes: padding may read as all ones
        second_half = (number >> bit & 1).bool()
        w = torch.zeros(groups, 4, device="cuda")
        pairs = values.view(groups, 2).float()
        w[~second_half, :2] = pairs[~second_half]
        w[second_half, 2:] = pairs[second_half]
        compressed = aten._cslt_compress(w.view(rows, columns).to(dtype))
        compressed = compressed.flatten().view(torch.uint8)
        meta = compressed[rows * columns // 2 * dtype.itemsize :].int()
        nibbles = torch.stack([meta & 15, meta >> 4], 1).flatten()
        if found is None:
            found = torch.zeros_like(nibbles, dtype=torch.int64)
        found[(nibbles != 4) & (nibbles != 14)] = -(1 << 40)
        found += (nibbles == 14).long() << bit
    assert found is not None and compressed is not None
    stored = compressed[: rows * columns // 2 * dtype.itemsize].view(dtype)
    used = (found >= 0) & (found < groups)  # all other addresses are padding
    address = torch.full((groups,), -1, device="cuda")
    address[found[used]] = used.nonzero().squeeze(1)
    result: dict[str, Any] = {
        "padding nibbles": int((~used).sum()),
        "values row-major": torch.equal(stored.float(), values.to(dtype).float()),
        "metadata bytes": found.numel() // 2,
        "every group once": bool(used.sum() == groups and (address >= 0).all()),
    }
    expected = cusparselt_sm90_order(rows, columns, dtype.itemsize).flatten().cuda()
    result["sm90 order"] = torch.equal(address, expected)
    if rows % 128 == columns % 128 == 0:
        result["sm80 order"] = torch.equal(address, sm80_order(rows, columns).cuda())
    if not result["sm90 order"]:
        result["addresses"] = address.tolist()
    return result


def sm80_order(rows: int, columns: int) -> Tensor:
    """The order of metadata that torch's tile kernel writes for cuSPARSELt, for 16-bit types."""
    r, g = torch.arange(rows)[:, None], torch.arange(columns // 4)
    c = g // 4  # chunk of 16 columns
    word = (
        512 * (rows // 128) * (c // 4)
        + 512 * (r // 128)
        + 256 * (c % 4 // 2)
        + 64 * (r % 128 // 32)
        + 8 * (r % 8)
        + 4 * (r % 32 // 16)
        + 2 * (c % 2)
        + r % 16 // 8
    )
    return (4 * word + g % 4).flatten()


# --- time ----------------------------------------------------------------------------------------


def milliseconds(call: Callable[[int], Any], buffers: int, repeats: int = 5) -> float:
    """The median time of a call in ms, rotating over buffers."""
    return in_turns({"call": call}, torch.device("cuda"), repeats, buffers)["call"].ms


def bandwidth() -> dict[str, Any]:
    """GB/s, bytes read plus written, of a copy and of torch's packers on a bf16 weight."""
    result = {}
    for rows, columns in ((4096, 8192), (8192, 28672)):
        w = sparse(rows, columns)
        weight, packed = w.nbytes, w.nbytes * 9 // 16
        calls = {
            "clone": (lambda _, w=w: w.clone(), 2 * weight),
            "_cslt_compress": (lambda _, w=w: aten._cslt_compress(w), weight + packed),
            "tile": (
                lambda _, w=w: aten._sparse_semi_structured_tile(w, "largest_abs_values_greedy"),
                weight + 2 * packed + weight // 16,
            ),
        }
        for name, (call, moved) in calls.items():
            ms = attempt(milliseconds, call, 1)
            result[f"{name} {rows}x{columns}"] = (
                ms if isinstance(ms, dict) else {"ms": ms, "GB/s": moved / ms / 1e6}
            )
        del w, calls
    return result


def launch() -> dict[str, Any]:
    """CPU microseconds per call on a small product, outside a graph."""
    w = sparse(256, 256)
    x = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
    compressed = aten._cslt_compress(w)
    result = {}
    for name, call in {
        "_cslt_sparse_mm": lambda: aten._cslt_sparse_mm(compressed, x.t(), transpose_result=True),
        "_cslt_compress": lambda: aten._cslt_compress(w),
        "F.linear": lambda: F.linear(x, w),
    }.items():
        call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            call()
        result[name] = (time.perf_counter() - start) / 200 * 1e6
        torch.cuda.synchronize()
    return result


@dataclass(frozen=True)
class Form:
    """One way to call a product: dtype and layout of the dense operand and of the result."""

    name: str
    dtype: torch.dtype
    column_major: bool  # the dense operand [k, n] is the transpose of a contiguous matrix
    transposed: bool  # the result, too, is a transpose


FORMS = (
    Form("bf16 Y", torch.bfloat16, column_major=True, transposed=True),
    Form("bf16 Y, result not transposed", torch.bfloat16, column_major=True, transposed=False),
    Form("bf16 dW", torch.bfloat16, column_major=False, transposed=False),
    Form("fp8 Y", FP8, column_major=True, transposed=True),
    Form("fp8 Y, result not transposed", FP8, column_major=True, transposed=False),
)


def product(tokens: int, inputs: int, outputs: int) -> dict[str, Any]:
    """The times of the dense and the sparse product of one shape, the latter for every algorithm
    whose result is correct."""
    buffers = 2
    x = [torch.randn(tokens, inputs, device="cuda", dtype=torch.bfloat16) for _ in range(buffers)]
    w = sparse(outputs, inputs)
    random = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16)
    one = torch.ones((), device="cuda")
    x8, random8 = [y.to(FP8) for y in x], random.to(FP8)
    row: dict[str, Any] = {"tokens": tokens, "inputs": inputs, "outputs": outputs}
    row["dense bf16 ms"] = milliseconds(lambda i: F.linear(x[i], random), buffers)
    row["dense fp8 ms"] = attempt(
        milliseconds,
        lambda i: torch._scaled_mm(
            x8[i], random8.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True
        ),
        buffers,
    )
    flops = 2 * tokens * inputs * outputs
    row["dense bf16 TFLOP/s"] = flops / row["dense bf16 ms"] / 1e9
    for form in FORMS:
        if form.name == "bf16 dW":  # dY^T [outputs, tokens] is sparse, x [tokens, inputs] row-major
            a = sparse(outputs, tokens)
            dense = x
        else:
            a = w.to(form.dtype)
            dense = [y.t() for y in (x8 if form.dtype is FP8 else x)]
        row[form.name] = attempt(algorithms, a, dense, form)
    return row


def algorithms(a: Tensor, dense: list[Tensor], form: Form) -> dict[str, Any]:
    out_dtype = torch.bfloat16 if form.dtype is FP8 else None  # other inputs refuse one
    compressed = aten._cslt_compress(a)
    truth = a.float() @ dense[0].float()

    def call(i: int, algorithm: int, split_k: int = 1, mode: int = -1) -> Tensor:
        return aten._cslt_sparse_mm(
            compressed,
            dense[i],
            out_dtype=out_dtype,
            transpose_result=form.transposed,
            alg_id=algorithm,
            split_k=split_k,
            split_k_mode=mode,
        )

    def error(*choice: int) -> float:
        result = call(0, *choice)
        return relative_error(result.t() if form.transposed else result, truth)

    search = torch._C._cusparselt.mm_search  # type: ignore[attr-defined]
    found = attempt(search, compressed, dense[0], None, None, out_dtype, form.transposed)
    largest = found[3] if isinstance(found, tuple) else 40
    times, wrong = {}, {}
    for algorithm in range(largest + 1):
        e = attempt(error, algorithm)
        if isinstance(e, dict):
            wrong[algorithm] = e["error"]
            break  # past the last one
        if not e < 1e-2:
            wrong[algorithm] = e
            continue
        times[algorithm] = milliseconds(partial(call, algorithm=algorithm), len(dense), 3)
    if not times:
        return {"search": found, "wrong": wrong}
    best = min(times, key=times.__getitem__)
    again = {error(best) for _ in range(5)}
    result = {
        "best": best,
        "ms": milliseconds(lambda i: call(i, best), len(dense)),
        "algorithm 0 ms": times.get(0),
        "same result five times": len(again) == 1,
        "search": list(found) if isinstance(found, tuple) else found,
        "all ms": times,
        "wrong": wrong,
    }
    if isinstance(found, tuple) and found[1] != 1:
        choice = found[:3]
        result["search error"] = attempt(error, *choice)
        result["search ms"] = attempt(milliseconds, lambda i: call(i, *choice), len(dense))
    return result
