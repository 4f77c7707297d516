"""A step on several GPUs: `torchrun --nproc_per_node=2 -m experiments.bench ranks`.

Every rank has a whole batch, the same one, under DDP or FSDP2. Blocks are compiled one by one and
then sharded, as torchtitan does, and FSDP2 gathers weights in bf16 and sums gradients in fp32.
Rows are measured one after the other in one run; their peer is dense training of the same kind.
Without torchrun the rows are those of one GPU alone.
"""

import argparse
import itertools
import math
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from experiments.bench import profile, variants
from experiments.bench.jobs import Workload, gpt2
from experiments.bench.loop import llama
from experiments.bench.report import Report, Row
from experiments.bench.step import Step, gate, precision
from experiments.bench.timing import Time, quantiles, read_load
from experiments.support.errors import UserError
from experiments.training.blocks import blocks
from experiments.training.distributed import World, world
from methods.nn import sharding

ALONE, DDP, FSDP2 = "alone", "ddp", "fsdp2"
METHODS = ("dense", "fst", "s_ste", "slope")
ON_UNITS = "fst, fp8"  # FP8 units need whole weights
GIB = 2**30
WARM_UP, PROFILED = 5, 2  # steps; on a CPU one


def places(options: argparse.Namespace, ranks: int) -> dict[tuple[str, str], Workload]:
    """The models that fit this device, by shape and by how the ranks share them. With whole weights
    LLaMA has its 26 blocks only where they and their optimizer leave room for 8 x 1024 tokens."""
    found: dict[tuple[str, str], Workload] = {}
    for kind in (FSDP2, DDP) if ranks > 1 else (ALONE,):
        if options.quick or options.device.type == "cpu":
            shape, job = llama(2, 64, 128, 320, (2, 32))
            jobs = {"GPT-2 nano, 2 x 32": gpt2("nano", 2, 32)}
        else:
            large = torch.cuda.get_device_properties(options.device).total_memory > 100 * GIB
            layers = 26 if kind == FSDP2 or large else 16
            shape, job = llama(layers, 3200, 8640, 32000, (8, 1024))
            jobs = {"GPT-2 774M, 16 x 1024": gpt2("774M", 16, 1024)}
        jobs = {shape: replace(job, include="ffn"), **jobs}
        found |= {(shape, kind): job for shape, job in jobs.items()}
    return dict(sorted(found.items(), key=lambda place: place[0][0], reverse=True))


def bench(options: argparse.Namespace, report: Report) -> None:
    with world(options.device.type) as here:
        options.device = here.device
        rows = {
            f"{name}, {kind}, {shape}": (name, kind, shape, job)
            for (shape, kind), job in places(options, here.size).items()
            for name in (METHODS if kind == FSDP2 else (*METHODS, ON_UNITS))
        }
        dense: dict[tuple[str, str], dict[str, float]] = {}
        for row in report.chosen(rows):
            name, kind, shape, job = rows[row]
            start = time.perf_counter()
            found, took = measure(name, kind, shape, job, options, here)
            if name == "dense":
                dense[shape, kind] = {"dense": took.ms}
            peers = dense.get((shape, kind), {})
            report.add(replace(found, time=took, peers=peers))
            figures = [f"{ms / took.ms:.3f} times as fast as dense" for ms in peers.values()]
            figures += [f"{figure} {value:,.4g}" for figure, value in found.figures.items()]
            seconds = time.perf_counter() - start
            report.note(f"  {'; '.join(figures)}; {found.backend}; measured in {seconds:.0f} s")


class Trained(nn.Module):
    """A model whose `forward` returns the loss of its batch, so that DDP and FSDP2 can wrap it."""

    def __init__(self, model: nn.Module, loss: Any) -> None:
        super().__init__()
        self.model, self.loss_of_batch = model, loss

    def forward(self, _: None) -> Tensor:
        return self.loss_of_batch()


