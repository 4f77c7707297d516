"""Lists every table and figure of the papers, from `coverage.yaml`, with a spec or the reason why
there is none.

Needs neither torch nor the drivers: `python -m reproduce --list` answers at once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reproduce.spec import Table

FILE = Path(__file__).with_name("coverage.yaml")


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


def items(path: Path = FILE) -> dict[str, list[Item]]:
    """The tables and figures by the papers' titles, in the papers' order; each has the paper's name
    as in `paper=`."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    content = yaml.load(path.read_text(encoding="utf-8"), loader)
    return {
        paper["title"]: [
            Item(key, str(number), **({"caption": entry} if isinstance(entry, str) else entry))
            for number, entry in paper["items"].items()
        ]
        for key, paper in content.items()
    }


def state(table: Table, tier: str, runs: Path) -> str:
    """How many runs of a tier were done when it was last made, from the file that `make` wrote:
    looking at the runs themselves would compose every config of every table."""
    try:
        made = json.loads(stem(table, tier, runs).with_suffix(".json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "not made"
    return f"{made['done']} of {made['jobs']} runs done at the last call"


def record(jobs: int, done: int) -> dict[str, Any]:
    """The content of the file that `state` reads."""
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
    return told


def _tiers(table: Table, runs: Path) -> list[str]:
    told = []
    for name, tier in table.tiers.items():
        if tier.unavailable:
            told.append(f"  {table.command} tier={name}: not offered: {tier.unavailable}")
            continue
        if tier.block:
            shown = f"the records of block {tier.block}; `python -m reproduce run {tier.block}`"
            told.append(f"  {table.command} tier={name}: {state(table, name, runs)} ({shown})")
            continue
        trained = len(list(table.trainings(name)))
        measured = sum(len(measure.tasks) or 1 for measure in tier.measure.values())
        size = f"{trained} runs" + (f", {measured} measurements of each" if measured else "")
        needs = f"; needs {tier.needs}" if tier.needs else ""
        told.append(f"  {table.command} tier={name}: {state(table, name, runs)} ({size}{needs})")
    return told
