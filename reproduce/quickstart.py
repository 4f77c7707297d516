"""The quickstart, `python -m reproduce quickstart [rows=all]`: tiny models and what they lose.

They train side by side with one thread: two such processes make 1.4 times the steps of one of two.
"""

import os
import sys
from pathlib import Path

from experiments.data.prepare import prepare
from reproduce.execute.jobs import finished_runs, plan
from reproduce.execute.processes import Launch, cores
from reproduce.execute.queue import execute
from reproduce.make import Made, write
from reproduce.render.cells import Numbers
from reproduce.specs.table import Table

AT_ONCE = 12  # each process takes half a gigabyte
LOSS, ABOVE = "validation loss: ", "difference to dense: "  # the columns' values in a summary


def main(table: Table, runs: Path) -> bool:
    """Make the table and print what a reader needs of it; return True if all its runs are done."""
    (tier,) = table.tiers
    planned = plan(table, tier, runs)
    if not all(job.result() for job in planned.jobs):
        print("Preparing the text, once.", flush=True)
        prepare(planned.jobs[0].config.data)
        execute(planned.jobs, _progress, Launch(per_gpu=min(cores(), AT_ONCE)))
        print(flush=True)
    done = finished_runs(planned)
    made = Made(len(planned.jobs), len(done))
    rendered, stem, drawn = write(table, tier, done, made, runs)
    print("\n".join(comparison(rendered.summary)))
    print(f"All columns: {stem}.md" + (f"; curves: {stem}.png" if drawn else ""))
    return made.complete


def _progress(message: str) -> None:
    """Print a message over the one before it; in a file, and if it is a failure, on its own."""
    if not sys.stdout.isatty() or message.startswith("failed"):
        print(message, flush=True)
    else:
        print(f"\r\033[K{message[: os.get_terminal_size().columns - 1]}", end="", flush=True)


def comparison(summary: list[Numbers]) -> list[str]:
    """The lines that are printed: the loss of each row and how far it is above that of dense."""
    lines, against = [f"{'':22} validation loss    above dense [95 % interval]"], ABOVE + "against"
    for row in summary:
        loss = row.get(LOSS + "mean")
        line = f"{row['method']:22} {loss:15.4f}" if loss is not None else f"{row['method']:22}"
        if (low := row.get(ABOVE + "low")) is not None:
            mean, high = row[ABOVE + "mean"], row[ABOVE + "high"]
            line += f"    {mean:+.4f} [{low:+.4f}, {high:+.4f}]"
            line += f" (above {row[against]})" if against in row else ""
        lines.append(line)
    return [*lines, "Intervals that contain 0 show no difference."]
