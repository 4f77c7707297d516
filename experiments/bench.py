"""Benchmarks: `python -m experiments.bench ops|probe`.

A ratio is printed only after every operator has agreed with a plain formulation of it on weights
of the same shapes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import rich.box
import rich.console
import rich.progress
import rich.table
import torch

import common_kernels as ck
from common_kernels import backend
from experiments.checkpoint import write_json
from experiments.errors import UserError
from experiments.results import environment

# The attention and FFN weights of GPT-2 124M: 85 million numbers.
LAYERS = 12
SHAPES = ((2304, 768), (768, 768), (3072, 768), (768, 3072))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.bench", description=__doc__)
    commands = parser.add_subparsers(required=True)
    ops = commands.add_parser("ops", help="every operator against clone() of the same weights")
    ops.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    ops.add_argument("--repeats", type=int, default=7)
    ops.add_argument("--out", type=Path, default=Path("runs/bench/ops.json"))
    ops.set_defaults(command=bench_ops)
    probe = commands.add_parser("probe", help="what this GPU and cuSPARSELt do with 2:4")
    probe.add_argument("--out", type=Path, default=Path("runs/bench/probe.json"))
    probe.set_defaults(command=bench_probe)
    options = parser.parse_args(argv)
    try:
        options.command(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


# --- operators -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Op:
    """An operator, the plain formulation that judges it, and the most clones it may take.

    `prepare` turns a weight into the arguments of `run`; `agrees` sees the weight and the output.
    """

    run: Callable[..., torch.Tensor]
    agrees: Callable[[torch.Tensor, torch.Tensor], bool]
    limit: float | None = None
    prepare: Callable[[torch.Tensor], tuple[torch.Tensor, ...]] = lambda w: (w,)


def groups(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (-1, 4))


def top2(w: torch.Tensor) -> torch.Tensor:
    order = groups(w.abs()).sort(dim=-1, descending=True, stable=True).indices[..., :2]
    return torch.zeros_like(groups(w), dtype=torch.bool).scatter_(-1, order, True).flatten(-2)


def soft(w: torch.Tensor) -> torch.Tensor:
    t = groups(w.abs()).kthvalue(2, -1, keepdim=True).values
    return (groups(w).sign() * (groups(w.abs()) - t).relu()).flatten(-2)


def is_best_tile_mask(w: torch.Tensor, mask: torch.Tensor) -> bool:
    """2:4 both ways, and no pattern retains more, to within the rounding of fp32 sums."""
    bits = torch.cartesian_prod(*[torch.arange(2)] * 16).view(-1, 4, 4)
    patterns = bits[(bits.sum(1) == 2).all(1) & (bits.sum(2) == 2).all(1)].flatten(1).double()
    magnitude, kept = (
        groups(t.double().unflatten(0, (-1, 4))).transpose(1, 2) for t in (w.abs(), mask)
    )
    best = (magnitude.flatten(2) @ patterns.t()).amax(-1)
    legal = (kept.sum(-1) == 2).all() and (kept.sum(-2) == 2).all()
    return bool(legal and ((magnitude * kept).sum((-1, -2)) >= best * (1 - 1e-6)).all())


def is_sample(w: torch.Tensor, out: torch.Tensor) -> bool:
    """Two entries a group, each max(|w|, H) with w's sign; H is half the sum or all but the max."""
    a = groups(w.double().abs())
    total = a.sum(-1, keepdim=True)
    h = torch.minimum(total / 2, total - a.amax(-1, keepdim=True))
    kept = groups(out) != 0
    want = torch.where(kept, groups(w).sign() * torch.maximum(a, h), 0)
    close = torch.isclose(groups(out).double(), want, rtol=1e-5, atol=0)
    return bool((kept.sum(-1) == 2).all() and close.all())


def through_e4m3(w: torch.Tensor) -> torch.Tensor:
    scale = 448 / w.abs().amax()
    return (w * scale).to(torch.float8_e4m3fn).float() / scale


