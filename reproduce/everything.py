"""Makes all tables and figures of the papers, one after the other: `python -m reproduce all`.

A summary lists the outcome of every table and the minutes that it took in all calls. It is written
after each table, so that an interrupted call loses nothing.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.support.errors import UserError, one_line
from reproduce.making import HERE, How, Made, attempt, not_offered
from reproduce.spec import Table


@dataclass
class Line:
    """One table in the summary.

    spec: the table's name. script: the command that makes it alone. status: `not begun`,
    `complete`, `incomplete`, `interrupted`, `failed` or `not offered`. jobs, done: as in
    `making.Made`. minutes: in all calls together. reason: why it failed or is not offered.
    """

    spec: str
    script: str
    status: str = "not begun"
    jobs: int = 0
    done: int = 0
    minutes: float = 0.0
    reason: str = ""

    def end(self, made: Made) -> None:
        """Record how a table ended."""
        self.jobs, self.done, self.reason = made.jobs, made.done, made.reason
        status = "failed" if made.reason else "incomplete"
        self.status = "complete" if made.complete else status


def run(tables: list[Table], tier: str, runs: Path, how: How = HERE) -> bool:
    """Make every table that has the tier, then the page of results; return True if all tables are
    complete."""
    summary = Summary(tables, tier, runs)
    wanted = [table for table in tables if not not_offered(table, tier)]
    start = time.monotonic()
    for number, table in enumerate(wanted, 1):
        elapsed = time.monotonic() - start
        after = f" after {elapsed / 60:.1f} minutes" if number > 1 else ""
        print(f"== [{number}/{len(wanted)}] {table.name}{after}", flush=True)
        summary.make(table, how)
    try:
        from reproduce.report import page

        page.main(runs)
    except UserError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        summary.write()
        return False
    print(f"\n{summary.write()}\nwritten: {summary.stem}.md, .json")
    return all(summary.lines[table.name].status == "complete" for table in wanted)


class Summary:
    """The summary of a tier, stored in `runs/tables/all-<tier>.md` and `.json`."""

    def __init__(self, tables: list[Table], tier: str, runs: Path) -> None:
        self.tier, self.runs = tier, runs
        self.stem = runs / "tables" / f"all-{tier}"
        self.lines = self._stored()  # also of papers that this call does not make
        for table in tables:
            line = Line(table.name, script(table))
            if table.name in self.lines:
                line.minutes = self.lines[table.name].minutes
            if reason := not_offered(table, tier):
                line.status, line.reason = "not offered", reason
            self.lines[table.name] = line

    def _stored(self) -> dict[str, Line]:
        """The lines of earlier calls by the name of their table."""
        try:
            content = json.loads(self.stem.with_suffix(".json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        return {line["spec"]: Line(**line) for line in content["tables"]}

    def make(self, table: Table, how: How = HERE) -> None:
        """Make a table and record how it ended, or that it was interrupted."""
        line, start = self.lines[table.name], time.monotonic()
        line.status = "interrupted"
        try:
            line.end(attempt(table, self.tier, self.runs, how))
        except Exception as error:  # a defect in one table must not prevent the others
            traceback.print_exc()
            line.end(Made(reason=f"{type(error).__name__}: {one_line(error)}"))
        finally:
            line.minutes += (time.monotonic() - start) / 60
            self.write()

    def write(self) -> str:
        """Write both files and return the text."""
        from experiments.support.checkpoint import write_json, write_text

        lines = list(self.lines.values())
        write_json(
            self.stem.with_suffix(".json"),
            {"tier": self.tier, "tables": [asdict(line) for line in lines]},
        )
        text = self.text()
        write_text(self.stem.with_suffix(".md"), text)
        return text

    def text(self) -> str:
        """The summary as Markdown."""
        from reproduce.grid import Grid
        from reproduce.grid import Line as Row

        lines = [line for line in self.lines.values() if line.status != "not offered"]
        rows = [
            Row([line.spec], [line.status, f"{line.done} of {line.jobs}", f"{line.minutes:.1f}"])
            for line in lines
        ]
        grid = Grid(["spec"], [""] * 3, ["status", "runs", "minutes"], rows)
        done = sum(line.status == "complete" for line in lines)
        minutes = sum(line.minutes for line in lines)
        parts = [
            f"# All tables and figures, tier {self.tier}\n",
            f"{done} of {len(lines)} complete, {minutes:.0f} minutes in all calls.\n",
            grid.markdown(),
        ]
        for line in self.lines.values():
            if line.reason:
                parts.append(f"- {line.spec}: {line.status}: {line.reason}")
        return "\n".join(parts).rstrip() + "\n"


def script(table: Table) -> str:
    """The command that makes only this table."""
    return f"reproduce/{table.command}.sh paper={table.paper}"
