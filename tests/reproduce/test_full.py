"""Full tiers: the method of every row of every paper's table converts a tiny model of the paper's
kind."""

import dataclasses
from pathlib import Path

import pytest

from reproduce.execute import jobs
from reproduce.execute.jobs import Job
from reproduce.specs.table import read_tables
from tests.reproduce.conftest import overridden

TABLES = {
    table.name: table
    for table in read_tables()
    if table.driver in ("pretrain", "dino", "translate")
    and "full" in table.tiers
    and not table.tiers["full"].unavailable
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
RAMP = ("train.ramp_batch=null", "train.ramp_micro_steps=null")
TINY = {
    "gpt2": [*BLOCKS, "model.vocab_size=320"],
    "hf": ["model.block_size=32", "train.cooldown_steps=0"],
    "bert": [*BERT, "data.sequence_length=32", "data.max_predictions=4"],
    "cramming": [*BERT, "train.warmup_steps=0", *RAMP],
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
    translated = [f"data.{key}={value}" for key, value in pairs.items()]
    of_hub = [*text, f"model.path={root / 'model'}"]
    return {"gpt2": text, "hf": of_hub, "bert": masked, "cramming": masked,
            "transformer": translated}  # fmt: skip


converted: set[tuple[str, ...]] = set()  # tables share many rows


@pytest.mark.parametrize("name", TABLES)
def test_the_method_of_every_row_finds_its_layers(name, data):
    table, of = TABLES[name], family(TABLES[name])
    table = overridden(table, "full", [*SHORT, *TINY[of], *data.get(of, [])])
    variant, tier = table.variants_of("full")[0], table.tiers["full"]
    # Patterns of halves of 24 blocks fit no smaller model.
    for row in (row for row in table.rows_of("full") if "2:8" not in row.label and not row.not_run):
        overrides = jobs._training(tier, "full", variant, row)
        if (key := (table.driver, *overrides)) in converted:
            continue
        converted.add(key)
        if any(o.startswith("method.metric=") for o in overrides):  # others need inputs first
            overrides.append("method.metric=magnitude")
        config = Job("", table.driver, overrides, Path("runs")).compose(None)
        model = dataclasses.replace(config, init=None).build_model()
        method = config.build_method()
        method.convert(model)
        assert bool(method.sparse_layers) is (config.method != "dense"), row.label
