"""Writes the lines above a table by the texts in `header.jinja`."""

from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from experiments.bench.timing import load_text
from reproduce.execute.jobs import PlacedRun
from reproduce.records import setting
from reproduce.render.cells import DENSE, MARK, OTHER, measured, published_cell, unmatched
from reproduce.specs.table import BENCH, Table

Facts = dict[str, Any]  # on the runs of a table, as `facts` gives them
_TEXT = Path(__file__).with_name("header.jinja").read_text(encoding="utf-8")
TEMPLATE = Environment(trim_blocks=True, undefined=StrictUndefined).from_string(_TEXT)
# The facts that have lines.
NAMED = ("Corpus", "Device", "Peak memory", "Code", "Products", "Dense", "Clocks")


def header(table: Table, tier: str, known: Facts, unknown: set[str]) -> list[str]:
    """The lines above a table. known: the facts on its runs. unknown: labels of the columns for
    which there is neither a value of the paper's nor one of ours."""
    chosen, rows = table.tiers[tier], table.rows_of(tier)
    variants = table.variants_of(tier)
    lacking = [c.label for c in table.columns if not measured(table, tier, c)]
    unknown_tables, names = unmatched(table)
    text = TEMPLATE.render(
        MARK=MARK,
        OTHER=OTHER,
        NAMED=NAMED,
        table=table,
        tier=tier,
        chosen=chosen,
        rows=rows,
        variants=[variant.label for variant in variants if variant.label],
        n=len(chosen.seeds),
        wanted=len(list(table.trainings(tier))),
        measures=table.driver == BENCH,
        shrinks=any(override.startswith("shrink=") for override in chosen.overrides),
        intervals=any(column.show == "interval" for column in table.columns),
        absent={
            "rows": [row.label for row in table.rows if row not in rows and not row.stage],
            "rows of": [one.label for one in table.variants if one not in variants],
        },
        lacking=lacking,
        unknown=[label for label in lacking if label in unknown],
        reservations=_reservations(table, tier),
        unknown_tables=unknown_tables,
        unmatched=names,
        known=known,
    )
    return [line for line in text.splitlines() if line]


def _reservations(table: Table, tier: str) -> dict[str, list[str]]:
    """The rows whose published values are second-hand or doubtful, by source and reason; {} in the
    smoke tier, which shows no published value."""
    found: dict[str, list[str]] = {}
    variants = table.variants_of(tier) if tier != "smoke" else []
    for variant, row, column in product(variants, table.shown_rows(tier), table.columns):
        cell = published_cell(table, variant, row, column)
        if cell is not None and row.label not in found.setdefault(cell.reservation, []):
            found[cell.reservation].append(row.label)
    found.pop("", None)
    return found


def facts(table: Table, tier: str, runs: list[PlacedRun]) -> Facts:
    """The facts on the runs that the header tells: their number, data, device and code."""
    known: Facts = {
        "runs": len(runs),
        "Corpus": _common(_corpus, runs),
        "Device": _common(_device, runs),
        "Code": _common(lambda r: revision(r["environment"]), runs),
    }
    if table.tiers[tier].block:
        known["scale"] = setting(run.result for run in runs)
    if table.driver == BENCH and runs:
        first, *others = {run.result["backend"] for run in runs}
        several = "not the same for all runs; the column backend of -runs.csv names them"
        known["Products"] = several if others else first
        if runs[0].result["config"]["sustained_s"] is not None:  # on a GPU
            metrics = [run.result["metrics"] for run in runs]
            mhz, watts = ([values.get(name) for values in metrics] for name in ("sm_mhz", "watts"))
            known["Clocks"] = load_text(mhz, watts)
            peak = max(run.result["environment"].get("peak_memory_bytes", 0) for run in runs)
            known["Peak memory"] = f"{peak / 1e9:.1f} GB" if peak else ""
            if rows := dict.fromkeys(run.place.row for run in runs if all_dense(run.result)):
                known["Dense"] = (
                    f"{'; '.join(rows)}: no 2:4 product was measured to be faster, so the products "
                    f"are dense ones of a pruned weight (marked {DENSE})"
                )
    return known


def all_dense(result: dict[str, Any]) -> bool:
    """True if a method was measured on a GPU without any sparse product."""
    config = result.get("config", {})  # the record of a block has none
    used = result.get("backend", "").partition(",")[0]
    on_gpu = config.get("sustained_s") is not None
    return on_gpu and used == "dense" and config.get("method", "dense") != "dense"


def _common(fact: Callable[[dict[str, Any]], str], runs: list[PlacedRun]) -> str:
    """A fact on the runs' results; "" if no result has it. If it is not the same for all runs, that
    of most runs comes first, and the rows of the others are named."""
    rows: dict[str, Counter[str]] = {}
    for run in runs:
        if text := fact(run.result):
            rows.setdefault(text, Counter())[run.place.row] += 1
    if len(rows) < 2:
        return "".join(rows)
    most, *fewer = sorted(rows, key=lambda text: -rows[text].total())
    of = {text: ", ".join(f"{n} of {row}" for row, n in rows[text].items()) for text in fewer}
    return f"{most}, except {'; '.join(f'{text} ({named})' for text, named in of.items())}"


def _corpus(result: dict[str, Any]) -> str:
    if "corpus" not in result:
        return ""
    manifest = result["corpus"]
    train, val = manifest["splits"]["train"], manifest["splits"]["val"]
    unit = "images" if "images" in train else "tokens"
    whole = [manifest] if unit == "images" else [train, val]
    hashes = ", ".join(part["sha256"][:12] for part in whole)
    sizes = f"{train[unit]:,} training and {val[unit]:,} validation {unit}"
    return f"{manifest['name']}, {sizes} (sha256 {hashes})"


def _device(result: dict[str, Any]) -> str:
    environment, ranks = result["environment"], result.get("world_size", 1)
    parts = [f"{ranks} x " * (ranks > 1) + environment["device"]]
    if "config" in result:  # not the record of a block
        threads, impl = environment["threads"], result["config"].get("impl")
        parts.append(f"{threads} thread" + "s" * (threads != 1))
        if impl is not None:
            parts += [
                result["config"]["train"]["dtype"],
                "compiled" if impl["compile"] else "",
                f"micro-batch {impl['micro_batch']}" if impl["micro_batch"] else "",
                f"backend {result['backend']}",
            ]
    parts.append(f"torch {environment['versions']['torch']}")
    return ", ".join(part for part in parts if part)


def revision(environment: dict[str, Any]) -> str:
    """The revision of the code in words. environment: with the entries of `git_state`."""
    if environment["git_revision"] is None:
        return "unknown revision (no git checkout)"
    changed = " with uncommitted changes" if environment["git_dirty"] else ""
    return f"revision {environment['git_revision'][:12]}{changed}"
