"""The tables' command line: `python -m reproduce quickstart`, `... table2 [paper=..] [tier=..]`.

Trains what is missing and writes `runs/tables/<name>-<tier>` as .md, .csv, -runs.csv and .png.
Exit status: 0 if every cell of the tier exists, 1 if not, 2 for arguments that mean nothing.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from experiments.errors import Terminated, UserError, raise_on_sigterm
from reproduce.spec import TABLES, TIERS, Table, read_tables

RUNS = Path("runs")
USAGE = """\
python -m reproduce quickstart              every method against dense training, on a CPU
python -m reproduce table2 [paper=NAME] [tier=smoke|mini|full]
                                            Table 2 of every paper that has one, or of one
python -m reproduce --list                  the tables, their tiers, and what has been run"""


class UsageError(UserError):
    """Arguments that ask for nothing that exists."""


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    tables: list[Table]
    tier: str


def parse(arguments: list[str], tables: list[Table]) -> Request:
    """Raises UsageError, in one line, for what does not exist."""
    command, *options = arguments
    chosen = [table for table in tables if table.command == command]
    if not chosen:
        known = ", ".join(dict.fromkeys(table.command for table in tables))
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
    """Run what is missing, write and print the table; whether every cell of the tier exists."""
    if tier not in table.tiers or table.tiers[tier].unavailable:
        reason = table.tiers[tier].unavailable if tier in table.tiers else "it has no such tier"
        print(f"{table.name}, tier {tier}, is not offered: {reason}", file=sys.stderr)
        return False
    # Only now: these need torch, which takes seconds.
    from reproduce.engine import execute, finished, plan, write_text
    from reproduce.figure import draw
    from reproduce.render import csv_text, render

    print(f"{table.title}, tier {tier}", flush=True)
    stem = runs / "tables" / f"{table.name}-{tier}"
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {error.filename}: {error.strerror}") from error
    jobs = plan(table, tier, runs)
    execute(jobs, lambda message: print(message, flush=True))
    done = finished(jobs)
    rendered = render(table, tier, done)
    for suffix, text in {
        ".md": rendered.markdown(),
        ".csv": csv_text(rendered.summary),
        "-runs.csv": csv_text(rendered.per_run),
    }.items():
        write_text(stem.with_name(stem.name + suffix), text)
    if done:
        draw(done, f"{table.title} ({tier})", stem.with_name(f"{stem.name}.png"))
    rendered.print()
    print(f"written: {stem}.md, .csv, -runs.csv" + (", .png" if done else ""))
    missing = [str(job) for job in jobs if job not in [run.job for run in done]]
    if missing:
        print(f"missing: {'; '.join(missing)}", file=sys.stderr)
    return not missing


def list_tables(tables: list[Table], runs: Path) -> None:
    """Print tables, tiers, and the runs that each needs and has."""
    from reproduce.engine import finished, plan

    for table in tables:
        print(table.title)
        for name, tier in table.tiers.items():
            paper = f" paper={table.paper}" if table.paper else ""
            if tier.unavailable:
                state = f"not offered: {tier.unavailable}"
            else:
                jobs = plan(table, name, runs)
                size = f"{len(table.rows)} rows x {len(tier.seeds)} seeds"
                state = f"{len(finished(jobs))} of {len(jobs)} runs done ({size})"
            print(f"  {table.command}{paper} tier={name}: {state}")


def main(arguments: list[str], folder: Path = TABLES, runs: Path = RUNS) -> int:
    """The command line with `arguments`; returns the exit status."""
    raise_on_sigterm()
    try:
        if not arguments or arguments in (["--help"], ["-h"]):
            print(USAGE, file=sys.stdout if arguments else sys.stderr)
            return 0 if arguments else 2
        tables = read_tables(folder)
        if arguments == ["--list"]:
            list_tables(tables, runs)
            return 0
        request = parse(arguments, tables)
        complete = [make(table, request.tier, runs) for table in request.tables]
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
