"""The command line that makes tables, blocks, verdicts and the page of results: `python -m
reproduce --help`.

For a table it runs what is missing and writes `runs/tables/<name>-<tier>` as .md, .csv, -runs.csv
and .png. Exit status: 0 if every cell of the tier has a value, 1 if not, 2 for invalid arguments.
"""

import shlex
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from experiments.support.errors import UserError, exit_status, suggestion
from reproduce.execute.processes import Launch
from reproduce.render import listing
from reproduce.specs.table import TABLES, TIERS, Table, read_tables

RUNS = Path("runs")
ALL = "all"
# Of a table.
OPTIONS = ("paper=NAME", "tier=TIER", "seeds=N", "launch=COMMAND", "per_gpu=N", "commands")
QUICKSTART = "quickstart"
COMMANDS = (ALL, "run", "claims", "report", "pack")
USAGE = Path(__file__).with_name("usage.txt")


class UsageError(UserError):
    """An error in the arguments of the command line."""

    status = 2


def read_options(words: list[str], *known: str) -> dict[str, str]:
    """The values of the options by key. known: how they are typed, `key=VALUE`, `key=value` if it
    has this one value, or `key`; `N` is a positive number, whole for all but `minutes`."""
    kinds = {key: (value, equals) for key, equals, value in (one.partition("=") for one in known)}
    given: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        kind, takes = kinds.get(key, ("", ""))
        wrong = key not in kinds or key in given or equals != takes or bool(value) != bool(takes)
        if wrong or (kind.islower() and value != kind):
            how = f"use {', '.join(known)}, each once" if known else "there are no options"
            raise UsageError(f"cannot use {word!r}; {how}")
        if kind == "N":
            digits = value.replace(".", "", 1) if key == "minutes" else value
            if not digits.isdecimal() or not 0 < float(value) < 1e6:
                raise UsageError(f"{word}: it must be a positive number, at most a million")
        given[key] = value
    return given


def parse(arguments: list[str], tables: list[Table]) -> tuple[list[Table], str, Launch | None]:
    """(the chosen tables, the tier, how missing runs are started; None = in this process)."""
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
    if "seeds" in given:
        chosen = [table for table in chosen if tier in table.tiers and table.tiers[tier].seeds]
        if not chosen:
            raise UsageError(f"seeds=: the seeds of {command}, tier {tier}, are those of a block")
        seeds = list(range(int(given["seeds"])))
        chosen = [
            replace(table, tiers={**table.tiers, tier: replace(table.tiers[tier], seeds=seeds)})
            for table in chosen
        ]
    words, per_gpu = given.get("launch", ""), given.get("per_gpu")
    if words and per_gpu:
        raise UsageError("launch= gives every run all GPUs, per_gpu= one of them; choose one")
    launch = tuple(shlex.split(words))
    if launch[:1] == ("torchrun",):  # that of this environment, which may not be on the PATH
        launch = (sys.executable, "-m", "torch.distributed.run", *launch[1:])
    if launch and shutil.which(launch[0]) is None:
        raise UsageError(f"launch={words}: there is no command {launch[0]!r} here")
    if not given.keys() & {"launch", "per_gpu", "commands"}:
        return chosen, tier, None
    return chosen, tier, Launch(launch, int(per_gpu) if per_gpu else None, "commands" in given)


def _refuse_uncovered(command: str, paper: str = "") -> None:
    """Raise a `UsageError` with the reason if the table is in a paper but has no spec."""
    for item in (item for listed in listing.items().values() for item in listed):
        if item.reason and item.command == command and paper in ("", item.paper):
            raise UsageError(f"{item.name} of paper={item.paper} is not covered: {item.reason}")


def list_tables(arguments: list[str], tables: list[Table], runs: Path) -> None:
    """Print the list of all tables, or of those that the arguments name."""
    papers = listing.items()
    named = [argument for argument in arguments if argument != "--list"]
    if named not in ([], [ALL]):
        tables, *_ = parse(named, tables)
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
        text = USAGE.read_text(encoding="utf-8").rstrip()
        print(text, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    command, *rest = arguments
    if command == "run":
        if not rest:
            raise UsageError("no block is named: python -m reproduce run BLOCK")
        options = read_options(rest[1:], "minutes=N", "per_gpu=N")
        from reproduce.execute.blocks import read_block
        from reproduce.execute.runner import run_block

        minutes = float(options["minutes"]) if "minutes" in options else None
        per_gpu = int(options.get("per_gpu", 1))
        done = run_block(read_block(rest[0]), runs, minutes, per_gpu, partial(print, flush=True))
        return 0 if done else 1
    if command == "claims":
        from reproduce import judge

        if len(rest) > 1:
            given = " ".join(arguments)
            raise UsageError(f"cannot use {given!r}; use claims, claims N or claims all")
        judge.main(runs, "".join(rest))
    elif command == "report":
        options = read_options(rest, "figure=FILE", "sizes=FILE")
        from reproduce.render.report import page

        for name, file in options.items():
            page.write_figure(name, Path(file))
        if not options:
            page.main(runs)
    elif command == "pack":
        read_options(rest)
        from reproduce.execute.blocks import EVIDENCE
        from reproduce.records import pack

        print("\n".join(pack(runs / "evidence", EVIDENCE)) or "there is nothing new to pack")
    elif "--list" in arguments:
        list_tables(arguments, read_tables(folder), runs)
    else:
        chosen, tier, launch = parse(arguments, read_tables(folder))
        from reproduce import make, quickstart  # they import torch, which takes seconds

        prints = launch is not None and launch.prints
        if command == ALL and not prints:
            return 0 if make.make_all(chosen, tier, runs, launch) else 1
        if command == QUICKSTART and launch is None:
            return 0 if quickstart.main(chosen[0], runs) else 1
        made = [make.attempt(table, tier, runs, launch) for table in chosen]
        return 0 if prints or all(one.complete for one in made) else 1
    return 0


def main(arguments: list[str], folder: Path = TABLES, runs: Path = RUNS) -> int:
    """Run the command line with these arguments and return the exit status."""
    return exit_status(partial(_do, arguments, folder, runs), "goes on")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
