"""Tiers that show what a block has measured: its records in the place of runs of the table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.support.errors import UserError
from reproduce.blocks import BLOCKS, EVIDENCE, read_block
from reproduce.claims import records
from reproduce.engine import Run
from reproduce.jobs import Place
from reproduce.spec import Table


def collect(
    table: Table, tier: str, runs: Path, committed: Path = EVIDENCE, blocks: Path = BLOCKS
) -> tuple[Table, list[Run], dict[str, list[int]]]:
    """The table with the seeds of the tier's block, the records of its rows as runs, and which
    seeds of its arms have none.

    Raises:
        UserError: there is no such block or arm, or a record is damaged.
    """
    chosen = table.tiers[tier]
    block, folders = read_block(chosen.block, blocks), (committed, runs / "evidence")
    asked = {(run.arm, run.seed): run for run in block.runs(runs)}
    if (source := block.source) is not None:  # its models are rows of the papers' tables, too
        name = f"{source.block.name}/{source.arm}"
        asked |= {(name, seed): source.run(seed, runs) for seed in block.seeds}
    kept: dict[tuple[str, str, int], tuple[Path, dict[str, Any]]] = {}
    for path, record in records(folders, blocks, wanted=True):
        kept.setdefault((record["block"], record["arm"], record["seed"]), (path, record))
    own = replace(chosen, setting=f"{block.title}. {chosen.setting}".strip(), seeds=block.seeds)
    table = replace(table, tiers={**table.tiers, tier: own})
    found: list[Run] = []
    missing: dict[str, list[int]] = {}
    for variant, row, seed in table.trainings(tier):
        if (row.arm, seed) not in asked:
            raise UserError(f"{table.name}, {row.label!r}: block {block.name} has no arm {row.arm}")
        run = asked[row.arm, seed]
        if (there := kept.get((run.block, run.arm, seed))) is None:
            if seed not in missing.setdefault(row.arm, []):
                missing[row.arm].append(seed)
            continue
        path, record = there
        place = Place(variant.label, row.label, seed)
        found.append(Run(place, path, record, _log(record["curves"]), {}))
    return table, found, missing


def _log(curves: dict[str, list[list[float]]]) -> list[dict[str, float]]:
    """Kept curves as records of a `metrics.jsonl`."""
    steps: dict[float, dict[str, float]] = {}
    for name, points in curves.items():
        for step, value in points:
            steps.setdefault(step, {"step": step})[name] = value
    return [steps[step] for step in sorted(steps)]
