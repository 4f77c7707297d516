"""Compares the real command with a bare loop: `python -m experiments.bench driver [OVERRIDES]`.

`python -m experiments.pretrain` runs in a separate process with these hydra overrides, once for
each method. Its time is taken between the appearances of records in `metrics.jsonl`, so it includes
data, logging and evaluation. The bare loop has the same model, method and optimizer and always the
same batch; it is timed before and after the command.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from experiments.bench import variants
from experiments.bench.jobs import Built, Workload
from experiments.bench.report import Report, Row
from experiments.bench.step import Step
from experiments.bench.timing import Time, in_turns, quantiles
from experiments.bench.train import SHARE, share_of_peak
from experiments.config.run import RunConfig, load
from experiments.support.errors import UserError
from experiments.training.graphs import choose
from experiments.training.optimization import DTYPES, micro_batch_size
from experiments.training.tracking import read_metrics

NAMES = ("dense", "fst", "s_ste", "slope")
POLL_S = 0.002
COMMAND = (sys.executable, "-m", "experiments.pretrain")

SHORT = ["train.warmup_steps=2", "train.log_every=5", "impl.checkpoint_every=0"]
QUICK = [
    *SHORT, "train.steps=40", "train.batch_size=4", "train.eval_every=15", "train.eval_samples=4",
    "model.n_layer=1",
]  # fmt: skip
CPU = [*SHORT, "train.steps=60", "train.eval_every=20", "train.eval_samples=16"]
# GPT-2 124M on 64 x 1024 tokens per step, evaluated relatively as often as a long training.
GPU = [
    "model=gpt2_124m", "train=gpt2", "train.dtype=bf16", "train.steps=240", "train.batch_size=64",
    "train.warmup_steps=20", "train.log_every=10", "train.eval_every=120", "train.eval_samples=64",
    "impl=gpu", "impl.micro_batch=32", "impl.compile=true", "impl.checkpoint_every=0",
]  # fmt: skip


def bench(options: argparse.Namespace, report: Report) -> None:
    on_gpu = options.device.type == "cuda"
    given = options.overrides or (QUICK if options.quick else GPU if on_gpu else CPU)
    dense: dict[str, float] = {}
    for name in report.chosen(NAMES):
        chosen = variants.VARIANTS[name].options  # as in `train`, so that the phase is the same
        method = [f"method={name}", *(f"method.{key}={value}" for key, value in chosen.items())]
        with tempfile.TemporaryDirectory() as runs:
            here = [f"impl.device={options.device.type}", f"runs='{runs}'"]
            here += [] if on_gpu else [f"impl.threads={options.threads}"]
            overrides = [*given, *method, *here]
            config = load(overrides)
            loop = Loop(name, config, options.device)
            loops = [loop.milliseconds(options)]
            report.note(f"{name}: bare loop {loops[0]:.4g} ms")
            seen = watch(overrides, config.directory())
            step = of_a_step(seen)
            loops.append(Loop(name, config, options.device).milliseconds(options))
            records = [r for r in read_metrics(config.directory() / "metrics.jsonl") if "loss" in r]
        bare = sum(loops) / 2
        report.note(f"{name}: the command {step.ms:.4g} ms, {step.ms / bare - 1:+.1%}")
        if name == "dense":
            dense["dense"] = step.ms
        report.add(
            Row(
                name, config.train.dtype, loop.shape, loop.used, step,
                peers={"bare loop": bare, **dense},
                figures={
                    f"{loop.unit}/s": 1e3 * loop.items / step.ms,
                    "beside the bare loop %": 100 * (step.ms / bare - 1),
                    "bare loop, before ms": loops[0],
                    "bare loop, after ms": loops[1],
                    "step alone ms": 1e3 * median(r["step_seconds"] for r in records[1:]),
                    **({SHARE: share_of_peak(loop.flops, step.ms)} if on_gpu else {}),
                    "first record s": seen[0][1],
                },
            )
        )  # fmt: skip


class Loop(Step):
    """A plain loop over the same batch, with the model, method, micro-batches and optimizer of a
    config. items, unit: number and kind of what a step trains on. flops: operations per step, 6 for
    each parameter and token."""

    def __init__(self, name: str, config: RunConfig, device: torch.device) -> None:
        train, impl = config.train, config.impl
        torch.manual_seed(config.seed)
        model = config.build_model()
        weights = sum(p.numel() for p in model.parameters())
        source = config.open_source(model, device)
        quantizes = config.build_method().capabilities.quantizes
        size = micro_batch_size(train, impl.micro_batch, 1, quantizes)
        parts = [range(i, i + size) for i in range(0, train.batch_size, size)]
        read = source.batches((0, part) for part in parts)
        batches = itertools.cycle([{k: v.to(device) for k, v in b.items()} for b in read])
        tokens = train.batch_size * source.tokens_per_sample
        self.unit, self.flops = source.unit, 6.0 * weights * tokens
        self.items = tokens if source.unit == "tokens" else train.batch_size
        self.shape = f"{config.model_name} on {config.data.name}, {len(parts)} x {size} samples"

        def build() -> Built:
            on_device = model.to(device)
            run: Any = torch.compile(on_device) if impl.compile else on_device
            return on_device, lambda: run(**next(batches))[1] / len(parts), []

        job = Workload(build, size * source.tokens_per_sample, self.items, source.unit, (), (),
                       config.method_options.include)  # fmt: skip
        matmul = impl.matmul if device.type == "cuda" else "dense"
        super().__init__(name, job, device, matmul, impl.optimizer == "fused", DTYPES[train.dtype])
        self.accumulated = len(parts)
        if choose(impl.cuda_graphs, device, 1, model, train, source.one_shape)[0]:
            self.used += "; in CUDA graphs"  # true of the command, not of this loop

    def milliseconds(self, options: argparse.Namespace) -> float:
        """The time of a step. Afterwards the loop's memory is freed, since the command needs the
        whole GPU."""
        calls = {"step": self.next}
        timed = in_turns(calls, self.device, options.repeats, graphs=False, steps=True)
        self.close()
        return timed["step"].ms


def of_a_step(seen: list[tuple[int, float]]) -> Time:
    """Milliseconds per step including data, logging and evaluation, of what `watch` has seen. The
    first quarter is left out, as the run compiles and warms up; percentiles are over entries."""
    counted = seen[max(1, len(seen) // 4) :]
    (first, start), (last, end) = counted[0], counted[-1]
    between = [1e3 * (t - s) / (n - m) for (m, s), (n, t) in itertools.pairwise(counted)]
    return replace(quantiles(between), ms=1e3 * (end - start) / (last - first))


def watch(overrides: list[str], directory: Path) -> list[tuple[int, float]]:
    """Run the command to its end, and return (step, seconds from the start) of each log entry with
    a loss. Raises a `UserError` with the command's last line if it fails."""
    command = [*COMMAND, *overrides]
    path, lines, losses = directory / "metrics.jsonl", 0, []
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        try:
            running = True
            while running:
                running = process.poll() is None
                whole = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
                now = time.perf_counter() - start
                new = [json.loads(line) for line in whole[lines:]]
                losses += [(record["step"], now) for record in new if "loss" in record]
                lines = len(whole)
                time.sleep(POLL_S)
        finally:
            process.kill()
            process.wait()
        said.seek(0)
        if process.returncode:
            last = said.read().strip().splitlines()[-1:]
            raise UserError(f"{shlex.join(command[1:])} failed: {''.join(last)}")
    return losses
