"""Decides which kept records of the blocks' runs count.

A record counts while a block has a run of its arm and seed whose config has the record's hash. One
that was made with another default, another override or another start is of another experiment: it
is left out of claims, tables and page alike, and named.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from reproduce.blocks import BLOCKS, BlockRun, read_block, read_kept

Values = dict[tuple[str, str], dict[int, dict[str, Any]]]  # (block, arm) -> seed -> record


@dataclass(frozen=True)
class Kept:
    """A record and its file. why: it does not count; empty if it does."""

    path: Path
    record: dict[str, Any]
    why: str = ""


@dataclass(frozen=True)
class Evidence:
    """The records of some folders.

    kept: those that count, by (block, arm) and seed; of several the one in the first folder.
    outdated: those that do not count.
    """

    kept: dict[tuple[str, str], dict[int, Kept]]
    outdated: list[Kept]

    @cached_property
    def values(self) -> Values:
        """The contents of the records that count."""
        return {
            key: {seed: kept.record for seed, kept in seeds.items()}
            for key, seeds in self.kept.items()
        }

    def warnings(self) -> list[str]:
        """A line for each arm with records that do not count: seeds, reason and the first file."""
        arms: dict[tuple[str, str, str], list[Kept]] = {}
        for one in self.outdated:
            arms.setdefault((one.record["block"], one.record["arm"], one.why), []).append(one)
        return [
            f"left out: block {block}, {arm}, seeds {_seeds(found)}: {why} ({found[0].path})"
            for (block, arm, why), found in arms.items()
        ]


def _seeds(found: list[Kept]) -> str:
    return " ".join(str(seed) for seed in sorted({one.record["seed"] for one in found}))


def read_evidence(
    *folders: Path, blocks: Path = BLOCKS, only: Collection[str] | None = None
) -> Evidence:
    """The records below these folders.

    Args:
        only: names of the blocks whose records are wanted; None = all. Each arm costs the time to
            compose its config, some 50 ms.

    Raises:
        UserError: a record is damaged, or a block's overrides do not fit together.
    """
    evidence = Evidence({}, [])
    runs: dict[str, dict[tuple[str, int], BlockRun]] = {}
    for path in (path for folder in folders for path in sorted(folder.glob("*/*.json"))):
        record = read_kept(path)
        block, arm, seed = record["block"], record["arm"], record["seed"]
        if only is not None and block not in only:
            continue
        if block not in runs:
            there = (blocks / f"{block}.yaml").is_file()
            known = read_block(block, blocks).runs(Path()) if there else ()
            runs[block] = {(run.arm, run.seed): run for run in known}
        run = runs[block].get((arm, seed))
        if run is None:
            evidence.outdated.append(Kept(path, record, "no block has such a run"))
        elif run.digest() != record["config_hash"]:
            evidence.outdated.append(Kept(path, record, "its config is another one now"))
        else:
            evidence.kept.setdefault((block, arm), {}).setdefault(seed, Kept(path, record))
    return evidence
