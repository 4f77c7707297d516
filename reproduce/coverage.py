"""Lists every table and figure of the papers: the spec that covers it, or the reason why none does.

The list is in `coverage.yaml`. Neither torch nor a driver is imported here, so that `python -m
reproduce --list` answers at once.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from reproduce.reading import read_rows, read_yaml
from reproduce.spec import Table

HERE = Path(__file__).parent
FILE = HERE / "coverage.yaml"


@dataclass(frozen=True)
class Item:
    """One table or figure of a paper, or a range of them. reason: why it has no spec; "" if it has
    one."""

    paper: str
    number: str
    caption: str
    reason: str = ""

    @property
    def name(self) -> str:
        """The name in words, `table 6` or `figure 7`."""
        kind = "" if self.number.startswith(("figure", "appendix")) else "table "
        return kind + self.number.replace("figure", "figure ")

    @property
    def command(self) -> str:
        """Its name on the command line, as `Table.command`."""
        return self.name.replace(" ", "")

    @property
    def count(self) -> int:
        """How many tables or figures it is: 4 for the range `B6-B9`."""
        ends = [int(end) for end in re.findall(r"\d+", self.number)]
        return ends[-1] - ends[0] + 1 if ends else 0


def items(path: Path = FILE) -> dict[str, list[Item]]:
    """The tables and figures by the title of their paper, in the order of the paper. The `paper` of
    an item is the name that `paper=` takes."""
    return {
        paper["title"]: [
            Item(key, str(number), **({"caption": entry} if isinstance(entry, str) else entry))
            for number, entry in paper["items"].items()
        ]
        for key, paper in read_yaml(path).items()
    }


def state(table: Table, tier: str, runs: Path) -> str:
    """The state of a tier in words: how many runs were done when it was last made here, and which
    results are committed.

    The runs are counted by the file that `make` wrote: looking at the runs themselves would mean
    composing every config of every table.
    """
    made = read_progress(table, tier, runs)
    parts = [] if made is None else [f"{made['done']} of {made['jobs']} runs done at the last call"]
    if table.tiers[tier].block:
        committed, wanted = _records(table, tier)
        parts += [f"committed records of {committed} of {wanted} runs"] if committed else []
    elif file := measured_file(table, tier):
        parts.append(f"measured: {file}")
    return "; ".join(parts) or "not made"


def measured_file(table: Table, tier: str) -> str:
    """The path in the repository of the committed table of a tier that has numbers in all rows; ""
    if there is none."""
    path = with_numbers(table, tier)
    return "" if path is None else path.with_suffix(".md").relative_to(HERE.parent).as_posix()


def read_progress(table: Table, tier: str, runs: Path) -> dict[str, Any] | None:
    """The result of `progress` when a tier was last made here; None if it never was."""
    path = stem(table, tier, runs).with_suffix(".json")
    if not path.is_file():
        return None
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def progress(jobs: int, done: int) -> dict[str, Any]:
    """The content of the file that says how many of a tier's `jobs` are `done`."""
    return {"jobs": jobs, "done": done}


def stem(table: Table, tier: str, runs: Path) -> Path:
    """The path of a tier's files without their suffixes."""
    return runs / "tables" / f"{table.name}-{tier}"


def lines(tables: list[Table], runs: Path, papers: dict[str, list[Item]]) -> list[str]:
    """The lines that `--list` prints."""
    text = []
    own = [table for table in tables if table.paper is None]
    for table in own:
        text += [table.title, *_tiers(table, runs)]
    for title, listed in papers.items():
        text += ["", f"{title}  (paper={listed[0].paper})"]
        for item in listed:
            text.append(f"  {item.name}: {item.caption}")
            specs = [t for t in tables if (t.paper, t.number) == (item.paper, item.number)]
            if not specs:
                text.append(f"    not covered: {item.reason}")
            for table in specs:
                text += [f"  {line}" for line in _tiers(table, runs)]
    every = [item for listed in papers.values() for item in listed]
    return [*text, "", counts(tables, runs, every)] if every else text


def counts(tables: list[Table], runs: Path, known: list[Item]) -> str:
    """A line with the numbers of tables and figures: all, covered by a spec, run, and measured."""
    specs: dict[tuple[str | None, str | None], list[Table]] = {}
    for table in tables:
        specs.setdefault((table.paper, table.number), []).append(table)
    # The parts of a figure are separate specs: the figure counts if all of its parts do.
    covered = {item: specs[key] for item in known if (key := (item.paper, item.number)) in specs}
    run = [item for item, parts in covered.items() if all(was_run(t, runs) for t in parts)]
    measured = [item for item, parts in covered.items() if all(map(was_measured, parts))]
    n, n_covered, n_run, n_measured = (
        sum(item.count for item in some) for some in (known, covered, run, measured)
    )
    return (
        f"{n} numbered tables and figures: {n_covered} covered by a spec, {n - n_covered} not, "
        f"each with its reason; {n_run} run here (all runs of a tier); {n_measured} measured (a "
        "committed table of the full tier, or committed records of the tier mini, with numbers in "
        "all rows)"
    )


