"""Compares two records of a device row by row: `python -m experiments.bench report OLD NEW`.

The GPU's state differs between runs, and rows of older records were measured after idle time. A row
is therefore judged by its speed relative to a peer in the same run (dense, or a copy). The row
`dense` is not judged; another row without a peer is judged by its time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich.box
import rich.console
import rich.markup
import rich.table

from experiments.bench.report import identity, read_record
from experiments.support.checkpoint import write_text
from experiments.support.errors import UserError

WITHIN = 0.03
GRAPHS, OVER_DENSE = "step in CUDA graphs ms", "in graphs, times as fast as dense"
PEERS = ("dense", "clone")  # a row is compared with the first of these that it has
HEADS = ("benchmark", "name", "dtype", "shape", "old ms", "new ms", "new/old", "peer", "old x",
         "new x", "verdict")  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """A row of both records. old_peer, new_peer: milliseconds of `peer`, nan without one."""

    benchmark: str
    old: dict[str, Any]
    new: dict[str, Any]
    peer: str = ""

    @property
    def speeds(self) -> tuple[float, float]:
        """The speed in both records, relative to the peer in the same run; without a peer the
        inverse of the milliseconds."""
        old, new = (r["peers"][self.peer] if self.peer else 1.0 for r in (self.old, self.new))
        return old / self.old["ms"], new / self.new["ms"]

    @property
    def slower(self) -> float:
        """The fraction by which the new row is slower; negative if it is faster."""
        if self.new["name"] == "dense":
            return 0.0
        old, new = self.speeds
        return old / new - 1


def pairs(old: dict[str, Any], new: dict[str, Any]) -> list[Pair]:
    """The timed rows that both records have, in the order of the new one."""
    found = []
    for benchmark, part in new["benchmarks"].items():
        before: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for row in timed(old["benchmarks"].get(benchmark, {"rows": []})["rows"]):
            before.setdefault(_key(row), []).append(row)
        for row in timed(part["rows"]):
            rows = before.get(_key(row), [])
            same = [r for r in rows if identity(r) == identity(row)]
            for earlier in (same or rows)[-1:]:
                shared = row["peers"].keys() & earlier["peers"].keys()
                peer = next((p for p in PEERS if p in shared and p != row["name"]), "")
                found.append(Pair(benchmark, earlier, row, peer))
    return found


def timed(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows that have a time; whole steps appear a second time as replayed from graphs."""
    dense = {row["shape"]: row["figures"].get(GRAPHS) for row in rows if row["name"] == "dense"}
    for row in rows:
        if row["ms"] is None:
            continue
        yield row
        ms = row["figures"].get(GRAPHS)
        if ms is None:
            continue
        ratio = row["figures"].get(OVER_DENSE)  # newer records have the comparison's own ratio
        peer = dense.get(row["shape"]) if ratio is None else ratio * ms
        peers = {} if peer is None else {"dense": peer}
        yield {**row, "name": f"{row['name']}, in graphs", "ms": ms, "peers": peers, "figures": {}}


def _key(row: dict[str, Any]) -> tuple[str, ...]:
    return row["name"], row["dtype"], row["shape"]


def cells(pair: Pair) -> list[str]:
    old, new = pair.old["ms"], pair.new["ms"]
    speeds = [f"{s:.2f}" for s in pair.speeds] if pair.peer else ["", ""]
    verdict = f"slower by {pair.slower:.0%}" if pair.slower > WITHIN else ""
    if not verdict and pair.slower < -WITHIN:
        verdict = f"faster by {1 / (1 + pair.slower) - 1:.0%}"
    return [
        pair.benchmark, *_key(pair.new), f"{old:.4g}", f"{new:.4g}", f"{new / old:.2f}", pair.peer,
        *speeds, verdict,
    ]  # fmt: skip


def compare(old: Path, new: Path, table: Path | None = None) -> bool:
    """Print the rows of both records (and write them to `table` as Markdown); True if none is
    slower by more than WITHIN."""
    records = read_record(old), read_record(new)
    if records[0]["device"] != records[1]["device"]:
        devices = " and ".join(record["device"] for record in records)
        raise UserError(f"{old} and {new} are records of two devices, {devices}")
    found = pairs(*records)
    if not found:
        raise UserError(f"{old} and {new} have no timed row in common")
    lines = [cells(pair) for pair in found]
    slower = [pair for pair in found if pair.slower > WITHIN]
    names = "; ".join(f"{p.benchmark} {p.new['name']}, {p.new['shape']}" for p in slower)
    summary = f"{len(found)} rows in both; slower by more than {WITHIN:.0%}: {len(slower)}"
    summary += f" ({names})" if slower else ""
    shown = rich.table.Table(*HEADS, box=rich.box.SIMPLE, pad_edge=False)
    for line in lines:
        shown.add_row(*map(rich.markup.escape, line))
    rich.console.Console(width=180).print(shown)
    print(summary)
    if table is not None:
        rule = ["---"] * len(HEADS)
        rows = "\n".join(f"| {' | '.join(line)} |" for line in (HEADS, rule, *lines))
        write_text(table, f"{rows}\n\n{summary}\n")
    return not slower
