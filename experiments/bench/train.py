"""A whole optimizer step: `python -m experiments.bench train`.

Each row has the time of a step launched from Python and of the same step replayed from CUDA graphs,
measured in blocks of steps in turns with dense, at a settled clock. FP8 is also compared with dense
FP8. Only a few models fit on a GPU at once, so each comparison has its own dense model, and ratios
are taken within a comparison. If not every step chooses masks, a step that does has a figure of its
own, and its share is included in the judged time.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Iterator
from pathlib import Path

import torch

from experiments.bench import linear, profile, variants
from experiments.bench.jobs import Workload, jobs
from experiments.bench.report import MIB, Report, Row
from experiments.bench.step import Step, held, ready
from experiments.bench.timing import Call, Time, in_turns
from experiments.bench.variants import VARIANTS
from experiments.support.checkpoint import write_json
from experiments.support.errors import UserError

TOGETHER = 5  # number of models held at once, if they fit
PACKED = 1.1  # what a model holds, over its weights, gradients and moments
FP8_PEERS = ("dense fp8", variants.TORCHAO)
# The rate of a dense bf16 product of 8192 x 8192 x 8192 on random data after idle time, on an H200.
PEAK_TFLOPS = 790.0
SHARE = f"share of {PEAK_TFLOPS:.0f} TFLOP/s by 6N %"


def bench(options: argparse.Namespace, report: Report) -> None:
    found, matmul = jobs(options, report), variants.default_matmul(options)
    if options.device.type == "cuda":  # so that no row's first step includes the compiler's start
        torch.compile(torch.sin)(torch.ones(1, device=options.device))
    every = dict.fromkeys(name for job in found.values() for name in job.names)
    chosen = variants.chosen(report, every)
    for shape, job in found.items():
        names = [name for name in job.names if name in chosen]
        if not names:
            continue
        with job.around():
            try:
                measure(shape, job, names, matmul, options, report)
            except torch.cuda.OutOfMemoryError as error:
                raise UserError(
                    f"{shape}: {', '.join(names)} together do not fit this GPU's memory; choose "
                    "fewer with --only"
                ) from error


def comparisons(names: list[str], together: int = TOGETHER) -> Iterator[list[str]]:
    """Yield `names` in groups of at most `together`, each with `dense`, and groups with FP8 also
    with those of the dense FP8 among the names for which there is room."""
    peers = [name for name in FP8_PEERS if name in names]
    groups = []
    for common, fp8 in (["dense"], False), (["dense", *peers][: together - 1], True):
        others = [n for n in names if n not in common and bool(VARIANTS[n].fp8) is fp8]
        room = together - len(common)
        parts = [others[i : i + room] for i in range(0, len(others), room)]
        groups += [[*common, *part] for part in parts or [[]]]
    larger = [group for group in groups if len(group) > 1]
    yield from larger or [["dense"]]


def together(job: Workload, matmul: str, options: argparse.Namespace) -> int:
    """The number of models that fit on the device at once, by the memory that dense takes. Its
    temporaries count twice, as those of launched steps and as those of graphs."""
    if options.device.type == "cpu":
        return TOGETHER
    step = ready("dense", job, options.device, matmul, options.fused)
    figures = held(step)
    step.close()
    trained = figures["trained MiB"]
    room = torch.cuda.mem_get_info()[0] / MIB - 2 * (figures["peak MiB"] - trained)
    return max(2, min(TOGETHER, int(room / (PACKED * trained))))


def measure(
    shape: str,
    job: Workload,
    names: list[str],
    matmul: str,
    options: argparse.Namespace,
    report: Report,
) -> None:
    """The rows of a job."""
    done: set[str] = set()
    for group in comparisons(names, together(job, matmul, options)):
        # Collect garbage first, or a compiled model of 774M would keep its memory.
        gc.collect()
        for row in compared(shape, job, group, matmul, options, report):
            if row.name in names and row.name not in done:
                report.add(row)
                done.add(row.name)


def compared(
    shape: str,
    job: Workload,
    names: list[str],
    matmul: str,
    options: argparse.Namespace,
    report: Report,
) -> list[Row]:
    """The rows of models that are held at the same time; the first is dense."""
    on_gpu = options.device.type == "cuda"
    steps: dict[str, Step] = {}
    memory: dict[str, dict[str, float]] = {}
    calls: dict[str, Call] = {}
    for name in list(names):
        try:
            steps[name] = step = ready(name, job, options.device, matmul, options.fused)
            gate(name, job, options.device, matmul)
        except Exception as error:
            # If torch cannot compile one model, or its result is wrong, measure the others.
            if name == "dense" or isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            steps.pop(name, None)
            names.remove(name)
            report.refuse(f"{shape}, {name}: {type(error).__name__}: {first_line(error)}")
            continue
        memory[name] = held(step)
        report.note(f"{shape}, {name}: green, {'compiled and ' if on_gpu else ''}warm")
        calls[name] = step.ordinary
        if step.converted.searching:
            calls[f"{name}, masks chosen"] = step.searching
    if on_gpu:
        calls |= captured(shape, steps, report)
    times = in_turns(calls, options.device, options.repeats, graphs=False, steps=True)
    dense = steps["dense"]
    weights = sum(p.numel() for p in dense.parameters)
    rows = []
    for name, step in steps.items():
        period = step.converted.searching + 1
        found = figures(name, times, period)
        found = {f"{job.unit}/s": 1e3 * job.items / times[name].ms, **found, **memory[name]}
        for part in ("trained", "held", *(["peak"] if on_gpu else [])):
            key = f"{part} MiB"
            found[f"{part} over dense"] = memory[name][key] / memory["dense"][key]
        if on_gpu:
            found[SHARE] = share_of_peak(6.0 * weights * job.tokens, times[name].ms)
        found["first step s"] = step.first_s
        if options.profile:
            found |= profile_into(options.out, shape, step)
        peers = {p: times[p].ms for p in names if p == "dense" or p in FP8_PEERS}
        rows.append(
            Row(
                name, precision(options.device), shape, step.used, times[name],
                peers=peers, figures=found,
            )
        )  # fmt: skip
    for step in steps.values():
        step.close()
    return rows


def profile_into(out: Path, shape: str, step: Step) -> dict[str, float]:
    """The kernel time of a step by kind; `<record>_kernels.json` lists every kernel."""
    path, found = out.with_name(f"{out.stem}_kernels.json"), profile.profiled(step)
    written = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    written.setdefault(shape, {})[step.name] = found
    write_json(path, written)
    return profile.by_kind(found)


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


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


def figures(name: str, times: dict[str, Time], period: int) -> dict[str, float]:
    """The times besides that of an ordinary launched step, and ratios to those of dense.

    period: every this many steps one chooses masks.
    """
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


def precision(device: torch.device) -> str:
    return "bfloat16 autocast" if device.type == "cuda" else "float32"


def gate(name: str, job: Workload, device: torch.device, matmul: str) -> None:
    """Raise a `UserError` if the products of a linear of the model are wrong."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for widths in job.linears:
        linear.gate(name, (job.tokens, *widths), dtype, device, matmul)
