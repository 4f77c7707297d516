"""The command line of tables, blocks, claims and the report: `python -m reproduce --help`.

Trains what is missing and writes `runs/tables/<name>-<tier>` as .md, .csv, -runs.csv and .png.
Exit status: 0 if every cell of the tier exists, 1 if not, 2 for arguments that mean nothing.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from experiments.support.errors import Terminated, UserError, raise_on_sigterm
from reproduce import coverage, smoke_tasks
from reproduce.reading import TABLES, read_tables
from reproduce.spec import TIERS, Table

RUNS = Path("runs")
USAGE = """\
python -m reproduce quickstart
    every method against dense training, on a CPU
python -m reproduce table2 [paper=NAME] [tier=smoke|mini|full]
    Table 2 of every paper that has one, or of one; likewise table1 to table10,
    tableB2, figure4, figure7; mini shows what the blocks have measured
python -m reproduce run BLOCK [minutes=N] [per_gpu=N]
    the many small runs that claims are judged by, on all GPUs; the blocks are
    in reproduce/blocks
python -m reproduce claims
    the papers' claims with their verdicts, from the runs of the blocks and the
    measured speeds; also written to runs/report
python -m reproduce report [figure=FILE]
    one page of all results, runs/report/index.html; or the main figure of the
    committed ones alone, as SVG
