"""Commands that a fault of the disk interrupts end, once they are started again, with exactly the
files that they write without a fault. reproduce/test_runner.py has the same for a block."""

import json
from functools import partial

from experiments.config.run import load
from experiments.data import prepare as preparing
from experiments.data.manifest import DataConfig
from experiments.exporting.export import Form, export
from experiments.runs.finished import FinishedRun
from experiments.training import pretraining
from tests.experiments.conftest import quiet
from tests.faults import check


def test_the_preparation_of_a_corpus(corpus_dir, tmp_path, monkeypatch):
    text, root = tmp_path / "text.jsonl", tmp_path / "data"
    lines = (corpus_dir / "text" / "a.txt").read_text().splitlines()[:60]
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    root.mkdir()
    monkeypatch.setattr(preparing, "_BATCH", 16)
    monkeypatch.setattr(preparing, "_SAVED", 300)
    config = DataConfig("words", str(text), str(root), "bpe", 300)
    check(root, partial(preparing.prepare, config), 16)


def test_a_training_and_its_exports(overrides, tmp_path):
    root = tmp_path / "runs"
    root.mkdir()
    short = ["train.steps=2", "train.eval_every=1", "impl.checkpoint_every=1"]
    config = load([*overrides, *short, "method=ste"])
    check(root, partial(pretraining.run, config, quiet), 8)
    run = FinishedRun.open(config.directory())
    for form in (Form(), Form(compressed=True)):
        check(root, partial(export, run, form, report=quiet), 4)
