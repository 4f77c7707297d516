"""Runs a block: `python -m reproduce run BLOCK [minutes=N] [per_gpu=N]`.

Every run is a separate process, several on each GPU, because one small model does not fill a GPU. A
run is done if it has a record in `reproduce/evidence` or `runs/evidence`. A run from which others
start is trained before them if its weights are missing, even if it has a record. After the time
budget no run is started, and running ones are told to stop, which save a checkpoint first.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.data.manifest import DataConfig
from experiments.data.prepare import prepare
from experiments.images.dataset import load_images
from experiments.support.errors import UserError
from reproduce.blocks import EVIDENCE, Block, BlockRun
from reproduce.engine import clock, needs_gpu
from reproduce.jobs import quoted

POLL = 0.2  # seconds
PATIENCE = 60.0  # seconds that a run may take to save its checkpoint
SCORES = ("val_top1", "knn_top1", "linear_top1")  # percent, for runs on images


@dataclass
class Worker:
    """A process that trains. runs: the runs that it makes, all with the same config. log: the file
    with its output."""

    runs: list[BlockRun]
    process: subprocess.Popen[bytes]
    log: Path
    started: float

    def __str__(self) -> str:
        return " = ".join(str(run.job) for run in self.runs)


def run_block(
    block: Block,
    runs: Path,
    minutes: float | None = None,
    per_gpu: int = 1,
    report: Callable[[str], None] = print,
    committed: Path = EVIDENCE,
) -> bool:
    """Run everything that has no record yet, seed by seed; return True if all runs have a record in
    the end.

    Args:
        minutes: time budget; None = until all is done.
        per_gpu: simultaneous runs on each GPU, or on the CPU if there is no GPU.
        committed: folder of committed records.

    Raises:
        UserError: overrides that do not fit together, no GPU, or data that cannot be prepared.
    """
    kept = runs / "evidence"
    everything = list(block.runs(runs))
    waiting = _missing(everything, committed, kept)
    sources = {first.source for first, *_ in waiting if first.source is not None}
    ahead = {first for first, *_ in waiting if first in sources}  # runs that start there wait
    total = sum(map(len, waiting))
    gpus = visible_gpus() or [None]
    places = gpus * per_gpu
    report(
        f"{block.name}: {len(everything)} runs, {len(everything) + len(ahead) - total} done "
        f"already; {len(places)} at a time"
    )
    if block.source is not None and ahead:
        report(f"before them {len(ahead)} of block {block.source.block.name}, where they start")
    configs = [first.config for first, *_ in waiting]
    if needs_gpu(configs):
        raise UserError(f"block {block.name} needs a GPU, and torch sees none here")
    for data in {config.data for config in configs}:
        if isinstance(data, DataConfig):
            prepare(data)  # once here instead of in every process
        else:
            load_images(data)  # raises an error if they are missing
    begun = time.monotonic()
    deadline = begun + (minutes * 60 if minutes is not None else float("inf"))
    working: dict[int, Worker] = {}
    durations: list[float] = []
    done, failed = 0, 0
    try:
        while time.monotonic() < deadline:
            expected = statistics.median(durations) if durations else 0.0
            for place, gpu in enumerate(places):
                ready = [training for training in waiting if training[0].source not in ahead]
                if place not in working and ready and time.monotonic() + expected < deadline:
                    waiting.remove(ready[0])
                    working[place] = _start(ready[0], gpu, runs, len(places))
            if not working:
                break
            time.sleep(POLL)
            for place in [p for p, w in working.items() if w.process.poll() is not None]:
                worker = working.pop(place)
                first, seconds = worker.runs[0], time.monotonic() - worker.started
                result = first.job.result()
                if result is None or not all(_ended(r, committed, kept) for r in worker.runs):
                    left_out = [training for training in waiting if training[0].source == first]
                    waiting = [training for training in waiting if training not in left_out]
                    failed += len(worker.runs) + sum(map(len, left_out))
                    report(f"failed: {worker}: {_reason(worker)}")
                    if left_out:
                        report(f"left out: {sum(map(len, left_out))} runs that start there")
                    continue
                ahead.discard(first)
                done += len(worker.runs)
                durations.append(seconds)
                elapsed = time.monotonic() - begun
                left = elapsed / done * (total - done - failed)
                report(
                    f"[{done}/{total}] {worker}: {_figures(result)}, {seconds:.0f} s "
                    f"({clock(elapsed)} elapsed, about {clock(left)} left)"
                )
    finally:
        _stop(list(working.values()))
        for worker in working.values():  # a stopped one may have finished
            done += sum(_ended(run, committed, kept) for run in worker.runs)
    if left_over := total - done - failed:
        report(f"{left_over} runs are left; start the same command again to go on")
    return done == total


def _missing(everything: list[BlockRun], committed: Path, kept: Path) -> list[list[BlockRun]]:
    """The trainings to do, in order, each as a list of the runs that it makes: arms with the same
    config share a training. A source whose weights are missing comes before runs that start from
    it."""
    trainings: dict[str, list[BlockRun]] = {}
    for run in everything:
        if run.record(committed, kept) is None and run.keep(kept) is None:
            if run.source is not None and not _ended(run.source, committed, kept):
                trainings.setdefault(run.source.digest(), [run.source])
            trainings.setdefault(run.digest(), []).append(run)
    return list(trainings.values())


def _ended(run: BlockRun, committed: Path, kept: Path) -> bool:
    """True if a run is finished and its weights are here. Its record is saved, unless there is one
    already (for a source that was made again)."""
    if run.job.result() is None:
        return False
    return (run.record(committed, kept) or run.keep(kept)) is not None


def visible_gpus() -> list[str | None]:
    """The names of the GPUs that this process may use, as in CUDA_VISIBLE_DEVICES. CUDA is not
    initialised for this, since it would take memory on each GPU."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    count = torch.cuda.device_count()
    return [*names[:count]] if names[0] else [str(number) for number in range(count)]


