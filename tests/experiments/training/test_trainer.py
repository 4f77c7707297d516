"""Schedule, batches, resume, precision and what happens when a gradient is not finite."""

import itertools
import json
import math
import shutil

import pytest
from safetensors.torch import load_file

from common_kernels import check24
from experiments.config.settings import TrainConfig
from experiments.runs.finished import FinishedRun
from experiments.support import results
from experiments.support.checkpoint import read_sealed
from experiments.support.errors import UserError
from experiments.training import checkpoints, pretraining, trainer
from experiments.training.optimization import micro_batch_size
from experiments.training.tracking import read_metrics
from methods.nn.base import Method
from tests.experiments.conftest import losses, quiet
from tests.experiments.training.test_checkpoints import ALONE, save


def batch(size, **more):
    return TrainConfig(steps=9, batch_size=size, learning_rate=1.0, **more)


def test_fp8_scales_are_taken_over_what_train_says(tiny):
    for samples, micro_batch, ranks, expected in [
        (None, None, 1, 16),
        (4, None, 2, 4),
        (4, 4, 2, 4),
        (None, None, 2, "has 8 samples here, .* the batch of a step, 16; set train.fp8_samples=8$"),
        (None, 1, 1, "has 1 samples here, .* set train.fp8_samples=1$"),
        (4, 2, 1, "has 2 samples here, .* train.fp8_samples=4; set impl.micro_batch=null$"),
        (6, None, 1, "train.batch_size=16 is no multiple of train.fp8_samples=6 x 1"),
    ]:
        train = batch(16, fp8_samples=samples)
        if isinstance(expected, int):
            assert micro_batch_size(train, micro_batch, ranks, quantizes=True) == expected
        else:
            with pytest.raises(UserError, match=expected):
                micro_batch_size(train, micro_batch, ranks, quantizes=True)
    # A run on other micro-batches is refused, not changed in silence.
    with pytest.raises(UserError, match=r"set train\.fp8_samples=1$"):
        pretraining.run(tiny("method=s_ste", "method.fp8=paper", "impl.micro_batch=1"), quiet)
    with pytest.raises(UserError, match=r"train\.fp8_samples=1, but method=s_ste has no FP8"):
        tiny("method=s_ste", "train.fp8_samples=1")


def test_a_run_writes_what_it_says(tiny):
    config = tiny("method=s_ste", "method.fp8=paper")
    result = pretraining.run(config, quiet).result
    directory = config.directory()
    assert {p.name for p in directory.iterdir()} == {
        ".lock", "config.json", "latent.safetensors", "metrics.jsonl", "model.safetensors",
        "result.json", "tokenizer.json",
    }  # fmt: skip
    stored = read_sealed(directory / "result.json")
    assert stored == json.loads(json.dumps(result))
    assert stored["steps"] == 12 and stored["tokens"] == 12 * 4 * 16
    assert stored["sparsity"]["illegal_groups"] == 0
    assert 0 < stored["sparsity"]["density"] <= 0.5
    weights = load_file(directory / "model.safetensors")
    sparse = [w for name, w in weights.items() if ".mlp." in name]
    assert len(sparse) == 2
    assert all(int(check24(w)) == 0 and (w == 0).float().mean() >= 0.5 for w in sparse)
    assert sorted(losses(directory)) == list(range(12))
    assert sorted(losses(directory, "val_loss")) == [0, 4, 8, 12]
    # Near ln(300) at first: nothing is known but the vocabulary; less at the end.
    assert losses(directory)[0] == pytest.approx(math.log(320), abs=0.3)
    assert stored["metrics"]["val_loss"] < losses(directory, "val_loss")[0]


def test_what_is_shorter_than_asked_for_is_said(tiny, capsys):
    said = []
    config = tiny("method=ste", "train.steps=2", "train.warmup_steps=9", "train.eval_samples=9999")
    result = pretraining.run(config, said.append).result
    warmup, samples = result["notes"]
    assert warmup in said and samples in said
    assert warmup == "train.warmup_steps=9 does not fit train.steps=2: it is 0 here"
    there = result["metrics"]["eval_samples"]
    assert samples.startswith(f"train.eval_samples=9999, but only {there} samples are held out")
    assert result["config"]["train"]["warmup_steps"] == 0
    assert " tokens/s" in capsys.readouterr().out


