"""Schedule, batches, resume, precision, gradients that are not finite, the log, and what is
measured in a step."""

import itertools
import json
import math
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from common_kernels import check24
from experiments.config.settings import TrainConfig
from experiments.runs.finished import FinishedRun
from experiments.support import results
from experiments.support.checkpoint import read_sealed
from experiments.support.errors import UserError
from experiments.training import descent, pretraining, routine
from experiments.training.optimization import micro_batch_size
from experiments.training.tracking import MetricsLog, read_metrics
from methods.nn.base import Method
from tests.experiments.conftest import losses, quiet, untimed


def test_fp8_scales_are_taken_over_what_train_says(tiny):
    for samples, micro_batch, ranks, expected in [
        (None, None, 1, 16),
        (4, None, 2, 4),
        (4, 4, 2, 4),
    ]:
        train = TrainConfig(steps=9, batch_size=16, learning_rate=1.0, fp8_samples=samples)
        assert micro_batch_size(train, micro_batch, ranks, quantizes=True) == expected
    # A run on other micro-batches is refused, not changed in silence.
    with pytest.raises(UserError, match=r"set train\.fp8_samples=1$"):
        pretraining.run(tiny("method=s_ste", "method.fp8=paper", "impl.micro_batch=1"), quiet)


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
    assert stored["metrics"]["val_loss"] < losses(directory, "val_loss")[0]


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


def test_a_training_that_comes_to_nothing_is_not_finished(tiny, monkeypatch):
    config = tiny("method=dense", "train.dtype=fp16")
    why = "7 of 12 steps were skipped, because their gradients were not finite"
    with monkeypatch.context() as patch, pytest.raises(UserError, match=why):
        poison(patch, *range(7))
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
    assert untimed(config) == untimed(reference)


def test_a_run_that_was_stopped_has_one_chart_and_one_event_file(tiny, monkeypatch, interrupted):
    """With all of its records and its config, and those before the stop but once."""
    opened, files = [], {}

    class SummaryWriter:
        def __init__(self, directory):
            self.path = Path(directory) / f"events.out.tfevents.{len(files)}"
            self.path.touch()
            self.scalars = files[self.path] = {}

        def add_scalar(self, name, value, step):
            assert (name, step) not in self.scalars
            self.scalars[name, step] = value

        def add_text(self, name, text):
            self.scalars[name] = text

        def close(self):
            """Nothing is open."""

    log = SimpleNamespace(log=lambda *a, **k: None, finish=lambda: None)
    wandb = SimpleNamespace(init=lambda **given: opened.append(given) or log)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    viewer = SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", viewer)
    monkeypatch.setattr(routine, "check_installed", lambda *viewer: None)
    config = tiny("method=ste", "impl.loggers=[wandb,tensorboard]")
    with interrupted(5):
        pretraining.run(config, quiet)
    pretraining.run(config, quiet)
    assert len(opened) == 2 and opened[0] == opened[1]
    assert opened[0]["config"] == config.as_dict()
    [events] = config.directory().glob("events.out.tfevents.*")
    scalars = files[events]
    assert '"name": "ste"' in scalars.pop("config")
    assert scalars == {
        (name, record["step"]): value
        for record in read_metrics(config.directory() / "metrics.jsonl")
        for name, value in record.items()
        if name != "step" and isinstance(value, int | float)
    }


def test_a_full_disk_and_a_damaged_line_are_one_line(tmp_path, full_disk):
    """The disk cuts no record but the last."""
    log = MetricsLog(tmp_path, [], (), {})
    record = {"step": 0, "text": "x" * 300}
    with full_disk(1000), pytest.raises(UserError, match=r"metrics\.jsonl cannot be written: File"):
        for step in range(4):
            log.write({**record, "step": step})
    assert [r["step"] for r in read_metrics(log.path)] == [0, 1, 2]
    MetricsLog(tmp_path, log.lines, (), {}).close()
    assert [r["step"] for r in read_metrics(log.path)] == [0, 1, 2, 3]
    log.path.write_bytes(b'{"step": 0}\n\x00\xff\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"line 2 of .*metrics\.jsonl is damaged; remove"):
        read_metrics(log.path)


SHORT = ("train.steps=6", "train.warmup_steps=2", "train.log_every=1")


def changes(config):
    pretraining.run(config, quiet)
    log = untimed(config)
    return {r["step"]: r for r in log if "actual_change" in r}, log


def test_the_training_stays_the_same_and_an_interrupted_one_measures_the_same(
    tiny, tmp_path, interrupted
):
    given = "method=fst", "method.refresh_every=2", *SHORT, "impl.micro_batch=2"
    plain, observed, stopped = (
        tiny(*given, *more, "impl.checkpoint_every=1", f"runs={tmp_path / str(len(more))}")
        for more in ([], ["train.descent_every=2"], ["train.descent_every=2", "seed=0"])
    )
    assert plain.directory().name == observed.directory().name
    found, log = changes(observed)
    _, want = changes(plain)
    assert [r for r in log if "actual_change" not in r] == want
    assert list(found) == [0, 2, 4]
    assert all("old_masks_change" in r for r in found.values())
    # The first step has a learning rate of 0: nothing changes.
    assert all(value == 0.0 for name, value in found[0].items() if name != "step")
    assert found[2]["predicted_change"] < 0
    with interrupted(4):
        pretraining.run(stopped, quiet)
    assert changes(stopped) == (found, log)


def test_what_is_measured(tiny, monkeypatch):
    """Against passes by hand: the batch's loss at either end, the gradient at the start."""
    seen = []

    class Spy(descent.Descent):
        def __init__(self, optimization, batches, shares):
            self.gradients = by_hand(optimization.model, batches)[1]
            super().__init__(optimization, batches, shares)
            assert all(p.grad is None for p in optimization.model.parameters())

        def after(self):
            found, model = super().after(), self.optimization.model
            moves = [p.detach() - w for p, w, _ in self.weights]
            want = sum((g * d).sum() for g, d in zip(self.gradients, moves, strict=True))
            seen.append((found, float(want), float(by_hand(model, self.batches)[0] - self.loss)))
            assert all(p.grad is None for p in model.parameters())
            return found

    monkeypatch.setattr("experiments.training.trainer.Descent", Spy)
    # Two micro-batches; no sampling, so that the gradient is the same whenever it is taken.
    changes(tiny("method=ste", *SHORT, "train.descent_every=1", "impl.micro_batch=2"))
    assert len(seen) == 6
    for found, predicted, actual in seen:  # the masks that were put in for old_masks are out again
        assert float(found["predicted_change"]) == pytest.approx(predicted, rel=1e-4, abs=1e-9)
        assert float(found["actual_change"]) == pytest.approx(actual, abs=1e-6)


def by_hand(model, batches):
    """(mean loss of equal micro-batches, gradients)."""
    loss = sum(model(**batch)[1] for batch in batches) / len(batches)
    return loss.detach(), torch.autograd.grad(loss, list(model.parameters()))
