"""Full tiers of language models: every row trains, for two steps of a tiny model on a CPU."""

import dataclasses

import pytest

from experiments.data.manifest import DataConfig
from experiments.data.prepare import prepare
from reproduce.engine import execute, finished_runs
from reproduce.jobs import plan
from reproduce.reading import read_tables
from reproduce.render import render

TABLES = {table.name: table for table in read_tables()}
TINY = [
    *("model.n_layer=2", "model.n_head=2", "model.n_embd=16", "model.block_size=32"),
    *("model.vocab_size=320", "train.steps=2", "train.warmup_steps=1", "train.batch_size=2"),
    *("train.log_every=1", "train.eval_every=2", "train.eval_samples=4", "train.dtype=fp32"),
    *("impl.device=cpu", "impl.micro_batch=1", "impl.threads=1", "impl.checkpoint_every=0"),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Overrides of a small text of our own in the place of OpenWebText."""
    root = tmp_path_factory.mktemp("text")
    (root / "text").mkdir()
    for part in ("a", "b"):
        line = "keep two of four weights in every group\n"
        (root / "text" / f"{part}.txt").write_text(line * 200, encoding="utf-8")
    own = {"source": str(root / "text"), "root": str(root), "tokenizer": "bpe", "vocab_size": 280}
    prepare(DataConfig("words", **own))
    return ["data.name=words", *(f"data.{key}={value}" for key, value in own.items())]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder for the runs of all tables, which share some."""
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize(
    ("name", "variant"),
    [("slope_tableB4", 0), ("slope_tableB5", 0), ("slope_table3", 0), ("slope_figure2", 1)],
)
def test_every_row_trains(name, variant, text, runs):
    table = TABLES[name]
    chosen = [table.variants_of("full")[variant]]
    tier = dataclasses.replace(table.tiers["full"], measure={}, variants=chosen)
    kept = [c for c in table.columns if "metrics." in (c.value or "")]
    table = dataclasses.replace(table, tiers={**table.tiers, "full": tier}, columns=kept)
    planned, said = plan(table, "full", runs, [*TINY, *text]), []
    execute(planned.jobs, said.append)
    finished = finished_runs(planned)
    assert len(finished) == len(list(table.trainings("full"))), "\n".join(said)
    lines = render(table, "full", finished).grid.lines
    assert "not run" not in [value for line in lines for value in line.values]
