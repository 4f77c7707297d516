"""The driver: every method trains, translations are scored, a stopped run goes on exactly."""

import json

import pytest
import torch
from safetensors.torch import load_file

from common_kernels import check24
from experiments import translate
from experiments.data import parallel
from experiments.runs.finished import FinishedRun
from experiments.support.checkpoint import read_sealed
from experiments.training import pretraining, routine
from tests.experiments.conftest import CPU, quiet, settings

TINY = [
    *settings("model", n_layer=1, n_head=2, n_embd=16, n_inner=32),
    *settings("train", steps=6, batch_size=2, warmup_steps=2, average_every=2, log_every=1),
    *settings("train", eval_every=4, eval_samples=2),
    *("data.batch_tokens=256", "search.longer=2", "search.beam=2", "impl.checkpoint_every=2", *CPU),
]


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.setattr(parallel, "SIZES", {"test": 12, "val": 40, "train": 120})
    root = [f"runs={tmp_path / 'runs'}", f"data.root={tmp_path / 'data'}"]
    return lambda *more: translate.load([*TINY, *root, *more])


def test_a_run_is_trained_and_its_averaged_weights_translate_and_are_scored(tiny):
    config = tiny("method=sr_ste")
    assert translate.finished(config) is None
    result = translate.run(config, quiet).result
    assert result["steps"] == 6 and 100 < result["tokens"] / (6 * 2) <= 256
    metrics = result["metrics"]
    assert {"val_loss", "averaged_val_loss", "bleu", "bleu_tokenized", "val_bleu"} <= metrics.keys()
    assert 0 <= metrics["bleu"] <= 100 and metrics["exact_match"] == 0.0
    written = read_sealed(config.directory() / "result.json")
    assert written == json.loads(json.dumps(result)) == translate.finished(config)
    assert "tok:13a" in result["bleu_signature"]
    networks = [f"{s}.layers.0.mlp.{fc}" for s in ("encoder", "decoder") for fc in ("fc1", "fc2")]
    assert sorted(result["converted"]) == sorted(networks)
    assert result["sparsity"]["illegal_groups"] == 0
    averaged, own = (
        load_file(config.directory() / f"{name}.safetensors") for name in ("ema", "model")
    )
    assert averaged.keys() == own.keys()
    assert all(int(check24(averaged[f"{name}.weight"])) == 0 for name in networks)
    model = FinishedRun.open(config.directory()).averaged()
    assert torch.equal(model.embedding.weight, averaged["embedding.weight"])
    assert not torch.equal(model.embedding.weight, own["embedding.weight"])
    source = config.open_source(model)
    translations, references = translate.translations(
        model.eval(), source.corpus, "test", config.search
    )
    assert (config.directory() / "translations.txt").read_text().splitlines() == translations
    assert references == [parallel.english(n) for n in parallel.numbers("test")]


def test_another_search_translates_anew_and_trains_no_more(tiny, monkeypatch):
    config, wider = tiny("method=dense"), tiny("method=dense", "search.beam=3")
    assert config.digest() == wider.digest()
    pretraining.run(config, quiet)  # stopped before it was translated
    assert pretraining.finished(config) is not None and translate.finished(config) is None
    first = translate.run(config, quiet).result
    assert translate.finished(wider) is None
    monkeypatch.setattr(routine, "_train", None)
    assert translate.run(wider, quiet).result["search"]["beam"] == 3
    monkeypatch.setattr(translate, "translate", None)
    assert translate.run(wider, quiet).result["metrics"]["val_loss"] == first["metrics"]["val_loss"]
