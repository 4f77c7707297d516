"""A whole optimizer step: `python -m experiments.bench train`.

Each row has the time of a step launched from Python and of the same step replayed from CUDA graphs,
measured in blocks of steps in turns with dense, at a settled clock; FP8 also in turns with dense
FP8. Ratios are taken within such a comparison. If not every step chooses masks, a step that does
has a figure of its own, and its share is included in the judged time.
"""

import argparse
import gc

import torch

from experiments.bench import profile, variants
from experiments.bench.jobs import Workload, jobs
from experiments.bench.report import Report, Row
from experiments.bench.step import Step, gate, held, precision, ready
from experiments.bench.timing import Call, Time, in_turns
from experiments.bench.variants import VARIANTS
from experiments.support.errors import first_line

# The rate of a dense bf16 product of 8192 x 8192 x 8192 on random data after idle time, on an H200.
PEAK_TFLOPS = 790.0
SHARE = f"share of {PEAK_TFLOPS:.0f} TFLOP/s by 6N %"


def bench(options: argparse.Namespace, report: Report) -> None:
    found = jobs(options, report)
    if options.device.type == "cuda":  # so that no row's first step includes the compiler's start
        torch.compile(torch.sin)(torch.ones(1, device=options.device))
    every = dict.fromkeys(name for job in found.values() for name in job.names)
    chosen = variants.chosen(report, every)
    for shape, job in found.items():
        for name in (name for name in job.names if name in chosen):
            with job.around():
                measure(shape, job, name, options, report)


def together(name: str) -> list[str]:
    """The variants that take turns with `name`: dense, with FP8 also dense FP8, and itself."""
    fp8 = ["dense fp8"] if VARIANTS[name].fp8 else []
    return [*dict.fromkeys(["dense", *fp8, name])]


def measure(
    shape: str, job: Workload, name: str, options: argparse.Namespace, report: Report
) -> None:
    """Add the row of one variant on a job; the report says if it does not compile or is wrong."""
    on_gpu = options.device.type == "cuda"
    steps: dict[str, Step] = {}
    memory: dict[str, dict[str, float]] = {}
    calls: dict[str, Call] = {}
    gc.collect()  # or a compiled model of 774M would keep its memory
    try:
        for one in together(name):
            gate(one, job, options.device, options.matmul)
            steps[one] = step = ready(one, job, options.device, options.matmul, options.fused)
            memory[one] = held(step)
            report.note(f"{shape}, {one}: green, {'compiled and ' if on_gpu else ''}warm")
            calls[one] = step.ordinary
        if step.converted.searching:
            calls[f"{name}, masks chosen"] = step.searching
        if on_gpu:
            calls |= captured(shape, steps, report)
        times = in_turns(calls, options.device, options.repeats, graphs=False, steps=True)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # the others are measured
        report.refuse(f"{shape}, {name}: {first_line(error)}")
    else:
        found = {f"{job.unit}/s": 1e3 * job.items / times[name].ms}
        found |= {**figures(name, times, step.converted.searching + 1), **memory[name]}
        own, dense = memory[name], memory["dense"]
        for part in ("trained", "held", *(["peak"] if on_gpu else [])):
            found[f"{part} over dense"] = own[f"{part} MiB"] / dense[f"{part} MiB"]
        if on_gpu:
            weights = sum(p.numel() for p in steps["dense"].parameters)
            found[SHARE] = share_of_peak(6.0 * weights * job.tokens, times[name].ms)
        found["first step s"] = step.first_s
        if options.profile:
            kernels = profile.profiled(step)
            profile.write(options.out, shape, step.name, kernels)
            found |= profile.by_kind(kernels)
        report.add(
            Row(
                name, precision(options.device), shape, step.used, times[name],
                peers={one: times[one].ms for one in steps if one.startswith("dense")},
                figures=found,
            )
        )  # fmt: skip
    finally:
        for step in steps.values():
            step.close()


def captured(shape: str, steps: dict[str, Step], report: Report) -> dict[str, Call]:
    """The steps as calls that replay graphs; the report says which cannot be captured."""
    calls: dict[str, Call] = {}
    pool = torch.cuda.graph_pool_handle()
    for name, step in steps.items():
        try:
            calls[f"{name}, graphs"] = step.capture(pool)
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            torch.cuda.synchronize()
            pool = torch.cuda.graph_pool_handle()  # the failed capture may still hold the old one
            step.optimizer.zero_grad()
            report.leave_out(f"{shape}, {name}, in CUDA graphs: {first_line(error)}")
    return calls


def figures(name: str, times: dict[str, Time], period: int) -> dict[str, float]:
    """The times besides that of an ordinary launched step, and ratios to those of dense."""
    found: dict[str, float] = {}
    launched = times[name].ms
    if search := times.get(f"{name}, masks chosen"):
        found["step, masks chosen ms"] = search.ms
        share = max(0.0, search.ms - launched) / period
        found["step with its share of that ms"] = launched + share
    if replayed := times.get(f"{name}, graphs"):
        found["step in CUDA graphs ms"] = replayed.ms
        found["in graphs p20 ms"], found["in graphs p80 ms"] = replayed.p20, replayed.p80
        if dense := times.get("dense, graphs"):
            found["in graphs, times as fast as dense"] = dense.ms / replayed.ms
        found["launched over graphs"] = launched / replayed.ms
    return found


def share_of_peak(flops: float, ms: float) -> float:
    """`flops` in `ms` milliseconds, in percent of PEAK_TFLOPS."""
    return 100 * flops / ms / 1e9 / PEAK_TFLOPS