def was_run(table: Table, runs: Path) -> bool:
    """True if all runs of a tier were done when it was last made here."""
    made = [read_progress(table, tier, runs) for tier in table.tiers]
    return any(one is not None and one["jobs"] == one["done"] for one in made)


def was_measured(table: Table) -> bool:
    """True if results are committed for all rows of a tier: of the full tier a measured table, of a
    tier that shows a block its records.

    Whether the config of a record is still that of the block shows only when the table is made.
    """
    return any(
        _has_records(table, name)
        if tier.block
        else name == "full" and with_numbers(table, name) is not None
        for name, tier in table.tiers.items()
        if not tier.unavailable
    )


def with_numbers(table: Table, tier: str) -> Path | None:
    """The CSV file of the committed table of a tier, if it has numbers in all rows."""
    wanted = {(v.label, row.label) for v, row, _ in table.trainings(tier) if not row.stage}
    for path in (HERE / "measured").glob(f"*/{table.name}-{tier}.csv"):
        found = {
            (line.get("of", ""), line["method"])
            for line in read_rows(path)
            if line["tier"] == tier
            and any(name.endswith(": n") and int(n or 0) for name, n in line.items())
        }
        if wanted and wanted <= found:
            return path
    return None


def _has_records(table: Table, tier: str) -> bool:
    seeds = [_seeds(table.tiers[tier].block, variant, tier) for variant in _variants(table, tier)]
    return bool(seeds) and all(seeds)


def _variants(table: Table, tier: str) -> set[str]:
    return {row.variant for row in table.rows_of(tier) if row.variant}


def _records(table: Table, tier: str) -> tuple[int, int]:
    """The numbers of committed records and of runs of a tier that shows a block; (0, 0) without
    records."""
    block, variants = table.tiers[tier].block, _variants(table, tier)
    committed = sum(len(_seeds(block, variant, tier)) for variant in variants)
    if not committed:
        return 0, 0
    # The seeds are those of the block: such a tier has none of its own.
    return committed, len(variants) * _seeds_of_block(HERE / "blocks" / f"{block}.yaml")


@cache
def _seeds_of_block(path: Path) -> int:
    return len(read_yaml(path)["seeds"])


def _seeds(block: str, variant: str, tier: str) -> list[int]:
    """The seeds of a variant that have a committed record of this tier."""
    folder, _, name = variant.rpartition("/")
    return [
        record["seed"]
        for record in _records_of(HERE / "evidence" / f"{folder or block}.jsonl")
        if record["variant"] == name and record["metrics"] and f"tier={tier}" in record["overrides"]
    ]


@cache
def _records_of(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines]


def sizes(table: Table, tier: str) -> tuple[int, int]:
    """The numbers of runs and of evaluations of a tier. Rows with the same overrides share a run,
    and stages are not evaluated."""
    chosen, measured = table.tiers[tier], set()
    runs: dict[tuple[str, str, int], tuple[Any, ...]] = {}  # by place: what the run depends on
    for variant, row, seed in table.trainings(tier):
        own = [*variant.overrides, *row.overrides, *row.tiers.get(tier, [])]
        source = None
        if row.starts_from is not None and not chosen.pretrained:
            source = runs[variant.label, row.starts_from, seed]
        run = (*(o.replace("{variant}", variant.key) for o in own), seed, source)
        runs[variant.label, row.label, seed] = run
        for name, measure in ({} if row.stage else chosen.measure).items():
            given = (name, *row.measure.get(name, []))
            measured |= {(run, given, task) for task in measure.tasks or [""]}
    return len(set(runs.values())), len(measured)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _tiers(table: Table, runs: Path) -> list[str]:
    """A line for each tier of a table."""
    text = []
    for name, tier in table.tiers.items():
        if tier.unavailable:
            text.append(f"  {table.command} tier={name}: not offered: {tier.unavailable}")
            continue
        if tier.block:
            shown = f"from block {tier.block}: `python -m reproduce run {tier.block}`"
            text.append(f"  {table.command} tier={name}: {state(table, name, runs)} ({shown})")
            continue
        trained, measured = sizes(table, name)
        size = _count(trained, "run") + (f", {_count(measured, 'evaluation')}" if measured else "")
        needs = f"; needs {tier.needs}" if tier.needs else ""
        text.append(f"  {table.command} tier={name}: {state(table, name, runs)} ({size}{needs})")
    return text
