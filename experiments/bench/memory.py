"""Measure the memory of a linear and of a training step: `python -m experiments.bench memory`.

It is the peak of torch's allocator over whole steps, and the parts that are held between steps. On
a CPU, where there is no such peak, only the parts are measured.
"""

from __future__ import annotations

import argparse
import gc

import torch

from experiments.bench import linear, variants
from experiments.bench.jobs import jobs
from experiments.bench.report import MIB, Report, Row
from experiments.bench.sizes import parts
from experiments.bench.step import held, ready
from experiments.bench.train import precision

NAMES = ("dense", "s_ste", "fst", "slope", variants.REPACKED)
STEPS = 2


def bench(options: argparse.Namespace, report: Report) -> None:
    names, matmul = report.chosen(NAMES), variants.default_matmul(options)
    on_gpu = options.device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    shape = linear.shapes(options)[-1]
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
    for label, job in jobs(options, report).items():
        for name in names:
            with job.around():
                step = ready(name, job, options.device, matmul, options.fused)
                memory = held(step)
            sizes = parts(step.converted, step.optimizer)
            figures = {f"{part} MiB": size / MIB for part, size in sizes.items()}
            report.add(
                Row(
                    name, precision(options.device), label, step.used,
                    figures={**figures, **memory},
                )
            )  # fmt: skip
            step.close()
    if not on_gpu:
        report.leave_out("without a GPU: the peak")
