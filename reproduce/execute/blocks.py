"""Blocks of many small runs, by which claims are judged: `reproduce/specs/blocks/<name>.yaml`.

A block trains the same small model in many variants, methods and their options, with the same
seeds, so that they can be compared seed by seed. A block may start from models of another block:
then all variants of a seed start from the same finished run. Such a run is identified by its own
config and that of the run it starts from, so that a machine without weights knows its record.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from experiments.config.run import RunConfig
from experiments.support.checkpoint import read_sealed, write_sealed
from experiments.support.errors import UserError
from experiments.support.names import digest
from experiments.support.results import divergence, read
from experiments.support.typed import typed
from experiments.training.tracking import read_metrics
from reproduce.execute.jobs import Job
from reproduce.execute.packed import QUANTITIES, read_packed, run_name
from reproduce.specs.reading import errors_in, read_yaml

BLOCKS = Path(__file__).parents[1] / "specs" / "blocks"
EVIDENCE = Path(__file__).parents[1] / "evidence"
ENVIRONMENT = ("git_revision", "git_dirty", "device", "versions")  # what a record keeps of it
POINTS = 100  # greatest number of points of a training curve in a record


@dataclass(frozen=True)
class Block:
    """Many runs of one small model: every variant with every seed."""

    name: str
    title: str  # what is trained
    overrides: list[str]  # of hydra, of all variants
    variants: dict[str, list[str]]  # further overrides by label, the most important variant first
    seeds: list[int]
    driver: Literal["pretrain", "dino", "translate"] = "pretrain"
    # One variant of another block, from whose finished run of the same seed the runs start.
    source: Block | None = None
    notes: list[str] = field(default_factory=list)  # shown on the page of results
    # The variants that are not compared with the baseline, each with the one that it is.
    against: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len({run_name(variant, 0) for variant in self.variants}) < len(self.variants):
            raise ValueError("two variants would have the same file; rename one")
        for variant in (*self.against, *self.against.values()):
            if variant not in self.variants:
                known = ", ".join(self.variants)
                raise ValueError(f"against: there is no variant {variant}; choose of {known}")

    def runs(self, runs: Path) -> Iterator[BlockRun]:
        """All runs, seed by seed, so that an interrupted block has complete seeds."""
        for seed in self.seeds:
            source = self.source_run(seed, runs)
            for variant, own in self.variants.items():
                overrides = [*self.overrides, *own, "tier=mini", f"seed={seed}"]
                yield BlockRun(
                    f"{variant}, seed {seed}", self.driver, overrides, runs, source_key="init",
                    source=source, block=self.name, variant=variant, seed=seed,
                )  # fmt: skip

    def source_run(self, seed: int, runs: Path) -> BlockRun | None:
        """The run whose weights the runs of this seed start from; None for random ones."""
        if self.source is None:
            return None
        run = next(replace(self.source, seeds=[seed]).runs(runs))
        run.label = f"{run.block}: {run}"
        return run

    def only(self, variant: str) -> Block:
        """The block with this variant alone."""
        return replace(self, variants={variant: self.variants[variant]}, against={})


@dataclass(eq=False, kw_only=True)
class BlockRun(Job):
    """The run of one variant with one seed. The seed is the last of its overrides."""

    source: BlockRun | None
    block: str
    variant: str
    seed: int

    def file(self, folder: Path) -> Path:
        """The path of its record in a folder of records."""
        return folder / self.block / f"{run_name(self.variant, self.seed)}.json"

    @property
    def setup(self) -> dict[str, Any]:
        """The entries of its record that say what was trained, without paths of this machine."""
        own: dict[str, Any] = {"overrides": self.overrides}
        if (start := self.source) is not None:
            start_of = {"block": start.block, "variant": start.variant}
            own["source"] = {**start_of, "overrides": start.overrides}
        return own

    @cached_property
    def intended(self) -> Any:
        """Its config, even if the run it starts from is not finished."""
        return self.compose(None if self.source is None else self.source.intended.directory())

    def digest(self) -> str:
        """The hash of its config, with the hash of the source in place of its weights."""
        source = None if self.source is None else self.source.digest()
        try:
            return _digest(self.driver, tuple(self.overrides[:-1]), self.seed, source)
        except UserError as error:
            raise UserError(f"block {self.block}, {self}: {error}") from error

    def record(self, *folders: Path) -> dict[str, Any] | None:
        """Its record with the hash of this config, from the first folder that has one, or None."""
        for folder in folders:
            found = [read_record(path)] if (path := self.file(folder)).is_file() else []
            if packed := read_packed(folder, self.block).get((self.variant, self.seed)):
                found = [packed, *found]
            for record in found:
                if record["config_hash"] == self.digest():
                    return record
        return None

    def ended(self) -> dict[str, Any] | None:
        """The content of its `result.json`, or None; to diverge is a result of a block, too."""
        found = self.result()
        with suppress(UserError):  # there is none, or the config is refused, of which its job tells
            if found is None and (config := self.config) is not None:
                lost = read(config.directory(), config.digest(), diverged=True)
                found = lost if divergence(lost) else None
        return found

    def keep(self, folder: Path) -> dict[str, Any] | None:
        """Write its record into a folder and return it; None if the run has not ended."""
        result = self.ended()
        if result is None:
            return None
        log = read_metrics(self.config.directory() / "metrics.jsonl")
        environment = result["environment"]
        record = {
            "block": self.block,
            "variant": self.variant,
            "seed": self.seed,
            **self.setup,
            **({} if self.source is None else {"init": result["init"]}),
            **{key: result[key] for key in ("config_hash", "corpus_hash", "steps", "tokens")},
            **{key: result[key] for key in ("metrics", "sparsity", "backend", "world_size")},
            "revisions": result.get("revisions"),
            **{key: result[key] for key in ("train_seconds", "step_seconds", "started", "ended")},
            "environment": {key: environment[key] for key in ENVIRONMENT},
            "curves": curves(log),
        }
        write_sealed(self.file(folder), record)
        return record


@cache
def _variant_config(driver: str, overrides: tuple[str, ...]) -> RunConfig:
    """The config of these overrides with seed 0 and random initial weights. It is cached, because
    it takes 0.02 s, and the hash of every variant and seed is needed to read records."""
    config: RunConfig = Job("", driver, [*overrides, "seed=0"], Path()).config
    return config


@cache
def _digest(driver: str, overrides: tuple[str, ...], seed: int, source: str | None) -> str:
    """The hash of a run's config. source: that of the run it starts from."""
    own = _variant_config(driver, overrides).with_seed(seed)
    return own.digest() if source is None else digest({**own.identity(), "init": source})


