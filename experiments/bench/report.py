"""The record of a device, which collects rows, and the table made from it.

A record is one JSON file for one device:

    {"device": NAME, "benchmarks": {BENCHMARK: {"rows": [...], "left_out": [...]}}}

A row says what ran, where, and with which versions, so a record may hold rows of several runs. A
new row replaces an older one with the same name, dtype, shape and backend, whatever its products.
"""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from experiments.bench.timing import SETTLE_LIMIT_S, SETTLED, TURNS, Time, load_text
from experiments.support.checkpoint import write_json
from experiments.support.errors import UserError
from experiments.support.results import cpu_name, git_state, version_of

KEY = ("name", "dtype", "shape", "backend")
PRODUCTS = {"fprop", "dgrad", "wgrad", "Y", "dX", "dW"}  # the last three are of older records
MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One line of a benchmark: a name with its times, peers and limit.

    backend: what did the work. time: None if only memory was measured.
    peers: median milliseconds of peers that do the same work, measured in turns with this row.
    limit_ms: the time for the work's bytes at the measured bandwidth of a copy, or for its
        operations at the measured rate of the dense product.
    figures: further numbers by names that end in their unit.
    """

    name: str
    dtype: str
    shape: str
    backend: str
    time: Time | None = None
    peers: dict[str, float] = field(default_factory=dict)
    limit_ms: float | None = None
    figures: dict[str, float] = field(default_factory=dict)


def flat(row: Row) -> dict[str, Any]:
    """The row as plain values for a record, with `share` of the limit."""
    values = asdict(row)
    time = values.pop("time") or dict.fromkeys(Time.__dataclass_fields__)
    share = row.limit_ms / row.time.ms if row.time and row.limit_ms is not None else None
    return {**{key: values.pop(key) for key in KEY}, **time, **values, "share": share}


def provenance(device: torch.device, revision: str | None) -> dict[str, Any]:
    """Device, versions and git revision, which every row carries."""
    git = git_state()
    on_gpu = device.type == "cuda"
    cusparselt = torch.backends.cusparselt
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "cuda": torch.version.cuda if on_gpu else None,
        "cusparselt": cusparselt.version() if on_gpu and cusparselt.is_available() else None,
        "revision": revision or git["git_revision"],
        "modified": None if revision else git["git_dirty"],
    }


def identity(row: dict[str, Any]) -> tuple[str, ...]:
    """The name, dtype, shape and backend of a row, which identify it within a benchmark."""
    words = set(row["backend"].replace(",", " ").replace(";", " ").split()) - PRODUCTS
    return row["name"], row["dtype"], row["shape"], *sorted(words)


class Report:
    """Collects the rows of one benchmark and saves the record after each of them."""

    def __init__(
        self,
        benchmark: str,
        device: torch.device,
        out: Path,
        only: Sequence[str] = ("*",),
        revision: str | None = None,
        whole: bool = False,
        silent: bool = False,
    ) -> None:
        """whole: rows of an earlier run are removed. silent: as on ranks other than 0."""
        self.benchmark, self.out, self.only = benchmark, out, only
        self.whole, self.silent = whole, silent
        self.environment = provenance(device, revision)
        self.rows: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        self.refused: list[str] = []
        here = self.environment["device"]
        self.record = read_record(out) if out.exists() else {"device": here, "benchmarks": {}}
        if (other := self.record["device"]) != here:
            raise UserError(
                f"{out} is the record of {other} and this is {here}; choose another --out"
            )
        self.earlier = self.record["benchmarks"].get(benchmark, {"rows": []})["rows"]

    def chosen(
        self, names: Iterable[str], option: str = "--only", globs: Sequence[str] = ()
    ) -> list[str]:
        """The `names` that an option's globs select. Raises a `UserError` if there are none."""
        names, globs = list(names), globs or self.only
        found = [n for n in names if any(fnmatchcase(n, glob) for glob in globs)]
        if not found:
            raise UserError(f"{option} {' '.join(globs)} matches none of: {'; '.join(names)}")
        return found

    def lacking(self, names: list[str]) -> list[str]:
        """The names without a row of this revision of the code in the record."""
        mine = self.environment["revision"]
        there = {row["name"] for row in self.earlier if row["revision"] == mine}
        return [name for name in names if name not in there]

    def note(self, text: str) -> None:
        """Print a line of progress."""
        if not self.silent:
            print(text, file=sys.stderr)

    def add(self, row: Row) -> None:
        self.rows.append({**flat(row), **self.environment})
        self.save(self.earlier)
        if row.time:
            self.note(f"{row.name}, {row.shape}, {row.dtype}: {row.time.ms:.4g} ms")

    def leave_out(self, text: str) -> None:
        if text not in self.left_out:
            self.left_out.append(text)

    def refuse(self, text: str) -> None:
        """Leave out something with a wrong result; the command will end with status 1."""
        self.note(text)
        self.refused.append(text)
        self.leave_out(text)

    def save(self, earlier: list[dict[str, Any]]) -> None:
        """Save the record: the new rows replace rows of `earlier` with the same keys."""
        rows = list({identity(row): row for row in [*earlier, *self.rows]}.values())
        self.record["benchmarks"][self.benchmark] = {"rows": rows, "left_out": self.left_out}
        if not self.silent:
            write_json(self.out, self.record)

    def finish(self) -> None:
        """Print the table and save the record. A whole run removes all rows of an earlier one."""
        self.save([] if self.whole else self.earlier)
        if self.silent:
            return
        print(table(self.rows, HIDDEN))
        for text in self.left_out:
            self.note(f"left out: {text}")
        self.note(f"written to {self.out}")