class Shared(Step):
    """The step of a rank."""

    def __init__(self, name: str, kind: str, job: Workload, matmul: str, here: World) -> None:
        self.kind, self.here = kind, here
        super().__init__(name, job, here.device, matmul, fused=name != "dense")

    def distribute(self) -> None:
        for block in self.blocks if self.device.type == "cuda" else ():
            block.compile()
        whole: Any = Trained(self.model, self.forward)
        if self.kind == FSDP2:
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            mesh = dist.init_device_mesh(self.device.type, (self.here.size,))
            narrow = torch.bfloat16 if self.device.type == "cuda" else None
            policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32)
            for part in (*blocks(self.model).values(), whole):
                fully_shard(part, mesh=mesh, mp_policy=policy)
        elif self.kind == DDP:
            whole = DistributedDataParallel(whole, init_sync=False, gradient_as_bucket_view=True)
            whole.broadcast_buffers = False  # as experiments/training/optimization.py
        self.forward = partial(whole, None)  # FSDP2 on a GPU fails without an argument

    def clip(self) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = sharding.full(torch.nn.utils.get_total_norm(gradients))
        torch.nn.utils.clip_grads_with_norm_(self.parameters, 1.0, norm)


def measure(
    name: str, kind: str, shape: str, job: Workload, options: argparse.Namespace, here: World
) -> tuple[Row, Time]:
    """The row of a method, and its time. Raises a `UserError` if products or weights are wrong."""
    row = f"{name}, {kind}"
    on_gpu = here.device.type == "cuda"
    gate(name, job, here.device, options.matmul)
    begun = time.perf_counter()
    # A block under DDP is compiled as a whole: its gradients are sent while others are computed.
    patched = torch._dynamo.config.patch(optimize_ddp=False) if on_gpu else nullcontext()
    with patched, variants.compiling() if on_gpu else nullcontext():
        step = Shared(name, kind, job, options.matmul, here)
        step.ordinary()
        step.wait()
        first_s = time.perf_counter() - begun
        for _ in range(WARM_UP if on_gpu else 1):
            step.ordinary()
        times, figures = timed(step, options.repeats)
        figures |= profiled(step, row, shape, options)
    parameters = sum(p.numel() for p in step.parameters)  # of a DTensor the whole
    figures |= {"first step s": first_s, "parameters M": parameters / 1e6}
    check(step, row)
    used = f"{step.used}; {here.size} x {kind}"
    step.close()
    figures = {f"{job.unit}/s per GPU": 1e3 * job.items / times.ms, **figures}
    return Row(row, precision(here.device), shape, used, figures=figures), times


def timed(step: Shared, steps: int) -> tuple[Time, dict[str, float]]:
    """The times of this many steps, launched without waiting for the device between them."""
    on_gpu, figures = step.device.type == "cuda", {}
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    step.wait()
    start = time.perf_counter()
    step.ordinary()
    host = 1e3 * (time.perf_counter() - start)  # from an idle device on
    step.wait()
    marks, load = [mark(on_gpu)], None
    for number in range(steps):
        if on_gpu and number == steps // 2:
            load = read_load()
        step.ordinary()
        marks.append(mark(on_gpu))
    step.wait()
    pairs = itertools.pairwise(marks)
    samples = [a.elapsed_time(b) if on_gpu else 1e3 * (b - a) for a, b in pairs]
    if on_gpu:
        figures["peak GiB"] = max(step.here.all_gather(torch.cuda.max_memory_allocated() / GIB))
    found = quantiles(samples, "events" if on_gpu else "host", load)
    figures |= {"min ms": min(samples), "max ms": max(samples), "host ms": host}
    return found, figures


def mark(on_gpu: bool) -> Any:
    """The time now; on a GPU an event behind the work that was launched."""
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def profiled(step: Shared, row: str, shape: str, options: argparse.Namespace) -> dict[str, float]:
    """The times of NCCL's and of all other kernels in a step, of rank 0, which
    `<record>_kernels.json` lists."""
    kernels = profile.profiled(step, PROFILED if step.device.type == "cuda" else 1)
    found = profile.by_kind(kernels)
    nccl = sum(one["ms"] for one in kernels if "nccl" in one["name"].lower())
    if step.here.is_main:
        profile.write(options.out, shape, row, kernels)
    return {"NCCL ms": nccl, "other kernels ms": found["kernels ms"] - nccl,
            "kernels": found["kernels"]}  # fmt: skip


def check(step: Shared, row: str) -> None:
    """Raise a `UserError` unless the loss is finite, and under DDP all ranks' weights equal."""
    loss, weights = float(step.loss().detach()), [0.0]
    if step.kind == DDP:
        weights = [float(p.detach().double().sum()) for p in step.parameters[:8]]
    every = step.here.all_gather(weights)
    if not math.isfinite(loss) or any(own != weights for own in every):
        raise UserError(f"{row}: the loss is {loss:.4g}, or the ranks' weights differ: {every}")
