"""Collects the runs of a tier that shows a block: the block's records instead of own runs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from experiments.support.errors import UserError
from reproduce.blocks import BLOCKS, EVIDENCE, read_block
from reproduce.execute.jobs import Place, PlacedRun
from reproduce.records import read_evidence
from reproduce.specs.table import Table


@dataclass(frozen=True)
class Collected:
    """A table whose tier shows a block, with the block's records.

    table: the table, with the seeds of the block. runs: the records of its rows, in the form of
    runs. missing: the seeds without a record, by variant. warnings: lines on records that do not
    count.
    """

    table: Table
    runs: list[PlacedRun] = field(default_factory=list)
    missing: dict[str, list[int]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def collect(
    table: Table, tier: str, runs: Path, committed: Path = EVIDENCE, blocks: Path = BLOCKS
) -> Collected:
    """The table with the records of the tier's block as its runs.

    Raises:
        UserError: the block or a variant does not exist, or a record is damaged.
    """
    chosen = table.tiers[tier]
    block = read_block(chosen.block, blocks)
    asked = {(run.variant, run.seed): run for run in block.runs(runs)}
    if (source := block.source) is not None:  # the models that variants start from may be rows, too
        name = f"{source.block.name}/{source.variant}"
        asked |= {(name, seed): source.run(seed, runs) for seed in block.seeds}
    names = {run.block for run in asked.values()}
    evidence = read_evidence(committed, runs / "evidence", blocks=blocks, only=names)
    own = replace(chosen, setting=f"{block.title}. {chosen.setting}".strip(), seeds=block.seeds)
    table = replace(table, tiers={**table.tiers, tier: own})
    collected = Collected(table, warnings=evidence.warnings())
    for variant, row, seed in table.trainings(tier):
        if (row.variant, seed) not in asked:
            raise UserError(
                f"{table.name}, {row.label!r}: block {block.name} has no variant {row.variant}"
            )
        run = asked[row.variant, seed]
        stored = evidence.kept.get((run.block, run.variant), {}).get(seed)
        if stored is None:
            if seed not in collected.missing.setdefault(row.variant, []):
                collected.missing[row.variant].append(seed)
            continue
        place, log = Place(variant.label, row.label, seed), _log(stored.record["curves"])
        collected.runs.append(PlacedRun(place, stored.path, stored.record, log, {}))
    return collected


def _log(curves: dict[str, list[list[float]]]) -> list[dict[str, float]]:
    """The curves of a record in the form of the entries of a `metrics.jsonl`."""
    steps: dict[float, dict[str, float]] = {}
    for name, points in curves.items():
        for step, value in points:
            steps.setdefault(step, {"step": step})[name] = value
    return [steps[step] for step in sorted(steps)]
