"""Profile a step by kinds of kernels: `python -m experiments.bench profile --only dense fst`.

The kernel time of an ordinary step by kind, from torch's profiler, and the step's time without the
profiler. On a CPU operators are measured instead of kernels. `RECORD_kernels.json` lists every
kernel with its time and kind.
"""

from __future__ import annotations

import argparse
import gc
from collections import Counter
from typing import Any

import rich.box
import rich.console
import rich.table
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from experiments.bench import kernels, variants
from experiments.bench.jobs import jobs
from experiments.bench.report import Report, Row
from experiments.bench.step import Step, ready
from experiments.bench.timing import in_turns
from experiments.bench.train import comparisons, gate, precision
from experiments.support.checkpoint import write_json

STEPS = 3  # number of profiled steps

Kernels = list[dict[str, Any]]  # name, kind, ms and calls a step


def bench(options: argparse.Namespace, report: Report) -> None:
    found, matmul = jobs(options, report), variants.default_matmul(options)
    every = dict.fromkeys(name for job in found.values() for name in job.names)
    chosen = variants.chosen(report, every)
    written: dict[str, dict[str, Kernels]] = {}
    path = options.out.with_name(f"{options.out.stem}_kernels.json")
    for shape, job in found.items():
        names = [name for name in job.names if name in chosen]
        for group in comparisons(names) if names else ():
            gc.collect()
            with job.around():
                steps = {
                    name: ready(name, job, options.device, matmul, options.fused) for name in group
                }
                for name in group:
                    gate(name, job, options.device, matmul)
                calls = {name: step.ordinary for name, step in steps.items()}
                times = in_turns(calls, options.device, options.repeats, graphs=False, steps=True)
                for name, step in steps.items():
                    if name not in names or name in written.get(shape, {}):
                        continue
                    profile = profiled(step)
                    written.setdefault(shape, {})[name] = profile
                    write_json(path, written)
                    figures = by_kind(profile)
                    if options.device.type == "cuda":
                        figures["without a kernel ms"] = times[name].ms - figures["kernels ms"]
                    report.add(
                        Row(
                            name, precision(options.device), shape, step.used, times[name],
                            peers={"dense": times["dense"].ms}, figures=figures,
                        )
                    )  # fmt: skip
                for step in steps.values():
                    step.close()
    for shape, profiles in written.items():
        print_kinds(shape, profiles)
    report.note(f"every kernel: {path}")


def print_kinds(shape: str, profiles: dict[str, Kernels]) -> None:
    """Print the milliseconds per step of each kind, with a column for each model."""
    table = rich.table.Table("kernels, ms a step", title=shape, box=rich.box.SIMPLE, pad_edge=False)
    columns = [by_kind(profile) for profile in profiles.values()]
    for name in profiles:
        table.add_column(name, justify="right")
    for figure in [*(f"{kind} ms" for kind in kernels.KINDS), "kernels ms"]:
        cells = [f"{figures.get(figure, 0.0):.2f}" for figures in columns]
        table.add_row(figure.removesuffix(" ms"), *cells)
    rich.console.Console().print(table)


def profiled(step: Step) -> Kernels:
    """The kernels of an ordinary step with their times, the longest first; on a CPU the
    operators."""
    on_gpu = step.device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    step.ordinary(0)
    with torch.profiler.profile(activities=[activity]) as profile:
        for _ in range(STEPS):
            step.ordinary(0)
        if on_gpu:
            torch.cuda.synchronize()
    where, time = DeviceType.CUDA if on_gpu else DeviceType.CPU, "device" if on_gpu else "cpu"
    rows = [
        {
            "name": event.key,
            "kind": kernels.kind(event.key),
            "ms": getattr(event, f"self_{time}_time_total") / 1e3 / STEPS,
            "calls": event.count / STEPS,
        }
        for event in profile.key_averages()
        if event.device_type == where and not getattr(event, "is_user_annotation", False)
    ]
    return sorted(rows, key=lambda row: -row["ms"])


def by_kind(profile: Kernels) -> dict[str, float]:
    """The milliseconds of each kind of kernel and in total, and the number of kernels."""
    spent: Counter[str] = Counter()
    for row in profile:
        spent[row["kind"]] += row["ms"]
    return {
        **{f"{kind} ms": spent[kind] for kind in kernels.KINDS if spent[kind]},
        "kernels ms": sum(spent.values()),
        "kernels": sum(row["calls"] for row in profile),
    }
