"""Blocks of many small runs, from which claims are judged: `reproduce/blocks/<name>.yaml`.

A block trains the same small model under many arms (methods and their options), each with the same
seeds, so that arms can be compared seed by seed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.checkpoint import lacks, write_json
from experiments.errors import UserError
from experiments.tracking import read_metrics
from reproduce.jobs import Job
from reproduce.reading import build
from reproduce.spec import TRAINING

BLOCKS = Path(__file__).parent / "blocks"
EVIDENCE = Path(__file__).parent / "evidence"
POINTS = 100  # of a kept training curve
RECORD = {
    "block": str,
    "arm": str,
    "seed": int,
    "overrides": list,
    "config_hash": str,
    "metrics": dict,
    "curves": dict,
}


@dataclass(frozen=True)
class Block:
    """title: what is trained. overrides: hydra overrides of all arms. arms: label -> its own
    overrides, the most important first. seeds: of every arm."""

    name: str
    title: str
    overrides: list[str]
    arms: dict[str, list[str]]
    seeds: list[int]
    driver: str = "pretrain"
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.driver not in TRAINING:
            raise ValueError(f"driver={self.driver}; choose one of {', '.join(TRAINING)}")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"two seeds are the same: {self.seeds}")
        files: dict[str, str] = {}
        for arm in self.arms:
            if (other := files.setdefault(_file_name(arm), arm)) != arm:
                raise ValueError(f"arms {other!r} and {arm!r} would have the same file; rename one")

    def runs(self, runs: Path) -> Iterator[BlockRun]:
        """All runs, seed by seed: every stop leaves whole seeds."""
        for seed in self.seeds:
            for arm, own in self.arms.items():
                overrides = [*self.overrides, *own, "tier=mini", f"seed={seed}"]
                job = Job(f"{arm}, seed {seed}", self.driver, overrides, runs)
                yield BlockRun(self.name, arm, seed, job)


@dataclass(frozen=True)
class BlockRun:
    """One arm with one seed. job: what trains it."""

    block: str
    arm: str
    seed: int
    job: Job

    def file(self, folder: Path) -> Path:
        """Where its record is kept below a folder of evidence."""
        return folder / self.block / f"{_file_name(self.arm)}-seed{self.seed}.json"

    def digest(self) -> str:
        """The hash that its config is known by.

        Raises:
            UserError: its overrides do not fit together.
        """
        try:
            return self.job.config.digest()
        except UserError as error:
            raise UserError(f"block {self.block}, {self.job}: {error}") from error

    def record(self, *folders: Path) -> dict[str, Any] | None:
        """The kept figures of this very config, from the first folder that has them."""
        for folder in folders:
            path = self.file(folder)
            if path.is_file():
                record = read_record(path)
                if record["config_hash"] == self.digest():
                    return record
        return None

    def keep(self, folder: Path) -> dict[str, Any] | None:
        """Write the figures of the finished run into a folder of evidence and return them; None if
        it is not finished."""
        result = self.job.result()
        if result is None:
            return None
        log = read_metrics(self.job.config.directory() / "metrics.jsonl")
        environment = result["environment"]
        record = {
            "block": self.block,
            "arm": self.arm,
            "seed": self.seed,
            "overrides": self.job.overrides,
            **{key: result[key] for key in ("config_hash", "corpus_hash", "steps", "tokens")},
            **{key: result[key] for key in ("metrics", "sparsity", "backend", "world_size")},
            **{key: result[key] for key in ("train_seconds", "step_seconds", "started", "ended")},
            "environment": {
                key: environment[key] for key in ("git_revision", "git_dirty", "device", "versions")
            },
            "curves": curves(log),
        }
        write_json(self.file(folder), record)
        return record


def _file_name(arm: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in arm)


def read_record(path: Path) -> dict[str, Any]:
    """The figures that `BlockRun.keep` wrote.

    Raises:
        UserError: the file is damaged.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); remove it") from error
    if (found := lacks(record, RECORD)) is not None:
        raise UserError(f"{path} is damaged (no {found or 'record'} in it); remove it")
    return record


def curves(log: list[dict[str, Any]]) -> dict[str, list[list[float]]]:
    """By quantity, [step, value] of the log of a run: every evaluation, and at most `POINTS` of
    what is logged in training (the loss there is a mean over the steps since the last record)."""
    found: dict[str, list[list[float]]] = {}
    for name in ("val_loss", "loss", "flip_rate", "grad_norm"):
        points = [[r["step"], float(f"{r[name]:.6g}")] for r in log if r.get(name) is not None]
        thin = 1 if name == "val_loss" else math.ceil(len(points) / POINTS)
        found[name] = points[thin - 1 :: thin] if thin else points
    return found


def read_block(name: str, folder: Path = BLOCKS) -> Block:
    """The block of `<name>.yaml`.

    Raises:
        UserError: there is none, it has other keys than `Block`, or values that do not fit.
    """
    import yaml

    path = folder / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in folder.glob("*.yaml")))
        raise UserError(f"no block {name!r}; there is {known}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it holds no keys")
        return build(Block, {"name": name, **content}, "the file")
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from error
