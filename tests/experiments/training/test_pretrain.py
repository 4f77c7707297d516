"""The run directory: whose it is, what is refused, and what a refusal leaves alone."""

import os
import shutil
import signal
from contextlib import nullcontext

import pytest
import torch

from experiments.data.prepare import prepare
from experiments.support.errors import Terminated, UserError, deferred_stop, exit_with_one_line
from experiments.training import checkpoints, pretraining, routine
from experiments.training.distributed import World
from experiments.training.trainer import Trainer
from tests.experiments.conftest import Interrupted, quiet


def scaled(factor):
    return lambda state: {name: factor * tensor for name, tensor in state.items()}


def contents(directory):
    return {p: p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.fixture(scope="session")
def other_corpus(make_corpus):
    """Root of a corpus of the same name and vocabulary as that of `corpus_dir`, of other text."""
    return make_corpus("a scale is measured once and frozen until training ends", seed=1)


def test_dropout_differs_by_seed_and_rank_and_from_the_initial_weights(tiny, monkeypatch):
    found = []

    def resume(self):
        found.append(torch.initial_seed())
        raise Interrupted

    monkeypatch.setattr(Trainer, "resume", resume)
    for seed, rank in ((0, 0), (1, 0), (0, 1)):
        place = World(rank, 1, torch.device("cpu"))
        monkeypatch.setattr(routine, "world", lambda *_, place=place: nullcontext(place))
        with pytest.raises(Interrupted):
            pretraining.run(tiny("method=dense", f"seed={seed}"), quiet)
    assert len({0, 1, *found}) == 5


def of(corpus):
    """Overrides of the corpus in this root."""
    return f"data.root={corpus}", f"data.source={corpus / 'text'}"


def test_a_run_on_another_corpus_is_refused_and_nothing_changes(
    tiny, interrupted, other_corpus, corpus_dir
):
    """A training that was interrupted, and then one that has ended."""
    config, other = tiny("method=dense"), tiny("method=dense", *of(other_corpus))
    assert other.directory() == config.directory()
    with interrupted(5):
        pretraining.run(config, quiet)
    before = contents(config.directory())
    assert config.directory() / "config.json" in before
    with pytest.raises(UserError, match="was made on other data than those in"):
        pretraining.run(other, quiet)
    assert contents(config.directory()) == before
    pretraining.run(config, quiet)
    before = contents(config.directory())
    message = f"was made on other data .*from {corpus_dir}/text.*another data.name"
    with pytest.raises(UserError, match=message):
        pretraining.run(other, quiet)
    assert contents(config.directory()) == before


def test_a_trained_model_is_evaluated_on_the_other_corpus_too(
    tiny, corpus_dir, other_corpus, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shared = f"data.tokenizer={corpus_dir / 'words-v300'}"
    for name, root, same in (("again", corpus_dir, True), ("others", other_corpus, False)):
        shutil.copytree(root / "text", name)
        config = tiny("method=dense", "train.steps=2", f"data.other={name}", shared)
        prepare(config.data)
        prepare(config.data.other_corpus)
        metrics = pretraining.run(config, quiet).result["metrics"]
        assert (metrics["other_val_loss"] == metrics["val_loss"]) is same


def test_a_run_that_starts_from_other_weights_of_the_same_run_is_not_done(
    tiny, interrupted, made_again, monkeypatch
):
    first = tiny("method=dense", "train.steps=2")
    pretraining.run(first, quiet)
    second = tiny("method=ste", f"init={first.directory()}")
    pretraining.run(second, quiet)
    assert pretraining.finished(second) is not None
    made_again(first.directory(), scaled(0.5))
    assert pretraining.finished(second) is None
    with interrupted(5):
        pretraining.run(second, quiet)
    assert not (second.directory() / "result.json").exists()  # that of the other weights
    made_again(first.directory(), scaled(3.0))
    with pytest.raises(UserError, match="belongs to another config"):
        pretraining.run(second, quiet)


def test_sparse_products_are_asked_for_and_told(tiny):
    """On a CPU all are dense; in fp32 there is no sparse one anywhere."""
    said = []
    result = pretraining.run(tiny("method=s_ste"), said.append).result
    assert any(line.startswith("products of 2 layers: fprop, wgrad dense in 2") for line in said)
    assert set(result["matmul"]) == set(result["converted"])
    speed = result["acceleration"]
    reasons = {choice["reason"] for layer in speed["layers"].values() for choice in layer.values()}
    assert len(reasons) == 2 and any("not torch.float32" in reason for reason in reasons)
    assert (speed["step"]["saved_ms"], speed["step"]["expected_gain"]) == (0, 1)
    assert not any("sparse products save" in line for line in said)


def signalled(monkeypatch, number):
    """Let the process receive the signal `number` in step 3."""
    original = Trainer._train_step

    def train_step(self, batches):
        if self.step == 3:
            os.kill(os.getpid(), number)
        return original(self, batches)

    monkeypatch.setattr(Trainer, "_train_step", train_step)


def test_a_signal_ends_the_step_and_leaves_a_checkpoint(tiny, monkeypatch):
    config = tiny("method=ste", "impl.checkpoint_every=50")
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch, pytest.raises(Terminated):
        signalled(patch, signal.SIGTERM)
        pretraining.run(config, quiet)
    assert signal.getsignal(signal.SIGTERM) is before
    said = []
    pretraining.run(config, said.append)
    assert "resumed at step 4 of 12" in said


def test_a_run_without_checkpoints_leaves_none_after_a_signal(tiny, monkeypatch, capsys):
    config = tiny("method=ste", "impl.checkpoint_every=0")
    signalled(monkeypatch, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match=r"begins anew: .*every=0 nothing is saved") as stop:
        pretraining.run(config, quiet)
    with pytest.raises(SystemExit), exit_with_one_line("goes on"):
        raise stop.value
    assert capsys.readouterr().err == f"interrupted; the same command {stop.value}\n"
    assert checkpoints.found(config.directory() / "checkpoints") == []


def test_a_second_signal_does_not_wait():
    with pytest.raises(KeyboardInterrupt), deferred_stop() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.kind is KeyboardInterrupt
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the second signal was swallowed")
