"""Runs that were never trained, for the tests of what is done with results."""

import json
from types import SimpleNamespace

import pytest

from experiments import results
from reproduce.engine import Job, Run


def make_result(config_hash="0" * 16, **changed):
    """What `result.json` holds, as far as the tables read it."""
    split = {"tokens": 1000, "sha256": "ab" * 32}
    return {
        "schema": results.SCHEMA,
        "config_hash": config_hash,
        "config": {"impl": {"dtype": "fp32", "compile": False, "micro_batch": None}},
        "corpus": {"name": "tiny", "splits": {"train": split, "val": split | {"tokens": 50}}},
        "steps": 10,
        "metrics": {"val_loss": 1.0, "flip_rate": 0.25},
        "sparsity": {"density": 0.5, "illegal_groups": 0},
        "step_seconds": 2.0,
        "backend": "naive",
        "world_size": 1,
        "environment": {
            "git_revision": "c0ffee" * 7,
            "git_dirty": False,
            "device": "abacus",
            "versions": {"torch": "2.0"},
            "threads": 2,
        },
    } | changed


@pytest.fixture
def finished_run():
    """finished_run(label, seed, val_loss, **other entries of the result) -> Run."""

    def build(label, seed, val_loss, log=(), **changed):
        config = SimpleNamespace(directory=lambda: f"runs/{label}/seed{seed}")
        metrics = {"val_loss": val_loss, "flip_rate": 0.25}
        result = make_result(**{"metrics": metrics} | changed)
        return Run(Job(label, seed, config), result, list(log))

    return build


@pytest.fixture
def fake_training(tmp_path, monkeypatch):
    """A `train` that writes a result at once; `.order` tells what it was asked for."""
    monkeypatch.chdir(tmp_path)  # where no corpus is, so that results name none

    def train(config, report):
        train.order.append((config.method, config.seed))
        if (config.method, config.seed) in train.broken:
            raise RuntimeError("out of\nmemory")
        directory = config.directory()
        directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(make_result(config.digest()))
        (directory / results.FILE).write_text(text, encoding="utf-8")

    train.order, train.broken = [], set()
    return train
