"""Runs a block: `python -m reproduce run BLOCK [minutes=N] [per_gpu=N]`.

Every run is a process of its own, several on each GPU, because one small model does not fill one.
What has a record, in `reproduce/evidence` or in `runs/evidence`, is done. After the time budget no
run is begun, and those that go on are told to stop: they save a checkpoint first.
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

import torch

from reproduce.blocks import EVIDENCE, Block, BlockRun
from reproduce.engine import clock
from reproduce.jobs import quoted

POLL = 0.2  # seconds
PATIENCE = 60.0  # seconds that a run may take to save its checkpoint


@dataclass
class Worker:
    """A run in a process. place: index of its place; log: what it printed."""

    run: BlockRun
    process: subprocess.Popen[bytes]
    place: int
    log: Path
    started: float


def run_block(
    block: Block,
    runs: Path,
    minutes: float | None = None,
    per_gpu: int = 1,
    report: Callable[[str], None] = print,
    committed: Path = EVIDENCE,
) -> bool:
    """Run what has no record yet, seed by seed; whether all runs have one in the end.

    Args:
        minutes: budget; None = until all is done. per_gpu: runs at a time on each GPU, or on the
            CPU where there is none.
        committed: folder of records that other machines made.
    """
    kept = runs / "evidence"
    everything = list(block.runs(runs))
    waiting = []
    for run in everything:
        if run.record(committed, kept) is None and run.keep(kept) is None:
            waiting.append(run)
    gpus: list[str | None] = [str(n) for n in range(torch.cuda.device_count())] or [None]
    places = gpus * per_gpu
    report(
        f"{block.name}: {len(everything)} runs, {len(everything) - len(waiting)} done already; "
        f"{len(places)} at a time"
    )
    begun, total = time.monotonic(), len(waiting)
    deadline = begun + (minutes * 60 if minutes is not None else float("inf"))
    working: dict[int, Worker] = {}
    durations: list[float] = []
    failed: list[str] = []
    try:
        while working or waiting:
            for place, gpu in enumerate(places):
                expected = statistics.median(durations) if durations else 0.0
                if place in working or not waiting or time.monotonic() + expected > deadline:
                    continue
                working[place] = _start(waiting.pop(0), place, gpu, runs, len(places))
            if not working:
                break
            time.sleep(POLL)
            if time.monotonic() > deadline:
                break
            for place in [p for p, w in working.items() if w.process.poll() is not None]:
                worker = working.pop(place)
                seconds = time.monotonic() - worker.started
                record = worker.run.keep(kept)
                if record is None:
                    failed.append(str(worker.run.job))
                    report(f"failed: {worker.run.job}: {_last_line(worker.log)}")
                    continue
                durations.append(seconds)
                done, elapsed = len(durations), time.monotonic() - begun
                left = elapsed / done * (total - done - len(failed))
                report(
                    f"[{done}/{total}] {worker.run.job}: val_loss "
                    f"{record['metrics']['val_loss']:.4f}, {record['step_seconds'] * 1e3:.1f} ms a "
                    f"step, {seconds:.0f} s ({clock(elapsed)} elapsed, about {clock(left)} left)"
                )
    finally:
        _stop(list(working.values()))
    unfinished = [str(worker.run.job) for worker in working.values()]
    if waiting or unfinished:
        report(
            f"{len(waiting) + len(unfinished)} runs are left; start the same command again to go on"
        )
    return not (waiting or unfinished or failed)


def _start(run: BlockRun, place: int, gpu: str | None, runs: Path, places: int) -> Worker:
    log = runs / "evidence" / "logs" / run.file(Path()).with_suffix(".txt").name
    log.parent.mkdir(parents=True, exist_ok=True)
    threads = max(1, (os.cpu_count() or 1) // places)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    module = f"experiments.{run.job.driver}"
    command = [sys.executable, "-m", module, *run.job.overrides, f"runs={quoted(runs)}"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment
        )
    return Worker(run, process, place, log, time.monotonic())


def _stop(workers: list[Worker]) -> None:
    """End what still runs; a run ends its step and saves."""
    for worker in workers:
        worker.process.send_signal(signal.SIGTERM)
    for worker in workers:
        try:
            worker.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            worker.process.kill()


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"
