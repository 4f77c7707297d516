"""Committed records: `evidence/BLOCK.jsonl` has a line for each run, `BLOCK.curves.csv` the curves.

A line has all entries of the runner's file except `curves`, and three hashes: its own (`sha256`),
that of the run's rows in the CSV (`curves_sha256`) and that of the file (`file_sha256`).
"""

import hashlib
import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from experiments.support.checkpoint import sealed, unsealed, write_text
from experiments.support.errors import UserError

QUANTITIES = ("val_loss", "loss", "flip_rate", "grad_norm")

Json = dict[str, Any]
Packed = dict[tuple[str, int], Json]  # (variant, seed) -> record
PLACE = ("file", "line")  # of a record that was read: its file, and its line or 0


def run_name(variant: str, seed: int) -> str:
    """The name of a run within its block, and of its file."""
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in variant) + f"-seed{seed}"


def read_packed(folder: Path, block: str) -> Packed:
    """The packed records of a block, with their curves; {} if there are none."""
    path = folder / f"{block}.jsonl"
    texts = [p.read_text(encoding="utf-8") if p.is_file() else "" for p in (path, _curves_of(path))]
    return _parsed(path, *texts)


@lru_cache
def _parsed(path: Path, lines: str, csv: str) -> Packed:
    rows: dict[str, tuple[int, list[str]]] = {}
    for number, row in enumerate(csv.splitlines(), 1):
        rows.setdefault(row.partition(",")[0], (number, []))[1].append(row)
    found: Packed = {}
    for number, line in enumerate(lines.splitlines(), 1):
        try:
            record = json.loads(line)
            if "sha256" not in record:
                raise ValueError("no sha256 in it")
            record = unsealed(record)
        except ValueError as error:
            raise UserError(f"{path}, line {number}, is damaged ({error}); restore it") from error
        variant, seed = record["variant"], record["seed"]
        first, own = rows.get(name := run_name(variant, seed), (1, []))
        if _hash(own) != record.pop("curves_sha256"):
            why = f"the curves of {name} do not fit their sha256 in line {number} of {path.name}"
            where = f"{_curves_of(path)}, line {first} and following"
            raise UserError(f"{where}, is damaged ({why}); restore it")
        curves: dict[str, list[list[float | None]]] = {quantity: [] for quantity in QUANTITIES}
        for row in own:
            _, quantity, step, value = row.split(",")
            curves[quantity].append([int(step), float(value) if value else None])
        found[variant, seed] = record | {"curves": curves, "file": path, "line": number}
    return found


def write_packed(folder: Path, block: str, records: Iterable[Json]) -> None:
    """Write the packed records of a block, which have `curves` and `file_sha256`.

    Lines that change are taken out before the curves are written and come back after them, so that
    at any moment all curves fit.
    """
    lines, csv = [], ["run,quantity,step,value"]
    for record in sorted(records, key=lambda record: (record["variant"], record["seed"])):
        name = run_name(record["variant"], record["seed"])
        rows = [
            f"{name},{quantity},{step},{'' if value is None else repr(float(value))}"
            for quantity in QUANTITIES
            for step, value in record["curves"].get(quantity, [])
        ]
        csv += rows
        entries = {k: value for k, value in record.items() if k not in ("curves", *PLACE)}
        lines.append(json.dumps(sealed({**entries, "curves_sha256": _hash(rows)})))
    path = folder / f"{block}.jsonl"
    before = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    _write(path, [line for line in lines if line in before])
    _write(_curves_of(path), csv)
    _write(path, lines)


def _write(path: Path, lines: list[str]) -> None:
    write_text(path, "".join(f"{line}\n" for line in lines))


def _curves_of(path: Path) -> Path:
    return path.with_suffix(".curves.csv")


def _hash(rows: list[str]) -> str:
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()
