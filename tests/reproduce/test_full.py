"""Full tiers: every row of every paper's table trains, for two steps of a tiny model on a CPU."""

import dataclasses

import pytest

from experiments import dino
from experiments.data import numbers
from reproduce.execute.jobs import Job, finished_runs, plan
from reproduce.execute.queue import execute
from reproduce.render.table import render
from reproduce.specs.table import TRAINING, read_tables
from tests.reproduce.conftest import overridden

TABLES = {
    table.name: table
    for table in read_tables()
    if table.driver in TRAINING and "full" in table.tiers and not table.tiers["full"].unavailable
}
SHORT = [
    *("train.steps=2", "train.warmup_steps=1", "train.batch_size=2", "train.dtype=fp32"),
    *("train.log_every=1", "train.eval_every=2", "train.eval_samples=4", "impl.device=cpu"),
    *("impl.micro_batch=null", "train.fp8_samples=null", "impl.threads=1", "impl.workers=0"),
    "impl.checkpoint_every=0",
]
BLOCKS = ["model.n_layer=2", "model.n_head=2", "model.n_embd=32", "model.block_size=32"]
VIT = ["model.depth=1", "model.heads=2", "model.width=16"]
DIGITS = ["data.name=digits", "data.source=digits", "data.repeats=1"]
BERT = [*BLOCKS, "model.n_embd=64", "model.n_inner=128", "model.vocab_size=320"]
CROPS = [
    *("data.image_size=32", "dino.local_crops=2", "dino.local_size=16", "dino.prototypes=64"),
    *("dino.hidden=32", "dino.bottleneck=16"),
]
TINY = {
    "gpt2": [*BLOCKS, "model.vocab_size=320"],
    "hf": ["model.block_size=32", "train.cooldown_steps=0"],
    "bert": [*BERT, "data.sequence_length=32", "data.max_predictions=4"],
    "cramming": [
        *(*BERT, "train.warmup_steps=0", "train.ramp_batch=null", "train.ramp_micro_steps=null")
    ],
    "transformer": [*BLOCKS, "model.n_inner=64"],
    "deit": [*VIT, *DIGITS, "model.n_classes=10"],
    "dino": [*VIT, *DIGITS, *CROPS],
}


def family(table):
    """The models that a table trains, a key of `TINY`."""
    chosen = table.tiers["full"]
    told = [*chosen.overrides, *(v.key for v in table.variants)]
    told += [o for row in table.rows for o in row.tiers.get("full", [])]
    text = " ".join(told)
    found = {"model=hf": "hf", "bert": "bert", "cramming": "cramming", "deit": "deit"}
    own = {"translate": "transformer", "dino": "dino"}.get(table.driver)
    return own or next((name for word, name in found.items() if word in text), "gpt2")


@pytest.fixture(scope="module")
def data(corpora, hf_model):
    """Overrides, by family, of a small text of our own in the place of what is downloaded."""
    root, source = corpora
    hf_model("gpt2", vocab_size=320).save_pretrained(root / "model")
    text = [*source, "data.name=words", "data.tokenizer=bpe", "data.vocab_size=280"]
    masked = [*source, "data.name=masked", "data.tokenizer=wordpiece", "data.vocab_size=100"]
    pairs = {
        "name": "numbers", "source": "numbers", "root": str(root), "vocab_size": 384,
        "source_language": "de", "target_language": "en", "batch_tokens": 256, "max_tokens": "null",
    }  # fmt: skip
    return {
        "gpt2": text,
        "hf": [*text, f"model.path={root / 'model'}"],
        "bert": masked,
        "cramming": masked,
        "transformer": [f"data.{key}={value}" for key, value in pairs.items()],
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder for the runs of all tables, which share some."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module", autouse=True)
def composed_once():
    """Every config is composed for the first of the tables that have it."""
    configs, compose = {}, Job.compose

    def once(job, source):
        key = (job.driver, *job.overrides, job.runs, source)
        if key not in configs:
            configs[key] = compose(job, source)
        return configs[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Job, "compose", once)
        yield


@pytest.mark.parametrize("name", TABLES)
def test_every_row_trains(name, data, runs, monkeypatch):
    # Its fits take half a minute: tests/experiments has them.
    monkeypatch.setattr(dino, "probe", lambda *_: {"knn_top1": 50.0, "linear_top1": 60.0})
    monkeypatch.setattr(numbers, "SIZES", {"test": 2, "val": 8, "train": 60})
    table, of = TABLES[name], family(TABLES[name])
    tier = dataclasses.replace(
        table.tiers["full"], measure={}, variants=table.variants_of("full")[:1]
    )
    # Patterns of halves of 24 blocks fit no smaller model: test_spec.py looks at them.
    rows = [row for row in table.rows if "2:8" not in row.label]
    kept = [c for c in table.columns if "metrics." in (c.value or "")]
    table = dataclasses.replace(table, tiers={**table.tiers, "full": tier}, columns=kept, rows=rows)
    table = overridden(table, "full", [*SHORT, *TINY[of], *data.get(of, [])])
    planned, said = plan(table, "full", runs), []
    execute(planned.jobs, said.append)
    finished = finished_runs(planned)
    assert len(finished) == len(list(table.trainings("full"))), "\n".join(said)
    lines = render(table, "full", finished).grid.lines
    assert "not run" not in [value for line in lines for value in line.values]
