"""The command line that makes tables, blocks, verdicts and the page of results: `python -m
reproduce --help`.

For a table it runs what is missing and writes `runs/tables/<name>-<tier>` as .md, .csv, -runs.csv
and .png. Exit status: 0 if every cell of the tier has a value, 1 if not, 2 for invalid arguments.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from experiments.support.errors import (
    Terminated,
    UserError,
    after_broken_pipe,
    one_line,
    raise_on_sigterm,
    suggestion,
)
from reproduce import coverage, everything
from reproduce.making import How, attempt
from reproduce.reading import TABLES, read_tables
from reproduce.spec import TIERS, Table

RUNS = Path("runs")
ALL = "all"
KEYS = {  # of a table's options, as they are typed
    "paper": "paper=NAME",
    "tier": "tier=TIER",
    "launch": "launch=COMMAND",
    "per_gpu": "per_gpu=N",
    "commands": "commands",
}
COMMANDS = (ALL, "run", "claims", "report", "pack")
USAGE = """\
python -m reproduce quickstart
    compare seven methods with dense training, on a CPU
python -m reproduce table2 [paper=NAME] [tier=smoke|mini|full]
    make Table 2 of every paper that has one, or of one paper; likewise table1,
    figure7 and all others that --list names. smoke takes minutes on a CPU, mini
    has small models, mostly with committed results, full is the paper's setting
    launch="torchrun --nproc_per_node=8" starts every training so, on all GPUs;
    per_gpu=1 runs one on each GPU at once; commands prints the commands
    that are left instead
python -m reproduce all [paper=NAME] [tier=smoke|mini|full]
    make every table and figure, a summary in runs/tables, and the page of
    results; runs that are finished are not repeated
python -m reproduce run BLOCK [minutes=N] [per_gpu=N]
    run a block, many small trainings that test the papers' claims, on all GPUs;
    minutes: stop after this time; per_gpu: so many runs at once on each GPU.
    The blocks are in reproduce/blocks
python -m reproduce claims [N|all]
    judge the papers' claims by the runs of the blocks and the measured speeds;
    print the verdicts, or all about claim N or about every one; write them to
    runs/report
python -m reproduce report [figure=FILE]
    write one page with all results, runs/report/index.html, or, to FILE, only
    the main figure of the committed results as SVG
python -m reproduce pack
    fold the records in runs/evidence into those in reproduce/evidence