def read_record(path: Path) -> dict[str, Any]:
    """The record that `BlockRun.keep` wrote to a file."""
    try:
        return read_sealed(path) | {"file": path, "line": 0}
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); remove or restore it") from error


def curves(log: list[dict[str, Any]]) -> dict[str, list[list[float]]]:
    """The curves in a run's log by quantity, as lists of [step, value].

    They have every evaluation, and at most `POINTS` points of what is logged during training, whose
    loss is the mean over the steps since the previous entry.
    """
    found: dict[str, list[list[float]]] = {}
    for name in QUANTITIES:
        points = [[r["step"], float(f"{r[name]:.6g}")] for r in log if r.get(name) is not None]
        every = 1 if name == "val_loss" else math.ceil(len(points) / POINTS)
        found[name] = points[every - 1 :: every] if every else points
    return found


def read_block(name: str, folder: Path = BLOCKS) -> Block:
    """The block that `<name>.yaml` in a folder describes."""
    path = folder / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in folder.glob("*.yaml")))
        raise UserError(f"no block {name!r}; there is {known}")
    with errors_in(path):
        content = {"name": name, **read_yaml(path)}
        if source := content.pop("source", None):
            content["source"] = read_block(source["block"], folder).only(source["variant"])
        return typed(Block, "", content)