def test_a_run_lists_its_revisions_and_refuses_checkpoints_of_another_layout(
    tiny, monkeypatch, interrupted
):
    config = tiny("method=ste", "impl.checkpoint_every=1")
    for step, name in ((3, "first"), (5, "second"), (7, "second")):
        monkeypatch.setattr(trainer, "revision", lambda name=name: name)
        with interrupted(step):
            pretraining.run(config, quiet)
    folder = config.directory() / "checkpoints"
    state = checkpoints.load_latest(folder, quiet, ALONE)
    assert state["revisions"] == ["first", "second"]
    newest = folder / f"step-{state['step']:09d}"
    unfit = r"checkpoints does not fit this version of the code \({}\); .* revision second, or"
    for changed, why in (
        ({"version": 9}, "ValueError: its layout has version 9, not 1"),
        ({"optimizer": {}}, "KeyError: .*"),
    ):
        shutil.rmtree(newest)  # an intact one stays
        save(folder, state["step"], state | changed)
        with pytest.raises(UserError, match=unfit.format(why)):
            pretraining.run(config, quiet)


def poison(monkeypatch, *steps):
    """Make the loss of these steps NaN, each of one micro-batch."""
    original, count = Method.micro_batch_loss, itertools.count()

    def loss(self, model, batch):
        value = original(self, model, batch)
        return value * math.nan if next(count) in steps else value

    monkeypatch.setattr(Method, "micro_batch_loss", loss)


def test_without_a_scaler_a_nan_stops_the_run_and_keeps_the_last_good_state(
    tiny, tmp_path, monkeypatch
):
    options = "method=sr_ste", "model.dropout=0.2"
    reference = tiny(*options)
    pretraining.run(reference, quiet)
    config = tiny(*options, f"runs={tmp_path / 'nan'}")
    with monkeypatch.context() as patch:
        poison(patch, 7)
        message = r"gradient of step 7 is not finite \(loss nan\).* a lower train\.learning_rate$"
        with pytest.raises(UserError, match=message):
            pretraining.run(config, quiet)
    messages = []
    pretraining.run(config, messages.append)  # the cause is gone: it goes on from there
    assert "resumed at step 7 of 12" in messages
    assert losses(config.directory()) == losses(reference.directory())


def test_a_training_that_comes_to_nothing_is_not_finished(tiny, tmp_path, monkeypatch):
    fit = pretraining.Trainer.fit

    def fit_to_no_end(trainer):
        fit(trainer)
        next(trainer.model.parameters()).data.fill_(math.nan)

    def skipped(patch):
        poison(patch, *range(7))

    def lost(patch):
        patch.setattr(pretraining.Trainer, "fit", fit_to_no_end)

    for spoil, dtype, why in (
        (skipped, "fp16", "7 of 12 steps were skipped, because their gradients were not finite"),
        (lost, "bf16", "val_loss is nan after the last step"),
    ):
        config = tiny("method=dense", f"train.dtype={dtype}", f"runs={tmp_path / dtype}")
        with monkeypatch.context() as patch, pytest.raises(UserError, match=why):
            spoil(patch)
            pretraining.run(config, quiet)
        assert pretraining.finished(config) is None
        with pytest.raises(UserError, match=rf"seed0 diverged \({why}"):
            FinishedRun.open(config.directory())
        result = results.read(config.directory(), config.digest(), diverged=True)
        assert (result["metrics"]["val_loss"], result["steps"]) == (None, 12)
        shutil.rmtree(config.directory() / "checkpoints")
        assert pretraining.run(config, quiet).result["metrics"]["val_loss"] < 9.0
        assert pretraining.finished(config) is not None


def test_whatever_became_of_the_log_a_resumed_run_has_every_record(tiny, tmp_path, interrupted):
    reference = tiny("method=s_ste", "train.steps=6")
    expected = pretraining.run(reference, quiet).result
    config = tiny("method=s_ste", "train.steps=6", f"runs={tmp_path / 'stopped'}")
    with interrupted(5):
        pretraining.run(config, quiet)
    path = config.directory() / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:99] + bytes(50) + b"\n")  # as a power cut leaves a file
    messages = []
    assert pretraining.run(config, messages.append).result["metrics"] == expected["metrics"]
    assert "resumed at step 3 of 6" in messages
    for key in ("loss", "val_loss", "flip_rate", "grad_norm"):
        assert losses(config.directory(), key) == losses(reference.directory(), key)
    steps = [r["step"] for r in read_metrics(path) if "loss" in r]
    assert steps == list(range(6))