def command(run: BlockRun, runs: Path) -> list[str]:
    """The command line that makes a run, in words."""
    module = f"experiments.{run.job.driver}"
    init = [] if run.source is None else [f"init={quoted(run.source.config.directory())}"]
    return [sys.executable, "-m", module, *run.job.overrides, f"runs={quoted(runs)}", *init]


def _start(training: list[BlockRun], gpu: str | None, runs: Path, places: int) -> Worker:
    first = training[0]
    log = first.file(runs / "evidence" / "logs").with_suffix(".txt")
    log.parent.mkdir(parents=True, exist_ok=True)
    threads = max(1, (os.cpu_count() or 1) // places)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    with log.open("wb") as file:
        process = subprocess.Popen(
            command(first, runs),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=environment,
            # A separate session, so that Ctrl-C does not reach the run: our SIGTERM would be its
            # second signal and end it before it has saved.
            start_new_session=True,
        )
    return Worker(training, process, log, time.monotonic())


def _stop(workers: list[Worker]) -> None:
    """Terminate the running processes; each finishes its step and saves a checkpoint."""
    for worker in workers:
        worker.process.terminate()
    deadline = time.monotonic() + PATIENCE
    for worker in workers:
        try:
            worker.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()


def _figures(record: dict[str, Any]) -> str:
    metrics = record["metrics"]
    loss = metrics.get("val_loss")
    told = ["val_loss is not finite" if loss is None else f"val_loss {loss:.4f}"]
    told += [f"{name} {metrics[name]:.2f}" for name in SCORES if name in metrics]
    return ", ".join([*told, f"{record['step_seconds'] * 1e3:.1f} ms a step"])


def _reason(worker: Worker) -> str:
    """The reason why a process failed, in one line."""
    status = worker.process.returncode
    if status < 0:
        return f"it was ended by {signal.Signals(-status).name}; see {worker.log}"
    return f"{last_line(worker.log)} (see {worker.log})"


def last_line(log: Path) -> str:
    """The last line of a process's output that is not empty."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it printed nothing"
