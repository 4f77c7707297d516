"""The command line that makes tables, blocks, verdicts and the page of results: `python -m
reproduce --help`.

For a table it runs what is missing and writes `runs/tables/<name>-<tier>` as .md, .csv, -runs.csv
and .png. Exit status: 0 if every cell of the tier has a value, 1 if not, 2 for invalid arguments.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.support.errors import (
    Terminated,
    UserError,
    after_broken_pipe,
    one_line,
    raise_on_sigterm,
    suggestion,
)
from reproduce.make import HERE, How, attempt, make_all
from reproduce.render import listing
from reproduce.specs.table import TABLES, TIERS, Table, read_tables

RUNS = Path("runs")
ALL = "all"
OPTIONS = ("paper=NAME", "tier=TIER", "launch=COMMAND", "per_gpu=N", "commands")  # of a table
QUICKSTART = "quickstart"
COMMANDS = (ALL, "run", "claims", "report", "pack")
USAGE = """\
python -m reproduce quickstart [rows=all]
    compare two methods, or all, with dense training, on a CPU
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
    The blocks are in reproduce/specs/blocks
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


def read_options(words: list[str], *known: str) -> dict[str, str]:
    """The values of the options by key. known: how they are typed, `key=VALUE` or `key`; the value
    `N` is a positive number, whole for all but `minutes`.

    Raises:
        UsageError: an option that does not exist, or twice, or with another kind of value.
    """
    kinds = {key: (value, equals) for key, equals, value in (one.partition("=") for one in known)}
    given: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        kind, takes = kinds.get(key, ("", ""))
        if key not in kinds or key in given or equals != takes or bool(value) != bool(takes):
            how = f"use {', '.join(known)}, each once" if known else "there are no options"
            raise UsageError(f"cannot use {word!r}; {how}")
        if kind == "N":
            digits = value.replace(".", "", 1) if key == "minutes" else value
            if not digits.isdecimal() or not 0 < float(value) < 1e6:
                raise UsageError(f"{word}: it must be a positive number, at most a million")
        given[key] = value
    return given


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
    rows = ["rows=all"] * (command == QUICKSTART)
    given = read_options(options, *OPTIONS, *rows)
    if "rows" in given:
        if given["rows"] != "all":
            raise UsageError(f"rows={given['rows']}: it must be all")
        tiers = {name: replace(tier, rows=[]) for name, tier in chosen[0].tiers.items()}
        chosen = [replace(chosen[0], tiers=tiers)]
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
    for item in (item for listed in listing.items().values() for item in listed):
        if item.reason and item.command == command and paper in ("", item.paper):
            raise UsageError(f"{item.name} of paper={item.paper} is not covered: {item.reason}")


def run(arguments: list[str], runs: Path) -> bool:
    """Run a block, `run BLOCK [minutes=N] [per_gpu=N]`; return True if all its runs are done.

    Raises:
        UsageError: no block is named, or an option does not exist or has no number as its value.
    """
    if not arguments:
        raise UsageError("no block is named: python -m reproduce run BLOCK")
    given = read_options(arguments[1:], "minutes=N", "per_gpu=N")
    from reproduce.execute.blocks import read_block
    from reproduce.execute.runner import run_block

    minutes = float(given["minutes"]) if "minutes" in given else None
    block, per_gpu = read_block(arguments[0]), int(given.get("per_gpu", 1))
    return run_block(block, runs, minutes, per_gpu, lambda message: print(message, flush=True))


def list_tables(arguments: list[str], tables: list[Table], runs: Path) -> None:
    """Print the list of all tables, or of those that the arguments name."""
    papers = listing.items()
    named = [argument for argument in arguments if argument != "--list"]
    if named not in ([], [ALL]):
        tables = parse(named, tables).tables
        numbers = {(table.paper, table.number) for table in tables}
        papers = {
            title: own
            for title, listed in papers.items()
            if (own := [item for item in listed if (item.paper, item.number) in numbers])
        }
    print("\n".join(listing.lines(tables, runs, papers)))


def _do(arguments: list[str], folder: Path, runs: Path) -> int:
    """Do what the arguments ask for and return the exit status."""
    if not arguments or {"--help", "-h"} & {*arguments}:
        print(USAGE, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    command, *rest = arguments
    if command == "run":
        return 0 if run(rest, runs) else 1
    if command == "claims":
        from reproduce import judge

        if len(rest) > 1:
            given = " ".join(arguments)
            raise UsageError(f"cannot use {given!r}; use claims, claims N or claims all")
        judge.main(runs, "".join(rest))
    elif command == "report":
        options = read_options(rest, "figure=FILE")
        from reproduce.render.report import page

        if options:
            page.write_figure(Path(options["figure"]))
        else:
            page.main(runs)
    elif command == "pack":
        read_options(rest)
        from reproduce.execute.blocks import EVIDENCE
        from reproduce.records import pack

        print("\n".join(pack(runs / "evidence", EVIDENCE)) or "there is nothing new to pack")
    elif "--list" in arguments:
        list_tables(arguments, read_tables(folder), runs)
    else:
        request = parse(arguments, read_tables(folder))
        if command == ALL and not request.how.commands:
            return 0 if make_all(request.tables, request.tier, runs, request.how) else 1
        if command == QUICKSTART and request.how == HERE:
            from reproduce import quickstart

            return 0 if quickstart.main(request.tables[0], runs) else 1
        made = [attempt(table, request.tier, runs, request.how) for table in request.tables]
        return 0 if request.how.commands or all(one.complete for one in made) else 1
    return 0


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
