"""Compares two records of a device row by row: `python -m experiments.bench report OLD NEW`.

The GPU's state differs between runs, so a row is judged by its speed relative to a peer of the same
run (dense, or a copy), and a row without a peer by its time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rich.box
import rich.console
import rich.markup
import rich.table

from experiments.bench.report import identity, markdown_table, read_record
from experiments.support.checkpoint import write_text
from experiments.support.errors import UserError

WITHIN = 0.03
PEERS = ("dense", "clone")  # a row is compared with the first of these that it has
HEADS = ("benchmark", "name", "dtype", "shape", "old ms", "new ms", "new/old", "peer", "old x",
         "new x", "verdict")  # fmt: skip


def compare(old: Path, new: Path, table: Path | None = None) -> bool:
    """Print the rows that both records have (and write them to `table` as Markdown); True if none
    is slower by more than WITHIN."""
    before, now = read_record(old), read_record(new)
    if before["device"] != now["device"]:
        devices = f"{before['device']} and {now['device']}"
        raise UserError(f"{old} and {new} are records of two devices, {devices}")
    lines = [
        line(benchmark, earlier[identity(row)], row)
        for benchmark, part in now["benchmarks"].items()
        for earlier in [timed(before["benchmarks"].get(benchmark, {"rows": []}))]
        for row in timed(part).values()
        if identity(row) in earlier
    ]
    if not lines:
        raise UserError(f"{old} and {new} have no timed row in common")
    slower = [f"{cells[0]} {cells[1]}, {cells[3]}" for cells in lines if "slower" in cells[-1]]
    summary = f"{len(lines)} rows in both; slower by more than {WITHIN:.0%}: {len(slower)}"
    summary += f" ({'; '.join(slower)})" if slower else ""
    shown = rich.table.Table(*HEADS, box=rich.box.SIMPLE, pad_edge=False)
    for cells in lines:
        shown.add_row(*map(rich.markup.escape, cells))
    rich.console.Console(width=180).print(shown)
    print(summary)
    if table is not None:
        write_text(table, f"{markdown_table(HEADS, lines)}\n\n{summary}\n")
    return not slower


def timed(benchmark: dict[str, Any]) -> dict[tuple[str, ...], dict[str, Any]]:
    """The rows of a benchmark that have a time, by what identifies them."""
    return {identity(row): row for row in benchmark["rows"] if row["ms"] is not None}


def line(benchmark: str, old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The cells of a row of both records, by HEADS. The row `dense` is not judged."""
    shared = old["peers"].keys() & new["peers"].keys() - {new["name"]}
    peer = next((name for name in PEERS if name in shared), "")
    speeds = [(row["peers"][peer] if peer else 1.0) / row["ms"] for row in (old, new)]
    slower = 0.0 if new["name"] == "dense" else speeds[0] / speeds[1] - 1
    verdict = f"slower by {slower:.0%}" if slower > WITHIN else ""
    if slower < -WITHIN:
        verdict = f"faster by {1 / (1 + slower) - 1:.0%}"
    return [
        benchmark, *(new[key] for key in ("name", "dtype", "shape")),
        *(f"{row['ms']:.4g}" for row in (old, new)), f"{new['ms'] / old['ms']:.2f}", peer,
        *(f"{speed:.2f}" if peer else "" for speed in speeds), verdict,
    ]  # fmt: skip
