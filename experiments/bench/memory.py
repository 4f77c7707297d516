"""Measure the memory of a linear and of a training step: `python -m experiments.bench memory`.

The peak of torch's allocator over whole steps, and the parts that stay from step to step. A CPU
has no such peak: there the parts stand alone.
"""

from __future__ import annotations

import argparse
import gc

import torch
from torch import nn

from experiments.bench import arms, linear, train
from experiments.bench.arms import Converted
from experiments.bench.report import MIB, Report, Row

STEPS = 2


def bench(options: argparse.Namespace, report: Report) -> None:
    names, matmul = report.chosen(train.NAMES), arms.default_matmul(options)
    on_gpu = options.device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    shape = (linear.GPU_SHAPES if on_gpu else linear.CPU_SHAPES)[-1]
    for name in names:
        gc.collect()
        before = torch.cuda.memory_allocated() if on_gpu else 0
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        built = linear.build(name, shape, dtype, options.device, matmul, 1)
        for _ in range(STEPS):
            built.whole(0)
        figures = {f"{part} MiB": size / MIB for part, size in parts(built.converted).items()}
        if on_gpu:
            figures["peak MiB"] = (torch.cuda.max_memory_allocated() - before) / MIB
        report.add(
            Row(
                name, str(dtype).removeprefix("torch."), f"linear {linear.shape_name(shape)}",
                built.converted.used, figures=figures,
            )
        )  # fmt: skip
        del built
    for label, job in train.jobs(options, report).items():
        for name in names:
            step = train.ready(name, job, options.device, matmul)
            peak = train.peak(step)
            sizes = parts(step.converted, step.optimizer)
            figures = {f"{part} MiB": size / MIB for part, size in sizes.items()}
            report.add(
                Row(
                    name, train.precision(options.device), label, step.converted.used,
                    figures={**figures, **peak},
                )
            )  # fmt: skip
            step.close()
    if not on_gpu:
        report.leave_out("without a GPU: the peak")


def parts(converted: Converted, optimizer: torch.optim.Optimizer | None = None) -> dict[str, int]:
    """Bytes of what stays: parameters (their gradients take the same), the state of the optimizer,
    and in the converted layers masks, packed operands and dense ones."""
    sizes = {"weights": sum(p.nbytes for p in converted.model.parameters())}
    if optimizer is not None:
        state = [t for s in optimizer.state.values() for t in s.values()]
        sizes["optimizer"] = sum(t.nbytes for t in state if isinstance(t, torch.Tensor))
    for kind in ("masks", "packed", "operands"):
        sizes[kind] = sum(size(layer, kind) for layer in converted.layers.values())
    return sizes


def size(layer: nn.Module, kind: str) -> int:
    """Bytes of the buffers of this kind."""
    total = 0
    for name, buffer in layer.named_buffers():
        is_mask = buffer.dtype in (torch.bool, torch.uint8)
        found = "masks" if is_mask else "packed" if name.startswith("packed") else "operands"
        total += buffer.nbytes if found == kind else 0
    return total
