"""Reads the records of the blocks' runs, and decides which of them count.

A record counts if a block has a run with its arm and seed whose config has the hash in the record.
A record that was made with another default, override or initial model belongs to another
experiment: claims, tables and the page of results leave it out and name it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from reproduce.blocks import BLOCKS, BlockRun, read_block, read_record

Values = dict[tuple[str, str], dict[int, dict[str, Any]]]  # (block, arm) -> seed -> record


@dataclass(frozen=True)
class StoredRecord:
    """A record and its file. why: the reason why it does not count; "" if it counts."""

    path: Path
    record: dict[str, Any]
    why: str = ""


@dataclass(frozen=True)
class Evidence:
    """The records in some folders.

    kept: the records that count, by (block, arm) and seed. If several folders have a record of the
        same run, it is that of the first folder.
    outdated: the records that do not count.
    """

    kept: dict[tuple[str, str], dict[int, StoredRecord]]
    outdated: list[StoredRecord]

    @cached_property
    def values(self) -> Values:
        """The contents of the records that count."""
        return {
            key: {seed: stored.record for seed, stored in seeds.items()}
            for key, seeds in self.kept.items()
        }

    def warnings(self) -> list[str]:
        """A line for each arm with records that do not count: the seeds, the reason and the first
        file."""
        arms: dict[tuple[str, str, str], list[StoredRecord]] = {}
        for stored in self.outdated:
            key = stored.record["block"], stored.record["arm"], stored.why
            arms.setdefault(key, []).append(stored)
        return [
            f"left out: block {block}, {arm}, seeds {_seeds(records)}: {why} ({records[0].path})"
            for (block, arm, why), records in arms.items()
        ]


def _seeds(records: list[StoredRecord]) -> str:
    return " ".join(str(seed) for seed in sorted({stored.record["seed"] for stored in records}))


def read_evidence(
    *folders: Path, blocks: Path = BLOCKS, only: Collection[str] | None = None
) -> Evidence:
    """The records in these folders.

    Args:
        only: names of the blocks whose records are wanted; None = all. Fewer are faster: the config
            of every arm is composed, which takes over 0.1 s.

    Raises:
        UserError: a record is damaged, or a block's overrides do not fit together.
    """
    evidence = Evidence({}, [])
    runs: dict[str, dict[tuple[str, int], BlockRun]] = {}
    for path in (path for folder in folders for path in sorted(folder.glob("*/*.json"))):
        record = read_record(path)
        block, arm, seed = record["block"], record["arm"], record["seed"]
        if only is not None and block not in only:
            continue
        if block not in runs:
            exists = (blocks / f"{block}.yaml").is_file()
            known = read_block(block, blocks).runs(Path()) if exists else ()
            runs[block] = {(run.arm, run.seed): run for run in known}
        run = runs[block].get((arm, seed))
        if run is None:
            evidence.outdated.append(StoredRecord(path, record, "no block has such a run"))
        elif run.digest() != record["config_hash"]:
            evidence.outdated.append(StoredRecord(path, record, "its config is another one now"))
        else:
            stored = StoredRecord(path, record)
            evidence.kept.setdefault((block, arm), {}).setdefault(seed, stored)
    return evidence
