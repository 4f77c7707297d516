"""Compare every operator with a copy of its input: `python -m experiments.bench ops`.

On a CPU operators run on the weights of GPT-2 124M in fp32, and memory is measured as well. On a
GPU they run on matrices larger than any cache, in bf16 and fp32, are first compared with plain
PyTorch, and timed beside plain formulations, eager and compiled, and other libraries' packers; the
one-pass optimizer step is measured, too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from common_kernels import backend
from experiments.bench import passes
from experiments.bench.operators import BF16, OPS, check
from experiments.bench.report import Report, Row
from experiments.bench.timing import Call, in_turns

# The attention and FFN weights of GPT-2 124M: 85 million numbers.
LAYERS = 12
SHAPES = ((2304, 768), (768, 768), (3072, 768), (768, 3072))
QUICK_SHAPES = ((16, 32), (8, 32))
GPU_SHAPE, QUICK_SHAPE = (8192, 8192), (64, 128)  # the first is 128 MiB in bf16
GPU_BUFFERS = 2


def bench(options: argparse.Namespace, report: Report) -> None:
    (on_cpu if options.device.type == "cpu" else on_gpu)(options, report)


def weights(layers: int, quick: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (QUICK_SHAPES if quick else SHAPES) * layers
    return [torch.empty(shape).normal_(std=0.02, generator=generator) for shape in shapes]


def on_cpu(options: argparse.Namespace, report: Report) -> None:
    """Measure the operators on the CPU: first memory, then time."""
    names = report.chosen(name for name, op in OPS.items() if not op.gpu_only)
    quick = options.quick
    memory = {}
    for name in () if quick else names:
        grown = in_fresh_process(peak_memory, name, options.threads)
        memory[name] = {"peak memory / weights": grown}
    # Use one large matrix: the allocator recycles blocks of a single weight's size, but a block of
    # this size is new in each call and costs the same page faults for clone() and the operator.
    layers = weights(1 if quick else LAYERS, quick)
    w = torch.cat([w.view(-1, layers[0].shape[1]) for w in layers])
    for name in names:
        calls = {name: rotating(OPS[name].run, [OPS[name].prepare(w)])}
        row = beside_copy(name, calls, OPS[name].moved, [w], options)
        row.figures["clones"] = row.time.ms / row.peers["clone"] if row.time else 0.0
        row.figures.update(memory.get(name, {}))
        report.add(row)
    left_out = [name for name, op in OPS.items() if op.gpu_only]
    report.leave_out(f"without a GPU: {'; '.join([*left_out, *passes.PASSES])}")


def peak_memory(name: str, threads: int) -> float:
    """The growth of the peak resident memory while the operator runs over all weights, as a
    multiple of their size.

    The outputs are kept, so they count. Run it in a fresh process, whose peak is its present size.
    """
    torch.set_num_threads(threads)
    op, inputs = OPS[name], weights(LAYERS)
    arguments = [op.prepare(w) for w in inputs]
    op.run(*op.prepare(torch.ones(64, 64)))  # so that the first call's imports are not counted
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outputs = [op.run(*args) for args in arguments]
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB on Linux
    del outputs
    return growth * unit / sum(w.nbytes for w in inputs)


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def matrices(dtype: torch.dtype, device: torch.device, quick: bool = False) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    shape = QUICK_SHAPE if quick else GPU_SHAPE
    return [
        torch.empty(shape, device=device).normal_(std=0.02, generator=generator).to(dtype)
        for _ in range(GPU_BUFFERS)
    ]


def on_gpu(options: argparse.Namespace, report: Report) -> None:
    names = report.chosen([*OPS, *passes.PASSES])
    for dtype in (torch.bfloat16, torch.float32):
        inputs = matrices(dtype, options.device, options.quick)
        for name in names:
            if name in OPS:
                check(name, inputs[0])
                report.add(time_op(name, inputs, options, report))
            elif dtype is torch.float32:  # optimizer steps, whose weights are fp32
                passes.check(name, inputs[0])
                report.add(time_pass(name, inputs, options))


def time_pass(name: str, inputs: list[Tensor], options: argparse.Namespace) -> Row:
    step = passes.PASSES[name]
    calls = passes.calls(name, [passes.inputs(w, name) for w in inputs])
    row = beside_copy(name, calls, lambda _: step.moved, inputs, options)
    row.figures["bytes a weight"] = step.moved
    row.figures["bytes a weight, separate passes"] = step.moved_apart
    return row


def time_op(name: str, inputs: list[Tensor], options: argparse.Namespace, report: Report) -> Row:
    """The row of an operator timed together with a copy and other ways to do the same work."""
    op, dtype = OPS[name], inputs[0].dtype
    arguments = [op.prepare(x) for x in inputs]
    others = dict(op.libraries) if dtype is BF16 else {}  # libraries pack 16-bit types
    if op.plain is not None:
        others["compiled"] = op.through(torch.compile(op.plain, dynamic=False))
        others["eager"] = op.through(op.plain)
    calls = {name: rotating(op.run, arguments)}
    for label, other in others.items():
        if report.usable(f"{label} beside {name}, {dtype}", partial(other, *arguments[0])):
            calls[label] = rotating(other, arguments)
    return beside_copy(name, calls, op.moved, inputs, options)


def rotating(function: Callable[..., Any], arguments: list[tuple[Any, ...]]) -> Call:
    """A call of the function with the arguments of buffer number i."""
    return lambda i: function(*arguments[i])


def beside_copy(
    name: str,
    calls: dict[str, Call],
    moved: Callable[[float], float],
    inputs: list[Tensor],
    options: argparse.Namespace,
) -> Row:
    """The row of `calls[name]`, with the other calls as peers and a copy of `inputs` as limit."""
    w = inputs[0]
    calls = {"clone": lambda i: inputs[i].clone(), **calls}
    times = in_turns(calls, options.device, options.repeats, len(inputs))
    work = w.numel() * moved(w.itemsize)
    return Row(
        name, str(w.dtype).removeprefix("torch."), " x ".join(map(str, w.shape)),
        backend.resolve(w.device), times[name],
        peers={peer: time.ms for peer, time in times.items() if peer != name},
        limit_ms=times["clone"].ms * work / (2 * w.nbytes),
        figures={"GB/s": work / times[name].ms / 1e6},
    )  # fmt: skip
