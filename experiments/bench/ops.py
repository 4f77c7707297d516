"""Compares every operator with a copy of its input: `python -m experiments.bench ops`.

Matrices are larger than any cache, in fp32 and on a GPU also in bf16. On a GPU the operators are
first compared with plain PyTorch, and timed beside plain formulations, eager and compiled, and
other libraries' packers; the one-pass optimizer step is measured, too.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from common_kernels import backend
from experiments.bench.operators import BF16, OPS, check
from experiments.bench.report import Report, Row
from experiments.bench.timing import Call, in_turns
from experiments.support.errors import first_line

QUICK_SHAPE, CPU_SHAPE, GPU_SHAPE = (64, 128), (4096, 4096), (8192, 8192)
BUFFERS = 2


def bench(options: argparse.Namespace, report: Report) -> None:
    on_gpu = options.device.type == "cuda"
    left_out = [name for name, op in OPS.items() if op.gpu_only and not on_gpu]
    names = report.chosen(name for name in OPS if name not in left_out)
    for dtype in (BF16, torch.float32) if on_gpu else (torch.float32,):
        inputs = matrices(dtype, options)
        for name in names:
            if dtype is torch.float32 or not OPS[name].fp32:
                check(name, inputs[0])
                report.add(time_op(name, inputs, options, report))
    if left_out:
        report.leave_out(f"without a GPU: {'; '.join(left_out)}")


def matrices(dtype: torch.dtype, options: argparse.Namespace) -> list[Tensor]:
    """Random weights."""
    device = options.device
    shape = GPU_SHAPE if device.type == "cuda" else CPU_SHAPE
    generator = torch.Generator(device).manual_seed(0)
    size = (BUFFERS, *(QUICK_SHAPE if options.quick else shape))
    weights = torch.empty(size, device=device).normal_(std=0.02, generator=generator)
    return list(weights.to(dtype))


def time_op(name: str, inputs: list[Tensor], options: argparse.Namespace, report: Report) -> Row:
    """The row of an operator timed together with a copy and other ways to do the same work."""
    op, dtype = OPS[name], inputs[0].dtype
    arguments = [op.prepare(x) for x in inputs]
    # Libraries pack 16-bit types.
    others = dict(op.libraries) if dtype is BF16 or op.fp32 else {}
    if op.plain is not None and options.device.type == "cuda":
        others["compiled"] = op.through(torch.compile(op.plain, dynamic=False))
        others["eager"] = op.through(op.plain)
    calls = {name: rotating(op.run, arguments)}
    for label, other in others.items():
        try:
            other(*arguments[0])
        except Exception as error:  # a refusal is a result here
            report.leave_out(f"{label} beside {name}, {dtype}: {first_line(error)}")
        else:
            calls[label] = rotating(other, arguments)
    w = inputs[0]
    calls = {"clone": lambda i: inputs[i].clone(), **calls}
    times = in_turns(calls, options.device, options.repeats, len(inputs))
    work = w.numel() * op.moved(w.itemsize)
    return Row(
        name, str(w.dtype).removeprefix("torch."), " x ".join(map(str, w.shape)),
        backend.resolve(w.device), times[name],
        peers={peer: time.ms for peer, time in times.items() if peer != name},
        limit_ms=times["clone"].ms * work / (2 * w.nbytes),
        figures={"GB/s": work / times[name].ms / 1e6, **op.figures},
    )  # fmt: skip


def rotating(function: Callable[..., Any], arguments: list[tuple[Any, ...]]) -> Call:
    """A call of the function with the arguments of buffer number i."""
    return lambda i: function(*arguments[i])
