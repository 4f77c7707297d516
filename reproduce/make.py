"""Makes tables: runs what they miss, then writes and prints them."""

import sys
import time
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from experiments.support.checkpoint import csv_text, write_json, write_text
from experiments.support.errors import UserError, one_line
from reproduce import records
from reproduce.execute import smoke_tasks
from reproduce.execute.jobs import INPUTS, PlacedRun, finished_runs, plan
from reproduce.execute.processes import Launch
from reproduce.execute.queue import commands, execute, lacking
from reproduce.render import listing
from reproduce.render.figure import draw
from reproduce.render.grid import Grid, Line
from reproduce.render.report import page
from reproduce.render.table import Rendered, render, render_measured
from reproduce.specs.table import BENCH, Table

NAMED = 5  # so many missing runs are named in the printed line


@dataclass(frozen=True)
class Made:
    """The state of a table's tier after an attempt to make it."""

    jobs: int = 0  # number of trainings, benchmarks and measurements that it consists of
    done: int = 0  # how many of them are finished
    reason: str = ""  # why the table could not be made

    @property
    def complete(self) -> bool:
        """True if every cell of the tier has a value."""
        return self.done == self.jobs and not self.reason


def make(table: Table, tier: str, runs: Path, launch: Launch | None = None) -> Made:
    """Run the missing jobs of a table, then write and print the table. launch: how missing runs are
    started, if not in this process."""
    if reason := not_offered(table, tier):
        print(f"{table.name}, tier {tier}, is not offered: {reason}", file=sys.stderr)
        return Made(reason=f"not offered: {reason}")
    print(f"{table.title}, tier {tier}", flush=True)
    stem, chosen = listing.stem(table, tier, runs), table.tiers[tier]
    prints = launch is not None and launch.prints
    if prints and (chosen.block or table.driver == BENCH):
        own = f"{table.command} paper={table.paper} tier={tier}"
        print(f"python -m reproduce {f'run {chosen.block}' if chosen.block else own}")
        return Made()
    if chosen.block:
        collected = records.collect(table, tier, runs)
        table, done = collected.table, collected.runs
        print("".join(f"{warning}\n" for warning in collected.warnings), end="", file=sys.stderr)
        seeds_of = collected.missing.items()
        missing = [f"{variant}, seeds {' '.join(map(str, seeds))}" for variant, seeds in seeds_of]
        made = Made(len(done) + sum(len(seeds) for _, seeds in seeds_of), len(done))
    else:
        planned = plan(table, tier, runs)
        if any("{inputs}" in word for one in chosen.measure.values() for word in one.overrides):
            smoke_tasks.write(runs / INPUTS)
        if launch is not None and launch.prints:
            print("\n".join(commands(planned.jobs, launch.words)))
            return Made()
        if table.driver == BENCH:  # a job that measures has the device for itself
            launch = None
        waiting = execute(planned.jobs, partial(print, flush=True), launch)
        done, jobs = finished_runs(planned), len(planned.jobs)
        if waiting == jobs and lacking(job.config for job in planned.jobs):
            picture = Path(f"{stem}.png")
            if path := listing.measured_csv(table, tier):
                if draw(table, tier, [], render_measured(table, tier, path), picture):
                    print(f"drawn: {picture}")
                print(f"measured: {listing.measured_file(path)}")
            return Made(jobs)
        missing = [str(job) for job in planned.jobs if job.result() is None]
        made = Made(jobs, jobs - len(missing))
    rendered, stem, drawn = write(table, tier, done, made, runs)
    written = f"{stem}.md, .csv, -runs.csv" + (", .png" if drawn else "")
    print(f"\n{rendered.markdown()}\nwritten: {written}")
    if missing:
        more = f"; and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        remedy = f" (python -m reproduce run {chosen.block})" if chosen.block else ""
        print(f"missing: {'; '.join(missing[:NAMED])}{more}{remedy}", file=sys.stderr)
    return made


def write(
    table: Table, tier: str, done: list[PlacedRun], made: Made, runs: Path
) -> tuple[Rendered, Path, bool]:
    """Write a table; return it, the path of its files without their ends, if it has a figure."""
    stem, rendered = listing.stem(table, tier, runs), render(table, tier, done)
    write_text(Path(f"{stem}.md"), rendered.markdown())
    write_text(Path(f"{stem}.csv"), csv_text(rendered.summary))
    write_text(Path(f"{stem}-runs.csv"), csv_text(rendered.per_run))
    state = {"jobs": made.jobs, "done": made.done, "facts": rendered.facts}
    write_json(Path(f"{stem}.json"), state)
    return rendered, stem, draw(table, tier, done, rendered, Path(f"{stem}.png"))


def not_offered(table: Table, tier: str) -> str:
    """The reason why a table has no such tier; "" if it has one."""
    return table.tiers[tier].unavailable if tier in table.tiers else "it has no such tier"


def attempt(table: Table, tier: str, runs: Path, launch: Launch | None = None) -> Made:
    """Make a tier of a table as `make` does. An error is printed and returned as the reason, so
    that the next table can be made."""
    try:
        return make(table, tier, runs, launch)
    except UserError as error:
        reason = one_line(error)
        print(f"error: {reason}", file=sys.stderr)
    except Exception as error:  # a defect in one table must not prevent the others
        traceback.print_exc()
        reason = f"{type(error).__name__}: {one_line(error)}"
    return Made(reason=reason)


def make_all(tables: list[Table], tier: str, runs: Path, launch: Launch | None = None) -> bool:
    """Make every table that has the tier, then the page of results; return True if all tables are
    complete. After each table `runs/tables/all-<tier>.md` says how each ended."""
    wanted = [table for table in tables if not not_offered(table, tier)]
    ended: dict[str, Made] = {}
    lines: list[Line] = []
    path = runs / "tables" / f"all-{tier}.md"
    summary = ""
    for number, table in enumerate(wanted, 1):
        print(f"== [{number}/{len(wanted)}] {table.name}", flush=True)
        start = time.monotonic()
        made = ended[table.name] = attempt(table, tier, runs, launch)
        status = "complete" if made.complete else "failed" if made.reason else "incomplete"
        minutes = f"{(time.monotonic() - start) / 60:.1f}"
        lines.append(Line([table.name], [status, f"{made.done} of {made.jobs}", minutes]))
        grid = Grid(["spec"], [""] * 3, ["status", "runs", "minutes"], lines)
        done = sum(one.complete for one in ended.values())
        summary = (
            f"# All tables and figures, tier {tier}\n\n{done} of {len(wanted)} complete.\n\n"
            + grid.markdown()
            + "".join(f"\n- {name}: {one.reason}" for name, one in ended.items() if one.reason)
        ).rstrip() + "\n"
        write_text(path, summary)
    try:
        page.main(runs)
    except UserError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return False
    print(f"\n{summary}\nwritten: {path}")
    return all(made.complete for made in ended.values())
