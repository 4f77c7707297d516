"""Reads the records of the blocks' runs, decides which of them count, packs them, and gives a table
the records of its rows in the place of runs.

A record counts if a block has a run with its variant and seed whose config has its hash. Others,
of another default, override or initial model, are left out of all views and named.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments.support.checkpoint import sha256
from experiments.support.errors import UserError
from reproduce.execute.blocks import BLOCKS, EVIDENCE, BlockRun, read_block, read_record
from reproduce.execute.jobs import Place, PlacedRun
from reproduce.execute.packed import read_packed, write_packed
from reproduce.specs.table import Table

Values = dict[tuple[str, str], dict[int, dict[str, Any]]]  # (block, variant) -> seed -> record


@dataclass(frozen=True)
class Evidence:
    """The records in some folders: the values of those that count, and those that do not count,
    each with the reason. If several folders have a record of the same run, the first counts."""

    values: Values = field(default_factory=dict)
    outdated: list[tuple[dict[str, Any], str]] = field(default_factory=list)

    def warnings(self) -> list[str]:
        """A line for each variant with such records: the seeds, the reason, the first file."""
        variants: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
        for record, why in self.outdated:
            variants.setdefault((record["block"], record["variant"], why), []).append(record)
        lines = []
        for (block, variant, why), several in variants.items():
            seeds = " ".join(map(str, sorted({record["seed"] for record in several})))
            place = str(several[0]["file"])
            if line := several[0]["line"]:
                place += f", line {line}"
            lines.append(f"left out: block {block}, {variant}, seeds {seeds}: {why} ({place})")
        return lines


def read_evidence(
    *folders: Path, blocks: Path = BLOCKS, only: Collection[str] | None = None
) -> Evidence:
    """The records in these folders. only: names of the blocks whose records are wanted; None = all.
    Fewer are faster: the config of every variant is composed, which takes over 0.1 s."""
    evidence = Evidence()
    runs: dict[str, dict[tuple[str, int], BlockRun]] = {}
    found: list[dict[str, Any]] = []
    for folder in folders:  # packed records, then those in files of their own
        for path in sorted(folder.glob("*.jsonl")):
            if only is None or path.stem in only:
                found += read_packed(folder, path.stem).values()
        found += map(read_record, sorted(folder.glob("*/*.json")))
    for record in found:
        block, variant, seed = record["block"], record["variant"], record["seed"]
        if only is not None and block not in only:
            continue
        if block not in runs:
            exists = (blocks / f"{block}.yaml").is_file()
            known = read_block(block, blocks).runs(Path()) if exists else ()
            runs[block] = {(run.variant, run.seed): run for run in known}
        run = runs[block].get((variant, seed))
        if run is None:
            evidence.outdated.append((record, "no block has such a run"))
        elif run.digest() != record["config_hash"]:
            evidence.outdated.append((record, "its config is another one now"))
        else:
            evidence.values.setdefault((block, variant), {}).setdefault(seed, record)
    return evidence


def pack(own: Path, committed: Path, blocks: Path = BLOCKS) -> list[str]:
    """Pack the records that count in `own` into those that are `committed`; return a line for each
    block with new ones. A committed record gives way only if it does not count any more."""
    new: dict[str, dict[tuple[str, int], dict[str, Any]]] = {}
    for (block, variant), seeds in read_evidence(committed, own, blocks=blocks).values.items():
        for seed, record in seeds.items():
            if not record["line"]:
                of_file = record | {"file_sha256": sha256(record["file"])}
                new.setdefault(block, {})[variant, seed] = of_file
    said = []
    for block, records in sorted(new.items()):
        packed = read_packed(committed, block) | records
        write_packed(committed, block, packed.values())
        said.append(f"{committed / block}.jsonl: {len(records)} more, {len(packed)} in all")
    return said


def model(records: Iterable[dict[str, Any]]) -> str:
    """The name of the model of a variant's runs."""
    overrides = [o.partition("=") for record in records for o in record.get("overrides", [])]
    return next((value for key, _, value in overrides if key == "model"), "?")


