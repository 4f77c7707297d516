"""Retraining transformers' models and our own, and the search for a decay factor."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common_kernels import check24
from experiments import distill, find_decay
from experiments.config.initial import load_weights
from experiments.config.run import load
from experiments.data.corpus import CALIBRATION, CausalText, load_tokens
from experiments.data.prepare import prepare
from experiments.data.tokenizer import END_OF_TEXT
from experiments.find_decay import DecaySearch, compared, markdown
from experiments.support.errors import UserError
from experiments.training import pretraining
from experiments.training.trainer import Trainer
from methods import ast, dense
from models.hf import CausalLM
from tests.experiments.conftest import quiet


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
        others = [override for override in overrides if not override.startswith("model.")]
        return load([*others, f"model.path={path}", *more], "distill")

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


@pytest.mark.parametrize(("family", "per_block"), [("gpt2", 4), ("opt", 6), ("llama", 7)])
def test_the_export_is_what_plain_transformers_loads(retrain, family, per_block):
    config = retrain(family)
    result = distill.run(config, quiet).result
    assert (result["sparsity"]["density"], result["sparsity"]["illegal_groups"]) == (0.5, 0)
    assert len(result["converted"]) == 2 * per_block
    ours, theirs = finished_model(config), plain(config)
    with torch.no_grad():
        logits = ours(tokens())[0]
        assert torch.equal(theirs(input_ids=tokens()).logits, logits)
        again = CausalLM.from_pretrained(config.directory() / distill.EXPORT).eval()
        assert torch.equal(again(tokens())[0], logits)
    assert int(check24(ours.get_submodule(result["converted"][0]).weight)) == 0


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
    source = CausalText(load_tokens(config.data, config.seed), 32)  # as many as the model takes
    requests = [(CALIBRATION, range(12)), (CALIBRATION, range(4, 9))]
    windows = [batch["input"] for batch in source.batches(requests)]
    assert torch.equal(windows[0][4:9], windows[1])
    assert len(given) == 2 and all(torch.equal(each, windows[0]) for each in given)
    [first_step] = source.batches([(0, range(12))])
    assert not torch.equal(windows[0], first_step["input"])


def test_our_own_model_starts_from_a_finished_run(tiny, overrides):
    dense = tiny("method=dense")
    pretraining.run(dense, quiet)
    given = ["model=gpt2_nano", *overrides, f"init={dense.directory()}", "method.include=[*mlp*]"]
    config = load(given, "distill")
    started = config.build_model()
    for name, parameter in load_file(dense.directory() / "model.safetensors").items():
        assert torch.equal(started.get_parameter(name), parameter)
    distill.run(config, quiet)
    with torch.no_grad():
        ours, theirs = finished_model(config)(tokens())[0], plain(config)(input_ids=tokens()).logits
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)


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


@pytest.fixture
def search(tiny):
    """`search(0.0, 1.0, "method=sr_ste")`: candidates and overrides, a warm-up of 12 steps."""

    def make(*arguments):
        candidates = tuple(a for a in arguments if isinstance(a, float))
        overrides = [a for a in arguments if isinstance(a, str)]
        method = [] if any("method=" in o for o in overrides) else ["method=fst"]
        return DecaySearch(tiny(*method, "train.warmup_steps=12", *overrides), candidates)

    return make


def test_runs_are_the_warm_up_of_the_configured_training(search):
    wanted = search(0.0, 0.5, "train.steps=10000", "method.mvue=sequential")
    assert wanted.window == range(9, 12)
    for alpha, fraction in ((None, 1.0), (0.5, 0.0)):
        run = wanted.training(alpha)
        assert (run.train.steps, run.train.warmup_steps) == (12, 12)
        assert replace(run.train, steps=10_000) == wanted.config.train
        options = run.method_options
        assert (options.refresh_every, options.measure_every, options.total_steps) == (1, 1, 12)
        assert (options.mvue, options.alpha) == ("sequential", alpha or 0.0)
        assert options.dense_fraction == fraction
    # The decay factor that happens to be configured changes neither runs nor result.
    other = search(0.0, 0.5, "train.steps=10000", "method.mvue=sequential", "method.alpha=3")
    assert other.directory() == wanted.directory()
    # Row-wise: compared with plain dense training.
    run = search(0.1, "method=sr_ste", "method.include=[*c_fc*]").training(None)
    assert (run.method, type(run.method_options)) == ("dense", dense.Config)
    assert run.method_options.include == ("*c_fc*",)


def test_the_search_of_fst(search, monkeypatch):
    """Files and figures; a repeated call trains nothing and finds the same."""
    wanted, heard = search(0.0, 1.0), []
    assert find_decay.finished(wanted) is None
    result = find_decay.run(wanted, heard.append)
    record = json.loads((wanted.directory() / "result.json").read_text())
    zero, one = record["candidates"]
    assert (zero["alpha"], one["alpha"]) == (0.0, 1.0)
    # A decay of 1 outweighs every gradient: what is pruned stays pruned.
    assert one["mu"] < zero["mu"]
    for entry in record["candidates"]:
        assert entry["mu"] == entry["flip_rate"] / record["dense"]["flip_rate"]
    assert any("| alpha |" in text for text in heard)
    assert result["metrics"] == find_decay.finished(wanted)["metrics"]

    # The dense run with virtual transposable masks is the plain dense run.
    options = dense.Config(total_steps=12)
    plain = replace(wanted.training(None), method="dense", method_options=options)
    metrics = pretraining.run(plain, quiet).result["metrics"]
    assert metrics["val_loss"] == record["dense"]["val_loss"]
    monkeypatch.setattr(Trainer, "fit", None)
    assert find_decay.run(wanted, quiet)["metrics"] == result["metrics"]


def test_mu_is_a_ratio_and_the_feasible_candidates_are_told(search):
    rates = [0.02, 0.022, 0.0188, 0.016, 0.0122, 0.006]
    wanted = search(0.0, 1e-4, 1e-3, 1e-2, 1e-1)

    def figures(rates):
        return [{"flip_rate": rate, "directory": "x", "val_loss": 4.0} for rate in rates]

    record = compared(wanted, figures(rates))
    mus = [entry["mu"] for entry in record["candidates"]]
    assert mus == pytest.approx([1.1, 0.94, 0.8, 0.61, 0.3])
    assert [e["feasible"] for e in record["candidates"]] == [False, True, True, True, False]
    assert "Recommended: alpha=0.001 (mu=0.80)" in markdown(record)
    none = compared(search(0.5), figures((2e-2, 1e-3)))
    assert none["metrics"]["alpha"] is None
