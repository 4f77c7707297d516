"""Lists every table and figure of the papers, from `coverage.yaml`, with a spec or the reason why
there is none.

Needs neither torch nor the drivers: `python -m reproduce --list` answers at once.
"""

from __future__ import annotations

import csv
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from reproduce.spec import Table

HERE = Path(__file__).parent
FILE = HERE / "coverage.yaml"


@dataclass(frozen=True)
class Item:
    """One table or figure of a paper. reason: why it has no spec, if so."""

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
        """The word of the command line that asks for it, as `Table.command`."""
        return self.name.replace(" ", "")

    @property
    def count(self) -> int:
        """The number of tables or figures that it stands for: those of a range, `B6-B9`, say."""
        ends = [int(end) for end in re.findall(r"\d+", self.number)]
        return ends[-1] - ends[0] + 1 if ends else 0


def items(path: Path = FILE) -> dict[str, list[Item]]:
    """The tables and figures by the papers' titles, in the papers' order; each has the paper's name
    as in `paper=`."""
    return {
        paper["title"]: [
            Item(key, str(number), **({"caption": entry} if isinstance(entry, str) else entry))
            for number, entry in paper["items"].items()
        ]
        for key, paper in _read(path).items()
    }


def _read(path: Path) -> Any:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(path.read_text(encoding="utf-8"), loader)


def state(table: Table, tier: str, runs: Path) -> str:
    """The number of runs of a tier that were done when it was last made, by the file that `make`
    wrote, since looking at the runs themselves would compose every config of every table; and what
    is committed of it."""
    made = read_record(table, tier, runs)
    told = [] if made is None else [f"{made['done']} of {made['jobs']} runs done at the last call"]
    if table.tiers[tier].block:
        kept, wanted = _records(table, tier)
        told += [f"committed records of {kept} of {wanted} runs"] if kept else []
    elif file := measured_file(table, tier):
        told.append(f"measured: {file}")
    return "; ".join(told) or "not made"


def measured_file(table: Table, tier: str) -> str:
    """The committed table of a tier with numbers in all rows, by its path in the repository; "" if
    there is none."""
    found = _with_numbers(table, tier)
    return "" if found is None else found.with_suffix(".md").relative_to(HERE.parent).as_posix()


def read_record(table: Table, tier: str, runs: Path) -> dict[str, Any] | None:
    """The `record` of a tier, or None if it was not made."""
    path = stem(table, tier, runs).with_suffix(".json")
    if not path.is_file():
        return None
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def record(jobs: int, done: int) -> dict[str, Any]:
    """The content of the file that `read_record` reads."""
    return {"jobs": jobs, "done": done}


def stem(table: Table, tier: str, runs: Path) -> Path:
    """Path of a tier's files, without their suffixes."""
    return runs / "tables" / f"{table.name}-{tier}"


def lines(tables: list[Table], runs: Path, papers: dict[str, list[Item]]) -> list[str]:
    """The lines that `--list` prints."""
    told = []
    own = [table for table in tables if table.paper is None]
    for table in own:
        told += [table.title, *_tiers(table, runs)]
    for title, known in papers.items():
        told += ["", f"{title}  (paper={known[0].paper})"]
        for item in known:
            told.append(f"  {item.name}: {item.caption}")
            found = [t for t in tables if (t.paper, t.number) == (item.paper, item.number)]
            if not found:
                told.append(f"    not covered: {item.reason}")
            for table in found:
                told += [f"  {line}" for line in _tiers(table, runs)]
    return [*told, "", counts(tables, runs, [item for known in papers.values() for item in known])]


