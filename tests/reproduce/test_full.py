"""Full tiers of language models: every row trains, for two steps of a tiny model on a CPU."""

import dataclasses

import pytest

from experiments.data.manifest import DataConfig
from experiments.data.mlm import MLMConfig
from experiments.data.prepare import prepare
from reproduce.engine import execute, finished_runs
from reproduce.jobs import plan
from reproduce.reading import read_tables
from reproduce.render import render

TABLES = {table.name: table for table in read_tables()}
TINY = [
    *("train.steps=2", "train.warmup_steps=1", "train.batch_size=2", "train.log_every=1"),
    *("train.eval_every=2", "train.eval_samples=4", "train.dtype=fp32", "model.n_layer=2"),
    *("model.n_head=2", "model.n_embd=16", "model.block_size=32", "model.vocab_size=320"),
    *("impl.device=cpu", "impl.micro_batch=1", "impl.threads=1", "impl.checkpoint_every=0"),
]
BERT = ["model.n_inner=32", "data.sequence_length=32", "data.max_predictions=4"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Overrides of a small text of our own, for causal and for masked models."""
    root = tmp_path_factory.mktemp("text")
    (root / "text").mkdir()
    for part in ("a", "b"):
        line = "keep two of four weights in every group\n"
        (root / "text" / f"{part}.txt").write_text(line * 200, encoding="utf-8")
    own = {"source": str(root / "text"), "root": str(root)}
    causal = own | {"name": "words", "tokenizer": "bpe", "vocab_size": 280}
    masked = own | {"name": "masked", "tokenizer": "wordpiece", "vocab_size": 100}
    prepare(DataConfig(**causal))
    prepare(MLMConfig(**masked))
    as_overrides = [[f"data.{key}={value}" for key, value in c.items()] for c in (causal, masked)]
    return {"gpt2": as_overrides[0], "bert": [*as_overrides[1], *BERT]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder for the runs of all tables, which share some."""
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        *(("slope_tableB4", 0), ("slope_tableB5", 0), ("slope_table3", 0), ("slope_figure2", 1)),
        *(("slope_figureB1", 0), ("slope_figureB3", 0), ("slope_figureB5", 0)),
        ("slope_figureB6", 0),
    ],
)
def test_every_row_trains(name, variant, text, runs):
    table = TABLES[name]
    chosen = [table.variants_of("full")[variant]]
    tier = dataclasses.replace(table.tiers["full"], measure={}, variants=chosen)
    kept = [c for c in table.columns if "metrics." in (c.value or "")]
    table = dataclasses.replace(table, tiers={**table.tiers, "full": tier}, columns=kept)
    family = "bert" if name == "slope_figureB3" else "gpt2"
    planned, said = plan(table, "full", runs, [*TINY, *text[family]]), []
    execute(planned.jobs, said.append)
    finished = finished_runs(planned)
    assert len(finished) == len(list(table.trainings("full"))), "\n".join(said)
    lines = render(table, "full", finished).grid.lines
    assert "not run" not in [value for line in lines for value in line.values]
