"""Runs that were never trained, for the tests of what is done with results."""

import dataclasses
import json

import pytest

from experiments.data.manifest import DataConfig
from experiments.data.mlm import MLMConfig
from experiments.data.prepare import prepare
from experiments.support import results
from experiments.support.checkpoint import write_json
from reproduce.execute.blocks import read_block
from reproduce.execute.jobs import Job, Place, PlacedRun
from reproduce.specs.table import Column, Table, TableRow, Tier


def make_result(config_hash="0" * 16, **changed):
    """The content of a `result.json`, as far as the tables read it."""
    split = {"tokens": 1000, "sha256": "ab" * 32}
    splits = {"train": split, "val": split | {"tokens": 50}}
    return {
        "schema": results.SCHEMA, "config_hash": config_hash, "files": {},  # nothing was written
        "config": {
            "train": {"dtype": "fp32"}, "impl": {"compile": False, "micro_batch": None},
            "model": {"name": "gpt2"}, "data": {"source": "stdlib"}, "method": {"name": "dense"},
        },
        "converted": [], "corpus_hash": "cd" * 32, "steps": 10, "tokens": 640,
        "corpus": {"name": "tiny", "source": {"path": "stdlib"}, "splits": splits},
        "metrics": {"val_loss": 1.0, "flip_rate": 0.25},
        "sparsity": {"density": 0.5, "illegal_groups": 0},
        "train_seconds": 20.0, "step_seconds": 2.0, "started": 1.0, "ended": 22.0,
        "backend": "cpu", "world_size": 1,
        "environment": {"git_revision": "c0ffee" * 7, "git_dirty": False, "device": "abacus",
                        "versions": {"torch": "2.0"}, "threads": 2},
    } | changed  # fmt: skip


@pytest.fixture(scope="session")
def corpora(tmp_path_factory):
    """A folder with a small text and its corpora `words` and `masked`; the overrides of the two,
    but for the name and the size of the vocabulary."""
    root = tmp_path_factory.mktemp("text")
    (root / "text").mkdir()
    line = "keep two of four weights in every group, drop the others\n"
    for part in ("a", "b"):
        (root / "text" / f"{part}.txt").write_text(line * 300, encoding="utf-8")
    settings = {"source": str(root / "text"), "root": str(root)}
    prepare(DataConfig("words", **settings, tokenizer="bpe", vocab_size=280))
    prepare(MLMConfig("masked", **settings, tokenizer="wordpiece", vocab_size=100))
    return root, [f"data.{key}={value}" for key, value in settings.items()]


def finish(config, log=(), **changed):
    """Give a run a result, as if it had been trained, with these records of `metrics.jsonl`."""
    directory = config.directory()
    write_json(directory / results.FILE, make_result(config.digest(), **changed))
    text = "".join(json.dumps(record) + "\n" for record in log)
    (directory / "metrics.jsonl").write_text(text, encoding="utf-8")


@pytest.fixture(name="finish")
def _finish(tmp_path, monkeypatch):
    """`finish`, in a folder without a corpus, so that no result is compared with one."""
    monkeypatch.chdir(tmp_path)
    return finish


@pytest.fixture
def finished_run(tmp_path):
    """finished_run(label, seed, val_loss, **other entries of the result) -> PlacedRun."""

    def build(label, seed, val_loss, log=(), variant="", measures=None, **changed):
        metrics = {"val_loss": val_loss, "flip_rate": 0.25}
        result = make_result(**{"metrics": metrics} | changed)
        directory = tmp_path / label / f"seed{seed}"
        return PlacedRun(Place(variant, label, seed), directory, result, list(log), measures or {})

    return build


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Jobs write a result at once; `.order` tells which were run, `.broken` which fail."""
    monkeypatch.chdir(tmp_path)  # where no corpus is, so that results name none

    def act(job, report):
        act.order.append(str(job))
        if str(job) in act.broken:
            raise RuntimeError("out of\nmemory")
        init = job.config.init_weights() if job.driver == "pretrain" else None
        finish(job.config, init=init)

    act.order, act.broken = [], set()
    monkeypatch.setattr(Job, "run", act)
    return act


def keep_record(folder, blocks, block, variant, seed, loss, /, **changed):
    """A record of a run of a block, as `BlockRun.keep` writes it; returns its file."""
    runs = read_block(block, blocks).runs(folder)
    (run,) = [run for run in runs if (run.variant, run.seed) == (variant, seed)]
    record = {
        "block": block, "variant": variant, "seed": seed, **run.setup, "config_hash": run.digest(),
        "corpus_hash": "abcdef0123456789", "steps": 10, "tokens": 640, "backend": "cpu",
        "metrics": {"val_loss": loss, "flip_rate": 0.5}, "sparsity": {"density": 0.5},
        "environment": {"device": "toy", "git_revision": "c0ffee", "git_dirty": False,
                        "versions": {"torch": "2.0"}},
        "curves": {"val_loss": [[0, 9.0], [10, loss]], "loss": [[4, 5.0], [10, 4.0]]},
    }  # fmt: skip
    write_json(run.file(folder), record | changed)
    return run.file(folder)


def write_blocks(folder, texts, old="", new=""):
    """Write `texts`, by the names of blocks, into a folder, which is returned; in each of them
    `old` is replaced by `new`."""
    folder.mkdir(exist_ok=True)
    assert any(old in text for text in texts.values())
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text.replace(old, new), encoding="utf-8")
    return folder


def overridden(table, tier, overrides):
    """The table with further overrides of every training of a tier."""
    rows = [
        dataclasses.replace(row, tiers={**row.tiers, tier: [*row.tiers.get(tier, []), *overrides]})
        for row in table.rows
    ]
    return dataclasses.replace(table, rows=rows)


@pytest.fixture
def small():
    """small(rows, **fields of the table) -> Table with the tier smoke, two seeds, a few steps."""

    def build(rows=None, seeds=(3, 1), measure=None, **changed):
        overrides = ["train.steps=20", "train.warmup_steps=1"]
        tier = Tier(setting="Little.", seeds=[*seeds], overrides=overrides, measure=measure or {})
        values = {
            "name": "t",
            "title": "T",
            "tiers": {"smoke": tier},
            "rows": rows
            or [TableRow("dense", ["method=dense"]), TableRow("naive", ["method=ste"])],
            "columns": [Column("loss", "metrics.val_loss")],
        }
        return Table(**values | changed)

    return build


BASE = [3.10, 3.14, 3.08, 3.12, 3.11]  # a dense variant's loss by seed
NOISE = [0.0, 0.004, -0.003, 0.002, -0.003]  # of a paired difference; mean 0


def shifted(by, noise=NOISE):
    """Losses that differ from `BASE` by `by` in the mean."""
    return [base + by + n for base, n in zip(BASE, noise, strict=True)]
