"""Benchmarks: `python -m experiments.bench linear --only ste`.

Results are first compared with a plain formulation on the same shapes; no time
is printed unless they agree. All benchmarks of a device go into one
record, from which `report` makes a table.
"""

import argparse
import importlib
import os
import re
import sys
from pathlib import Path

import torch

from experiments.bench.report import Report, markdown, provenance, read_record
from experiments.bench.timing import allow_repeated_steps
from experiments.support.checkpoint import write_text
from experiments.support.errors import UserError, exit_status

BENCHMARKS = {
    "ops": "every operator, compared with a copy",
    "linear": "forward and backward of one linear with each method and dense",
    "train": "a whole optimizer step of GPT-2, wide blocks, ViT and SAM's encoder",
    "loop": "a user's own loop with transformers' LLaMA, and the host alone",
    "ranks": "a step on several GPUs with DDP and FSDP2, started by torchrun",
    "decode": "a product with few tokens, 2:4 and dense",
    "serve": "prefill and generation of a LLaMA with packed 2:4 weights and dense ones",
}


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    after_stop = "begins this benchmark anew; finished ones are kept"
    return exit_status(lambda: options.command(options) or 0, after_stop)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, text in BENCHMARKS.items():
        command = commands.add_parser(name, help=text)
        add = command.add_argument
        add("--device", choices=("cpu", "cuda"), help="default: cuda if available")
        add("--threads", type=int, default=min(2, os.cpu_count() or 1))
        add("--repeats", type=int, default=7)
        add("--only", nargs="+", default=["*"], help="globs on the names of rows")
        add("--out", type=Path, help="record; default: runs/bench/DEVICE.json")
        add("--revision", help="revision of the code, if this is no git checkout")
        add("--quick", action="store_true", help="tiny shapes, as a quick check")
        if name == "loop":
            missing = "only rows that the record does not have yet from this revision of the code"
            add("--missing", action="store_true", help=missing)
        elif name == "linear":
            own = "shapes of your own in place of the usual ones"
            add("--shapes", nargs="+", default=[], type=shape, metavar="IN,OUT,TOKENS", help=own)
        elif name == "train":
            add("--shapes", nargs="+", default=["*"], help="globs on the shapes of rows")
            fused = "use methods.FusedAdamW instead of torch's fused AdamW"
            add("--fused", action="store_true", help=fused)
            kinds = "also the kernel time by kind: products, sampling, packing, attention, ..."
            add("--profile", action="store_true", help=kinds)
        elif name == "serve":
            known, sizes = ("1.1B", "7B"), "sizes of the models, on a GPU"
            add("--size", nargs="+", choices=known, default=["1.1B"], help=sizes)
            more = "also measured limits, which takes minutes"
            add("--thorough", action="store_true", help=more)
        if name in ("loop", "linear", "train", "ranks"):
            by = "products of the methods; default: auto on a GPU, dense elsewhere"
            add("--matmul", choices=("dense", "cusparselt", "cuda", "auto"), help=by)
        command.set_defaults(command=run, benchmark=name)
    report = commands.add_parser("report", help="write RECORD.md")
    report.add_argument("record", type=Path)
    report.set_defaults(command=run_report)
    return parser


def shape(text: str) -> tuple[int, int, int]:
    """The shape of `linear` (tokens, in, out) that IN,OUT,TOKENS names."""
    inputs, outputs, tokens = map(int, text.split(","))
    if min(inputs, outputs, tokens) < 1 or inputs % 4 or outputs % 4:
        raise argparse.ArgumentTypeError(f"{text}: IN and OUT must be multiples of 4, above 0")
    return tokens, inputs, outputs


def run(options: argparse.Namespace) -> None:
    if options.threads < 1 or options.repeats < 2:
        raise UserError("--threads must be at least 1 and --repeats at least 2")
    there = torch.cuda.is_available()
    if options.device == "cuda" and not there:
        raise UserError("--device cuda: torch sees no GPU here; leave it out for the CPU's rows")
    options.device = torch.device(options.device or ("cuda" if there else "cpu"))
    if getattr(options, "matmul", "") is None:
        options.matmul = "auto" if options.device.type == "cuda" else "dense"
    torch.set_num_threads(options.threads)
    allow_repeated_steps()
    if options.out is None:
        device = provenance(options.device, None)["device"]
        name = "cpu" if options.device.type == "cpu" else re.sub(r"\W+", "-", device.lower())
        options.out = Path("runs", "bench", f"{name}.json")
    parts = {*options.only, *getattr(options, "shapes", [])}
    whole = parts == {"*"} and not getattr(options, "missing", False)
    of = options.benchmark, options.device, options.out, options.only, options.revision
    report = Report(*of, whole, silent=os.environ.get("RANK", "0") != "0")
    importlib.import_module(f"experiments.bench.{options.benchmark}").bench(options, report)
    report.finish()
    if report.refused:
        raise UserError("; ".join(report.refused))


def run_report(options: argparse.Namespace) -> None:
    table = options.record.with_suffix(".md")
    write_text(table, markdown(read_record(options.record)))
    print(f"written to {table}")


if __name__ == "__main__":
    sys.exit(main())
