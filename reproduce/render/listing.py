"""Lists every table and figure of the papers: the spec that covers it, or the reason why none does.

The list is in `specs/coverage.yaml`. Neither torch nor a driver is imported: it answers at once.
"""

import json
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment

from reproduce.specs.reading import read_rows, read_yaml
from reproduce.specs.table import COVERAGE, Table

HERE = Path(__file__).parents[1]
_TEXT = Path(__file__).with_name("list.jinja").read_text(encoding="utf-8")
TEMPLATE = Environment(trim_blocks=True, lstrip_blocks=True).from_string(_TEXT)


@dataclass(frozen=True)
class Item:
    """One table or figure of a paper, or a range of them."""

    paper: str
    number: str
    caption: str
    reason: str = ""  # why it has no spec

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


def items(path: Path = COVERAGE) -> dict[str, list[Item]]:
    """The tables and figures by the title of their paper, in the order of the paper. The `paper` of
    an item is the name that `paper=` takes."""
    return {
        paper["title"]: [
            Item(key, str(number), **({"caption": entry} if isinstance(entry, str) else entry))
            for number, entry in paper["items"].items()
        ]
        for key, paper in read_yaml(path).items()
    }


def stem(table: Table, tier: str, runs: Path) -> Path:
    """The path of a tier's files without their suffixes."""
    return runs / "tables" / f"{table.name}-{tier}"


def read_progress(table: Table, tier: str, runs: Path) -> dict[str, Any] | None:
    """The numbers of `jobs` and of those `done` when a tier was last made here, or None."""
    path = stem(table, tier, runs).with_suffix(".json")
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def measured_csv(table: Table, tier: str) -> Path | None:
    """The CSV file of the committed table of a tier, if it has numbers in all rows."""
    wanted = {(v.label, row.label) for v, row, _ in table.trainings(tier) if not row.stage}
    for path in (HERE / "measured").glob(f"*/{table.name}-{tier}.csv"):
        found = {
            (line.get("of", ""), line["method"])
            for line in read_rows(path)
            if any(name.endswith(": n") and int(n or 0) for name, n in line.items())
        }
        if wanted and wanted <= found:
            return path
    return None


def measured_file(path: Path) -> str:
    """The path in the repository of the committed table with this CSV file."""
    return path.with_suffix(".md").relative_to(HERE.parent).as_posix()


def lines(tables: list[Table], runs: Path, papers: dict[str, list[Item]]) -> list[str]:
    """The lines that `--list` prints."""
    specs: dict[tuple[str | None, str | None], list[Table]] = {}
    for table in tables:
        specs.setdefault((table.paper, table.number), []).append(table)
    every = [item for listed in papers.values() for item in listed]
    # The parts of a figure are separate specs: the figure counts if all of its parts do.
    covered = sum(item.count for item in every if (item.paper, item.number) in specs)
    total = sum(item.count for item in every)
    state = partial(_state, runs)
    return TEMPLATE.render(
        specs=specs, papers=papers, covered=covered, total=total, state=state
    ).splitlines()


def _state(runs: Path, table: Table, name: str) -> str:
    """How many runs of a tier were done, which results are committed, what it needs."""
    tier, parts = table.tiers[name], []
    if tier.unavailable:
        return f"not offered: {tier.unavailable}"
    if made := read_progress(table, name, runs):
        parts.append(f"{made['done']} of {made['jobs']} runs done at the last call")
    evidence = HERE / "evidence" / f"{tier.block}.jsonl"
    if tier.block and evidence.is_file():
        records = len(evidence.read_text(encoding="utf-8").splitlines())
        parts.append(f"{records} committed records of block {tier.block}")
    if path := measured_csv(table, name):
        parts.append(f"measured: {measured_file(path)}")
    run = f" (`python -m reproduce run {tier.block}`)" if tier.block else ""
    return ("; ".join(parts) or "not made") + run + (f" (needs {tier.needs})" if tier.needs else "")