def counts(tables: list[Table], runs: Path, known: list[Item]) -> str:
    """A line that counts the numbered tables and figures: all, covered, run and measured."""
    specs: dict[tuple[str | None, str | None], list[Table]] = {}
    for table in tables:
        specs.setdefault((table.paper, table.number), []).append(table)
    # Parts of a figure are specs of their own: it counts when all of them do.
    covered = {item: specs[key] for item in known if (key := (item.paper, item.number)) in specs}
    run = [item for item, parts in covered.items() if all(was_run(t, runs) for t in parts)]
    kept = [item for item, parts in covered.items() if all(map(was_measured, parts))]
    of, having, ran, measured = (sum(i.count for i in part) for part in (known, covered, run, kept))
    return (
        f"{of} numbered tables and figures: {having} covered by a spec, {of - having} not, each "
        f"with its reason; {ran} run here (all runs of a tier); {measured} measured (a committed "
        "table of the full tier, or committed records of the tier mini, with numbers in all rows)"
    )


def was_run(table: Table, runs: Path) -> bool:
    """True if all runs of a tier were done when it was last made here."""
    made = [read_record(table, tier, runs) for tier in table.tiers]
    return any(one is not None and one["jobs"] == one["done"] for one in made)


def was_measured(table: Table) -> bool:
    """True if a table of the full tier or the records of a block's tier are committed, with numbers
    of that tier in all rows that it runs. Whether a record's config is today's, only making the
    table can tell."""
    return any(
        _has_records(table, name)
        if tier.block
        else name == "full" and _with_numbers(table, name) is not None
        for name, tier in table.tiers.items()
        if not tier.unavailable
    )


def _with_numbers(table: Table, tier: str) -> Path | None:
    wanted = {(v.label, row.label) for v, row, _ in table.trainings(tier) if not row.stage}
    for path in (HERE / "measured").glob(f"*/{table.name}-{tier}.csv"):
        with path.open(encoding="utf-8", newline="") as file:
            found = {
                (line.get("of", ""), line["method"])
                for line in csv.DictReader(file)
                if line["tier"] == tier
                and any(name.endswith(": n") and int(n or 0) for name, n in line.items())
            }
        if wanted and wanted <= found:
            return path
    return None


def _has_records(table: Table, tier: str) -> bool:
    found = [_seeds(table.tiers[tier].block, arm, tier) for arm in _arms(table, tier)]
    return bool(found) and all(found)


def _arms(table: Table, tier: str) -> set[str]:
    return {row.arm for row in table.rows_of(tier) if row.arm}


def _records(table: Table, tier: str) -> tuple[int, int]:
    """(committed records, runs) of a block's tier; (0, 0) without records."""
    block, arms = table.tiers[tier].block, _arms(table, tier)
    kept = sum(len(_seeds(block, arm, tier)) for arm in arms)
    # The block has the seeds: its tier has none of its own.
    return kept, len(arms) * _seeds_of_block(HERE / "blocks" / f"{block}.yaml") if kept else 0


@cache
def _seeds_of_block(path: Path) -> int:
    return len(_read(path)["seeds"])


def _seeds(block: str, arm: str, tier: str) -> list[int]:
    """The seeds of which an arm has a committed record of this tier."""
    folder, _, name = arm.rpartition("/")
    paths = (HERE / "evidence" / (folder or block)).glob(f"{name}-seed*.json")
    records = (json.loads(path.read_text(encoding="utf-8")) for path in paths)
    return [r["seed"] for r in records if r["metrics"] and f"tier={tier}" in r["overrides"]]


def sizes(table: Table, tier: str) -> tuple[int, int]:
    """(runs, evaluations of them) of a tier. Rows share what is the same, and stages are not
    evaluated."""
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
    told = []
    for name, tier in table.tiers.items():
        if tier.unavailable:
            told.append(f"  {table.command} tier={name}: not offered: {tier.unavailable}")
            continue
        if tier.block:
            shown = f"all of block {tier.block}: `python -m reproduce run {tier.block}`"
            told.append(f"  {table.command} tier={name}: {state(table, name, runs)} ({shown})")
            continue
        trained, measured = sizes(table, name)
        size = _count(trained, "run") + (f", {_count(measured, 'evaluation')}" if measured else "")
        needs = f"; needs {tier.needs}" if tier.needs else ""
        told.append(f"  {table.command} tier={name}: {state(table, name, runs)} ({size}{needs})")
    return told