python -m reproduce --list
    every table of every paper: tiers, what they need, what has been run, and
    which are not covered"""


class UsageError(UserError):
    """An error in the arguments: they ask for something that does not exist."""


@dataclass(frozen=True)
class Request:
    """The tables and the tier that the command line asks for."""

    tables: list[Table]
    tier: str


def parse(arguments: list[str], tables: list[Table]) -> Request:
    """The tables and the tier that the arguments name. Raises `UsageError`, in one line, if there
    are none."""
    command, *options = arguments
    chosen = [table for table in tables if table.command == command]
    if not chosen:
        names = {table.command for table in tables}
        known = ", ".join(sorted(names, key=lambda name: (len(name), name)))
        raise UsageError(f"no table {command!r}; there are {known} (and --list, --help)")
    given: dict[str, str] = {}
    for option in options:
        key, _, value = option.partition("=")
        if key not in ("paper", "tier") or not value or key in given:
            raise UsageError(f"cannot use {option!r}; use paper=NAME and tier=TIER, each once")
        given[key] = value
    if "paper" in given:
        papers = [table.paper for table in chosen if table.paper]
        chosen = [table for table in chosen if table.paper == given["paper"]]
        if not chosen:
            known = ", ".join(papers) or "no paper: it is this project's own"
            raise UsageError(f"no {command} of paper {given['paper']!r}; there is {known}")
    tier = given.get("tier", TIERS[0])
    if not any(tier in table.tiers for table in chosen):
        known = ", ".join(dict.fromkeys(name for table in chosen for name in table.tiers))
        raise UsageError(f"no tier {tier!r} of {command}; choose of {known}")
    return Request(chosen, tier)


def make(table: Table, tier: str, runs: Path) -> bool:
    """Run what a table misses, then write and print it; True if every cell of the tier
    has a value."""
    if tier not in table.tiers or table.tiers[tier].unavailable:
        reason = table.tiers[tier].unavailable if tier in table.tiers else "it has no such tier"
        print(f"{table.name}, tier {tier}, is not offered: {reason}", file=sys.stderr)
        return False
    # Only now: these need torch, which takes seconds.
    from experiments.support.checkpoint import csv_text, write_json, write_text
    from reproduce import from_records
    from reproduce.engine import execute, finished_runs
    from reproduce.figure import draw
    from reproduce.jobs import INPUTS, needs_inputs, plan
    from reproduce.render import render

    print(f"{table.title}, tier {tier}", flush=True)
    stem = coverage.stem(table, tier, runs)
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {error.filename}: {error.strerror}") from error
    if table.tiers[tier].block:
        found = from_records.collect(table, tier, runs)
        table, done, lacking = found.table, found.runs, found.missing
        for warning in found.warnings:
            print(warning, file=sys.stderr)
        missing = [f"{arm}, seeds {' '.join(map(str, seeds))}" for arm, seeds in lacking.items()]
        jobs, made = len(done) + sum(map(len, lacking.values())), len(done)
    else:
        planned = plan(table, tier, runs)
        if needs_inputs(table, tier):
            smoke_tasks.write(runs / INPUTS)
        execute(planned.jobs, lambda message: print(message, flush=True))
        done, jobs = finished_runs(planned), len(planned.jobs)
        missing = [str(job) for job in planned.jobs if job.result() is None]
        made = jobs - len(missing)
    rendered = render(table, tier, done)
    for suffix, text in {
        ".md": rendered.markdown(),
        ".csv": csv_text(rendered.summary),
        "-runs.csv": csv_text(rendered.per_run),
    }.items():
        write_text(stem.with_name(stem.name + suffix), text)
    drawn = draw(table, tier, done, rendered, stem.with_name(f"{stem.name}.png"))
    write_json(stem.with_name(f"{stem.name}.json"), coverage.record(jobs, made))
    rendered.print()
    print(f"written: {stem}.md, .csv, -runs.csv" + (", .png" if drawn else ""))
    if missing:
        block = table.tiers[tier].block
        told = f" (python -m reproduce run {block})" if block else ""
        print(f"missing: {'; '.join(missing)}{told}", file=sys.stderr)
    return not missing


def run(arguments: list[str], runs: Path) -> bool:
    """Run a block, `run BLOCK [minutes=N] [per_gpu=N]`; True if all its runs are done.

    Raises:
        UsageError: arguments that mean nothing.
    """
    if not arguments:
        raise UsageError("run what? Name a block: python -m reproduce run BLOCK")
    name, *options = arguments
    given: dict[str, float] = {}
    for option in options:
        key, _, value = option.partition("=")
        try:
            given[key] = {"minutes": float, "per_gpu": int}[key](value)
        except (KeyError, ValueError):
            raise UsageError(f"cannot use {option!r}; use minutes=N and per_gpu=N") from None
        if not 0 < given[key] < 1e6:
            raise UsageError(f"{option}: it must be positive")
    from reproduce.blocks import read_block
    from reproduce.runner import run_block

    def report(message: str) -> None:
        print(message, flush=True)

    return run_block(
        read_block(name), runs, given.get("minutes"), int(given.get("per_gpu", 1)), report
    )


def write_page(options: list[str], runs: Path) -> None:
    """Write the report page, `report`, or its main figure, `report figure=FILE`.

    Raises:
        UsageError: arguments that mean nothing.
    """
    key, _, value = options[0].partition("=") if options else ("figure", "", "")
    if len(options) > 1 or key != "figure" or (options and not value):
        raise UsageError(f"cannot use {' '.join(options)!r}; use figure=FILE or nothing")
    from reproduce.report import page

    if value:
        page.write_figure(Path(value))
    else:
        page.main(runs)


def attempt(table: Table, tier: str, runs: Path) -> bool:
    """`make`, with a `UserError` printed as one line, so that the next table is made all
    the same."""
    try:
        return make(table, tier, runs)
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return False


def main(arguments: list[str], folder: Path = TABLES, runs: Path = RUNS) -> int:
    """Run the command line with these arguments and return the exit status."""
    raise_on_sigterm()
    try:
        if not arguments or arguments in (["--help"], ["-h"]):
            print(USAGE, file=sys.stdout if arguments else sys.stderr)
            return 0 if arguments else 2
        if arguments[0] == "run":
            return 0 if run(arguments[1:], runs) else 1
        if arguments == ["claims"]:
            from reproduce import verdicts

            verdicts.main(runs)
            return 0
        if arguments[0] == "report":
            write_page(arguments[1:], runs)
            return 0
        tables = read_tables(folder)
        if arguments == ["--list"]:
            for line in coverage.lines(tables, runs, coverage.items()):
                print(line)
            return 0
        request = parse(arguments, tables)
        complete = [attempt(table, request.tier, runs) for table in request.tables]
        return 0 if all(complete) else 1
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except (KeyboardInterrupt, Terminated) as stop:
        told = isinstance(stop, Terminated)
        what, status = ("terminated", 143) if told else ("interrupted", 130)
        print(f"{what}; start the same command again to go on", file=sys.stderr)
        return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
