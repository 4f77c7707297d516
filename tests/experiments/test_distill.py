"""Retraining transformers' models and our own: what comes out, and where weights come from."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common_kernels import check24
from experiments import distill
from experiments.config.initial import load_weights
from experiments.config.run import load
from experiments.data.corpus import CALIBRATION, CausalText, load_tokens
from experiments.data.prepare import prepare
from experiments.data.tokenizer import END_OF_TEXT
from experiments.support.errors import UserError
from experiments.training import pretraining
from experiments.training.tracking import read_metrics
from methods import ast
from models.hf import CausalLM
from tests.experiments.conftest import quiet

PER_BLOCK = {"gpt2": 4, "opt": 6, "llama": 7}


def without_model(overrides):
    return [o for o in overrides if not o.startswith("model.")]


@pytest.fixture
def checkpoint(hf_model, tmp_path):
    """checkpoint("gpt2") -> folder of a random checkpoint without a tokenizer."""

    def write(family, **options):
        folder = tmp_path / family
        hf_model(family, **options).save_pretrained(folder)
        return folder

    return write


@pytest.fixture
def retrain(checkpoint, overrides):
    """retrain("gpt2", "method.alpha=0") -> RunConfig of twelve steps of AST."""

    def config(family, *more):
        path = family if isinstance(family, Path) else checkpoint(family)
        return load([*without_model(overrides), f"model.path={path}", *more], "distill")

    return config


def plain(config):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(config.directory() / distill.EXPORT)


def finished_model(config):
    """The model of a finished run as the trainer had it."""
    model = config.build_model()
    load_weights(model, config.directory())
    return model.eval()


def tokens(vocab_size=300, length=16):
    return torch.randint(0, vocab_size, (4, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
def test_the_export_is_what_plain_transformers_loads(retrain, family):
    config = retrain(family)
    result = distill.run(config, quiet).result
    assert (result["sparsity"]["density"], result["sparsity"]["illegal_groups"]) == (0.5, 0)
    assert len(result["converted"]) == 2 * PER_BLOCK[family]
    ours, theirs = finished_model(config), plain(config)
    with torch.no_grad():
        logits = ours(tokens())[0]
        assert torch.equal(theirs(input_ids=tokens()).logits, logits)
        again = CausalLM.from_pretrained(config.directory() / distill.EXPORT).eval()
        assert torch.equal(again(tokens())[0], logits)
    assert int(check24(ours.get_submodule(result["converted"][0]).weight)) == 0
    assert not (config.directory() / ".export").exists()


def test_the_wanda_metric_calibrates_on_seeded_windows_of_the_training_text(retrain, monkeypatch):
    given, original = [], ast.Method.calibrate

    def calibrate(self, model, batches):
        read = list(batches)
        given.append(torch.cat([batch["input"] for batch in read]))
        original(self, model, read)

    monkeypatch.setattr(ast.Method, "calibrate", calibrate)
    config = retrain("opt", "method.metric=wanda", "method.calibration_sequences=12")
    first = distill.run(config, quiet).result
    shutil.rmtree(config.directory())
    assert distill.run(config, quiet).result["metrics"] == first["metrics"]
    other = retrain("opt", "method.metric=wanda", "method.calibration_sequences=3")
    assert other.digest() != config.digest()
    source = CausalText(load_tokens(config.data, config.seed), 32)  # as many as the model takes
    requests = [(CALIBRATION, range(12)), (CALIBRATION, range(4, 9))]
    windows = [batch["input"] for batch in source.batches(requests)]
    assert torch.equal(windows[0][4:9], windows[1])
    assert len(given) == 2 and all(torch.equal(each, windows[0]) for each in given)
    [first_step] = source.batches([(0, range(12))])
    assert not torch.equal(windows[0], first_step["input"])


def test_our_own_model_starts_from_a_finished_run(tiny, overrides):
    dense = tiny("method=dense")
    source = pretraining.run(dense, quiet).result

    def from_run(directory, *more):
        return load(["model=gpt2_nano", *overrides, f"init={directory}", *more], "distill")

    config = from_run(dense.directory(), "method.include=[*mlp*]")
    started = config.build_model()
    for name, parameter in load_file(dense.directory() / "model.safetensors").items():
        assert torch.equal(started.get_parameter(name), parameter)
    distill.run(config, quiet)
    with torch.no_grad():
        ours, theirs = finished_model(config)(tokens())[0], plain(config)(input_ids=tokens()).logits
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)
    # Training began where the dense run ended: a dense method measures its very loss.
    again = from_run(dense.directory(), "method=dense")
    pretraining.run(again, quiet)
    assert read_metrics(again.directory() / "metrics.jsonl")[0] == {
        "step": 0,
        "val_loss": pytest.approx(source["metrics"]["val_loss"], rel=1e-6),
    }


def test_a_checkpoint_brings_its_own_tokenizer(retrain, checkpoint, corpus_dir, tmp_path):
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder, file = checkpoint("llama"), corpus_dir / "words-v300" / "tokenizer.json"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token=END_OF_TEXT)
    tokenizer.save_pretrained(folder)
    config = retrain(folder, f"data.root={tmp_path / 'data'}", "train.steps=2",
                     "train.warmup_steps=0")  # fmt: skip
    assert config.identity()["data"]["tokenizer"] == "hf"
    with pytest.raises(UserError, match="prepare_data` with the same model= and data"):
        distill.run(config, quiet)
    prepare(config.data)
    distill.run(config, quiet)
    corpus = load_tokens(config.data, 0)
    text = "the mask keeps two of four" + END_OF_TEXT
    ids = corpus.encoding.encode_ordinary_batch([text])[0]
    tokenizer = AutoTokenizer.from_pretrained(config.directory() / distill.EXPORT)
    assert corpus.encoding.eot_token == tokenizer.eos_token_id
    assert tokenizer.eos_token_id not in ids  # in a document its name is text
    plain_ids = tokenizer("the mask keeps two of four", add_special_tokens=False)["input_ids"]
    assert ids[: len(plain_ids)] == plain_ids and len(ids) > len(plain_ids)
    assert corpus.encoding.decode(ids) == text
    # The corpus of the project's own tokenizer, which has the same merges, holds the same tokens.
    own = load_tokens(retrain("opt").data, 0)
    assert corpus.directory != own.directory
    assert corpus.tokens["train"].tolist() == own.tokens["train"].tolist()