def read_record(path: Path) -> dict[str, Any]:
    """The record in `path`. Raises a `UserError` if there is none."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(record, dict) or not {"device", "benchmarks"} <= record.keys():
        raise UserError(f"{path} is not a record of benchmarks; choose another file")
    return record


# --- tables --------------------------------------------------------------------------------------


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


CELLS: dict[str, Callable[[dict[str, Any]], str]] = {  # by heading, of a row
    **{key: itemgetter(key) for key in KEY},
    "ms": lambda row: _number(row["ms"]),
    "p20": lambda row: _number(row["p20"]),
    "p80": lambda row: _number(row["p80"]),
    "times as fast as": lambda row: "; ".join(
        f"{name} {ms / row['ms']:.2f}" for name, ms in row["peers"].items()
    ),
    "limit, ms": lambda row: _number(row["limit_ms"]),
    "share": lambda row: "" if row["share"] is None else f"{row['share']:.0%}",
    "figures": lambda row: "; ".join(f"{n} {_figure(v)}" for n, v in row["figures"].items()),
}
HIDDEN = ("p20", "p80", "limit, ms")  # on a terminal
TEXTS = (*KEY, "times as fast as", "figures")  # no numbers


def table(rows: list[dict[str, Any]], hidden: Sequence[str] = ()) -> str:
    """Rows as a Markdown table, without the columns that are `hidden` or empty."""
    columns = {head: [*map(cell, rows)] for head, cell in CELLS.items() if head not in hidden}
    shown = {head: column for head, column in columns.items() if any(column)}
    rule = ["---" if head in TEXTS else "--:" for head in shown]
    lines = [[*shown], rule, *zip(*shown.values(), strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


EXPLANATION = """\
Milliseconds: median, 20th and 80th percentile. *Times as fast as*: median of the peer, measured in
turns with the row, over this median. *Limit*: bytes at the bandwidth of a copy, or operations at
the rate of a dense product of the same shape, both measured in the same run (a sparse product
counts half). *Share*: limit over median. Under a sustained load a GPU lowers its clock, for dense
products more than for sparse ones; rows below "in bursts" were measured after idle time.
"""


def markdown(record: dict[str, Any]) -> str:
    """The tables of all benchmarks of a record, as Markdown."""
    parts = [f"# Benchmarks on {record['device']}", EXPLANATION]
    for name, benchmark in record["benchmarks"].items():
        rows, left_out = benchmark["rows"], benchmark["left_out"]
        parts += [f"## {name}", *dict.fromkeys(map(versions, rows)), *loads(rows)]
        parts.append(table(rows))
        if left_out:
            parts.append("Left out:\n\n" + "\n".join(f"- {text}" for text in left_out))
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def versions(row: dict[str, Any]) -> str:
    """The versions and the revision that a row was measured with."""
    names = {"torch": "torch", "triton": "triton", "cuda": "CUDA", "cusparselt": "cuSPARSELt"}
    known = [f"{label} {row[key]}" for key, label in names.items() if row[key] is not None]
    revision = (row["revision"] or "unknown revision")[:12] + (" modified" * bool(row["modified"]))
    return ", ".join([*known, revision])


def loads(rows: list[dict[str, Any]]) -> list[str]:
    """Lines on the GPU's clock and power while the timed rows were measured; [] on a CPU."""
    timed = [row for row in rows if row["ms"] is not None and row["clock"] != "host"]
    known, lines = [row for row in timed if "mhz" in row], []
    if known:
        text = load_text((row["mhz"] for row in known), (row["watts"] for row in known))
        lines.append(text[0].upper() + text[1:] + ".")
    if warmed := [row for row in known if row.get("settled") is not None]:
        seconds = sorted(row["warm_s"] for row in warmed)
        restless = sum(not row["settled"] for row in warmed)
        late = f" (not so within {SETTLE_LIMIT_S:.0f} s: {restless} rows)" if restless else ""
        lines.append(
            f"Blocks of whole steps: warm for {seconds[0]:.0f} to {seconds[-1]:.0f} s, until "
            f"{TURNS} turns took the same time to {SETTLED:.0%}{late}."
        )
    if len(known) < len(timed):
        lines.append(f"In bursts, after idle time: {len(timed) - len(known)} of {len(rows)} rows.")
    return lines