python -m reproduce [table2] --list
    list every table of every paper, or Table 2 of each: tiers, what they need
    and what has been run, or why the table is not covered"""


class UsageError(UserError):
    """An error in the arguments of the command line."""


@dataclass(frozen=True)
class Request:
    """The tables and the tier that the command line asks for, and how to make them."""

    tables: list[Table]
    tier: str
    how: How


def parse(arguments: list[str], tables: list[Table]) -> Request:
    """The tables and the tier that the arguments name.

    Raises:
        UsageError: there is no such table, paper, tier or option.
    """
    command, *options = arguments
    chosen = [table for table in tables if table.command == command]
    if command == ALL:
        chosen = [table for table in tables if table.paper]
    if not chosen:
        _refuse_uncovered(command)
        close = suggestion(command, {*(table.command for table in tables), *COMMANDS})
        raise UsageError(
            f"no table or command {command!r}{close}; python -m reproduce --list names the tables, "
            "--help the commands"
        )
    given: dict[str, str] = {}
    for option in options:
        key, _, value = option.partition("=")
        if key not in KEYS or bool(value) == (key == "commands") or key in given:
            raise UsageError(f"cannot use {option!r}; use {', '.join(KEYS.values())}, each once")
        given[key] = value
    if "paper" in given:
        papers = dict.fromkeys(table.paper for table in chosen if table.paper)
        chosen = [table for table in chosen if table.paper == given["paper"]]
        if not chosen:
            _refuse_uncovered(command, given["paper"])
            known = ", ".join(papers) or "no paper: it is this project's own"
            close = suggestion(given["paper"], papers)
            raise UsageError(f"no {command} of paper {given['paper']!r}{close}; there is {known}")
    tier = given.get("tier", TIERS[0])
    if not any(tier in table.tiers for table in chosen):
        known = ", ".join(dict.fromkeys(name for table in chosen for name in table.tiers))
        raise UsageError(f"no tier {tier!r} of {command}; choose of {known}")
    return Request(chosen, tier, _how(given))


def _how(given: dict[str, str]) -> How:
    """How runs are made, by the options that were given."""
    words, per_gpu = given.get("launch", ""), given.get("per_gpu")
    if words and per_gpu:
        raise UsageError("launch= gives every run all GPUs, per_gpu= one of them; choose one")
    if per_gpu is not None and not (per_gpu.isdecimal() and 0 < int(per_gpu) < 1000):
        raise UsageError(f"per_gpu={per_gpu}; it must be a whole number from 1 to 999")
    try:
        launch = tuple(shlex.split(words))
    except ValueError as error:
        raise UsageError(f"launch={words}: {error}") from error
    if launch[:1] == ("torchrun",):  # that of this environment, which may not be on the PATH
        launch = (sys.executable, "-m", "torch.distributed.run", *launch[1:])
    if launch and shutil.which(launch[0]) is None:
        raise UsageError(f"launch={words}: there is no command {launch[0]!r} here")
    return How(launch, None if per_gpu is None else int(per_gpu), "commands" in given)


def _refuse_uncovered(command: str, paper: str = "") -> None:
    """Raise a `UsageError` with the reason if the table is in a paper but has no spec."""
    for item in (item for listed in coverage.items().values() for item in listed):
        if item.reason and item.command == command and paper in ("", item.paper):
            raise UsageError(f"{item.name} of paper={item.paper} is not covered: {item.reason}")


def run(arguments: list[str], runs: Path) -> bool:
    """Run a block, `run BLOCK [minutes=N] [per_gpu=N]`; return True if all its runs are done.

    Raises:
        UsageError: no block is named, or an option does not exist or has no number as its value.
    """
    if not arguments:
        raise UsageError("no block is named: python -m reproduce run BLOCK")
    name, *options = arguments
    given: dict[str, float] = {}
    for option in options:
        key, _, value = option.partition("=")
        try:
            given[key] = {"minutes": float, "per_gpu": int}[key](value)
        except (KeyError, ValueError):
            raise UsageError(f"cannot use {option!r}; use minutes=N and per_gpu=N") from None
        if not 0 < given[key] < 1e6:
            raise UsageError(f"{option}; the number must be positive and below a million")
    from reproduce.blocks import read_block
    from reproduce.runner import run_block

    def report(message: str) -> None:
        print(message, flush=True)

    return run_block(
        read_block(name), runs, given.get("minutes"), int(given.get("per_gpu", 1)), report
    )


def write_page(options: list[str], runs: Path) -> None:
    """Write the page of results (`report`) or its main figure alone (`report figure=FILE`).

    Raises:
        UsageError: an option that does not exist.
    """
    key, _, value = options[0].partition("=") if options else ("figure", "", "")
    if len(options) > 1 or key != "figure" or (options and not value):
        raise UsageError(f"cannot use {' '.join(options)!r}; use figure=FILE or nothing")
    from reproduce.report import page

    if value:
        page.write_figure(Path(value))
    else:
        page.main(runs)


def _do(arguments: list[str], folder: Path, runs: Path) -> int:
    """Do what the arguments ask for and return the exit status."""
    if not arguments or {"--help", "-h"} & {*arguments}:
        print(USAGE, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    if arguments[0] == "run":
        return 0 if run(arguments[1:], runs) else 1
    if arguments[0] == "claims":
        from reproduce import judge

        if len(arguments) > 2:
            given = " ".join(arguments)
            raise UsageError(f"cannot use {given!r}; use claims, claims N or claims all")

        judge.main(runs, "".join(arguments[1:]))
        return 0
    if arguments[0] == "report":
        write_page(arguments[1:], runs)
        return 0
    if arguments[0] == "pack":
        if len(arguments) > 1:
            raise UsageError(f"cannot use {' '.join(arguments)!r}; pack has no options")
        from reproduce.blocks import EVIDENCE
        from reproduce.records import pack

        print("\n".join(pack(runs / "evidence", EVIDENCE)) or "there is nothing new to pack")
        return 0
    tables = read_tables(folder)
    if "--list" in arguments:
        papers = coverage.items()
        named = [argument for argument in arguments if argument != "--list"]
        if named not in ([], [ALL]):
            tables = parse(named, tables).tables
            numbers = {(table.paper, table.number) for table in tables}
            papers = {
                title: own
                for title, listed in papers.items()
                if (own := [item for item in listed if (item.paper, item.number) in numbers])
            }
        for line in coverage.lines(tables, runs, papers):
            print(line)
        return 0
    request = parse(arguments, tables)
    if arguments[0] == ALL and not request.how.commands:
        return 0 if everything.run(request.tables, request.tier, runs, request.how) else 1
    made = [attempt(table, request.tier, runs, request.how) for table in request.tables]
    return 0 if request.how.commands or all(one.complete for one in made) else 1


def main(arguments: list[str], folder: Path = TABLES, runs: Path = RUNS) -> int:
    """Run the command line with these arguments and return the exit status."""
    raise_on_sigterm()
    try:
        status = _do(arguments, folder, runs)
        sys.stdout.flush()  # in here: at the exit of Python it is too late to handle a broken pipe
        return status
    except UserError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except BrokenPipeError:
        return after_broken_pipe()
    except (KeyboardInterrupt, Terminated) as stop:
        terminated = isinstance(stop, Terminated)
        what, status = ("terminated", 143) if terminated else ("interrupted", 130)
        print(f"{what}; start the same command again to go on", file=sys.stderr)
        return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