OPS = {
    "nm_mask": Op(ck.nm_mask, lambda w, out: torch.equal(out, top2(w)), limit=1.5),
    "double_prune_mask": Op(
        ck.double_prune_mask,
        lambda w, out: torch.equal(out, top2((w * top2(w)).t()).t()),
        prepare=lambda w: (w * ck.nm_mask(w),),
    ),
    "transposable_mask24": Op(ck.transposable_mask24, is_best_tile_mask, limit=5),
    "soft_threshold24": Op(
        ck.soft_threshold24, lambda w, out: torch.equal(out, soft(w)), limit=2
    ),
    "mvue24": Op(lambda w: ck.mvue24(w, seed=1), is_sample, limit=12),
    "mvue24, dim 0": Op(
        lambda w: ck.mvue24(w, seed=1, dim=0), lambda w, out: is_sample(w.t(), out.t())
    ),
    "masked_decay_": Op(
        lambda grad, w, mask: ck.masked_decay_(grad, w, mask, 0.1),
        lambda w, out: torch.equal(out, 0.1 * w * ~top2(w)),
        prepare=lambda w: (torch.zeros_like(w), w, ck.nm_mask(w)),
    ),
    "fake_fp8": Op(
        lambda w: ck.fake_fp8(w, "e4m3"), lambda w, out: torch.equal(out, through_e4m3(w))
    ),
    "check24": Op(ck.check24, lambda w, out: out.item() == w.numel() // 4),
    "flip_rate": Op(
        ck.flip_rate,
        lambda w, out: out.item() == 1,
        prepare=lambda w: (ck.nm_mask(w), ~ck.nm_mask(w)),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A line of the table. Times are milliseconds for all weights, `memory` is in weights."""

    op: str
    median: float
    p20: float
    p80: float
    clones: float | None = None
    limit: float | None = None
    memory: float | None = None


def weights(layers: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = SHAPES * layers
    return [torch.empty(shape).normal_(std=0.02, generator=generator) for shape in shapes]


def bench_ops(options: argparse.Namespace) -> None:
    """Gate, then memory, then time; the table and the file come at the end."""
    if options.threads < 1 or options.repeats < 2:
        raise UserError("--threads must be at least 1 and --repeats at least 2")
    torch.set_num_threads(options.threads)
    device = torch.device("cpu")
    console = rich.console.Console(stderr=True)
    for name, op in rich.progress.track(OPS.items(), "correctness", console=console):
        for w in weights(layers=1):
            if not op.agrees(w, op.run(*op.prepare(w))):
                raise UserError(
                    f"{name} disagrees with its plain formulation on shape {tuple(w.shape)}: "
                    "no time is reported; run `pytest tests/common_kernels`"
                )
    memory = {
        name: in_fresh_process(peak_memory, name, options.threads)
        for name in rich.progress.track(OPS, "memory", console=console)
    }
    # One matrix, for the allocator recycles what the size of one weight is: only a fresh block of
    # this size costs the same page faults each time, for clone() and operator alike.
    inputs = [torch.cat([w.view(-1, SHAPES[0][1]) for w in weights(LAYERS)])]
    rows = []
    for name, op in rich.progress.track(OPS.items(), "time", console=console):
        clone, timed = time_beside_clone(op, inputs, options.repeats)
        clones = statistics.median(timed) / statistics.median(clone)
        rows.append(Row(name, *quantiles(timed), clones, op.limit, memory[name]))
        rows.append(Row(f"clone beside {name}", *quantiles(clone)))
    print_table(rows, sum(w.numel() for w in inputs), options.threads)
    record = {
        "bench": "ops",
        "device": str(device),
        "backend": backend.resolve(device),
        "weights": sum(w.numel() for w in inputs),
        "dtype": "float32",
        "threads": options.threads,
        "repeats": options.repeats,
        "environment": environment(),
        "rows": [asdict(row) for row in rows],
    }
    write_json(options.out, record)
    console.print(f"written to {options.out}")


def bench_probe(options: argparse.Namespace) -> None:
    if not torch.cuda.is_available():
        raise UserError("probe asks questions of a GPU, and torch sees none here")
    from experiments import probe

    header = {"bench": "probe", "environment": environment()}
    probe.run(lambda record: write_json(options.out, {**header, **record}))
    print(f"written to {options.out}")


def time_beside_clone(
    op: Op, inputs: list[torch.Tensor], repeats: int
) -> tuple[list[float], list[float]]:
    """Milliseconds of `clone()` and of the operator over all weights, in turns, after a warm-up."""
    arguments = [op.prepare(w) for w in inputs]
    clone, timed = [], []
    for _ in range(repeats + 1):
        clone.append(milliseconds(lambda: [w.clone() for w in inputs]))
        timed.append(milliseconds(lambda: [op.run(*args) for args in arguments]))
    return clone[1:], timed[1:]


def milliseconds(run: Callable[[], list[torch.Tensor]]) -> float:
    """The outputs live until the clock has stopped, so all of them pay for fresh memory."""
    start = time.perf_counter()
    outputs = run()
    elapsed = time.perf_counter() - start
    del outputs
    return 1e3 * elapsed


def quantiles(values: list[float]) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile."""
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    return statistics.median(values), fifths[0], fifths[-1]


def peak_memory(name: str, threads: int) -> float:
    """Growth of the peak resident memory while the operator runs over all weights, in weights.

    The outputs are kept, so they count. Meant for a fresh process, whose peak is its present size.
    """
    torch.set_num_threads(threads)
    op, inputs = OPS[name], weights(LAYERS)
    arguments = [op.prepare(w) for w in inputs]
    op.run(*op.prepare(torch.ones(64, 64)))  # what the first call imports is not the operator's
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outputs = [op.run(*args) for args in arguments]
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB on Linux
    del outputs
    return growth * unit / sum(w.nbytes for w in inputs)


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def print_table(rows: list[Row], count: int, threads: int) -> None:
    title = f"{count / 1e6:.0f} million fp32 weights, {threads} threads"
    caption = "ms: median and percentiles; memory: growth of the peak, in weights"
    table = rich.table.Table(title=title, caption=caption, box=rich.box.SIMPLE)
    for column in ("op", "ms", "p20", "p80", "x clone", "limit", "memory"):
        justify: Literal["left", "right"] = "left" if column == "op" else "right"
        table.add_column(column, justify=justify, no_wrap=True, min_width=len(column))
    for row in rows:
        if row.clones is not None:
            cells = (row.median, row.p20, row.p80, row.clones, row.limit, row.memory)
            table.add_row(row.op, *("" if cell is None else f"{cell:.4g}" for cell in cells))
    rich.console.Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