def setting(records: Iterable[dict[str, Any]]) -> str:
    """Model, length of training, data and seeds of runs, in words; "" without runs. Seeds at which
    runs started from different weights, because their first model was trained twice, are named."""
    if not (runs := list(records)):
        return ""
    every = zip(*map(_trained, runs), strict=True)
    parts = [" or ".join(dict.fromkeys(several)) for several in every]
    parts.append(f"seeds {', '.join(map(str, sorted({run['seed'] for run in runs})))}")
    starts = {(r["block"], r["seed"], str(r.get("init"))) for r in runs if "source" in r}
    several = Counter((block, seed) for block, seed, _ in starts)
    if unequal := sorted({seed for (_, seed), count in several.items() if count > 1}):
        at = ", ".join(map(str, unequal))
        parts.append(f"from different trainings of the first model at seeds {at}")
    return ", ".join(parts)


def _trained(record: dict[str, Any]) -> tuple[str, ...]:
    """Model, length of training, batch and data of a run."""
    chosen = dict(o.split("=", 1) for o in record["overrides"] if "=" in o)
    name, tokens = model([record]), record["tokens"]
    # A record counts what a model reads: of an image its patches and the class token.
    unit = "tokens" if name.startswith(("gpt2", "bert", "hf")) else "image tokens"
    length = f"{tokens / 1e6:.4g}M" if tokens >= 1e6 else f"{tokens:,}"
    data = f"data={chosen['data']}" if "data" in chosen else "the default data"
    batch = f"{round(tokens / max(1, record['steps'])):,} {unit} a step"
    return name, f"{length} {unit}", batch, f"{data} ({record['corpus_hash'][:12]})"


@dataclass(frozen=True)
class Collected:
    """A table whose tier shows a block, with the block's records."""

    table: Table  # with the seeds of the block
    runs: list[PlacedRun] = field(default_factory=list)  # the records of its rows, as runs
    missing: dict[str, list[int]] = field(default_factory=dict)  # seeds without one, by variant
    warnings: list[str] = field(default_factory=list)  # on records that do not count


def collect(
    table: Table, tier: str, runs: Path, committed: Path = EVIDENCE, blocks: Path = BLOCKS
) -> Collected:
    """The table with the records of the tier's block as its runs."""
    chosen = table.tiers[tier]
    block = read_block(chosen.block, blocks)
    asked = {(run.variant, run.seed): run for run in block.runs(runs)}
    for seed in block.seeds:  # the models that variants start from may be rows, too
        if (start := block.source_run(seed, runs)) is not None:
            asked[f"{start.block}/{start.variant}", seed] = start
    names = {run.block for run in asked.values()}
    evidence = read_evidence(committed, runs / "evidence", blocks=blocks, only=names)
    own = replace(chosen, setting=f"{block.title}. {chosen.setting}".strip(), seeds=block.seeds)
    table = replace(table, tiers={**table.tiers, tier: own})
    collected = Collected(table, warnings=evidence.warnings())
    for variant, row, seed in table.trainings(tier):
        if (row.variant, seed) not in asked:
            lacks = f"block {block.name} has no variant {row.variant}"
            raise UserError(f"{table.name}, {row.label!r}: {lacks}")
        run = asked[row.variant, seed]
        record = evidence.values.get((run.block, run.variant), {}).get(seed)
        if record is None:
            missing = collected.missing.setdefault(row.variant, [])
            missing += [seed] * (seed not in missing)
            continue
        steps: dict[float, dict[str, float]] = {}  # the curves as entries of a metrics.jsonl
        for name, points in record["curves"].items():
            for step, value in points:
                steps.setdefault(step, {"step": step})[name] = value
        place, log = Place(variant.label, row.label, seed), [steps[step] for step in sorted(steps)]
        collected.runs.append(PlacedRun(place, record["file"], record, log, {}))
    return collected
