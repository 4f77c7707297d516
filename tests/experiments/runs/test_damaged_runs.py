"""Runs whose files are gone or damaged: who notices, and what mends them."""

import itertools
import json
import shlex
import shutil
from pathlib import Path

import pytest

from experiments import evaluate, finetune
from experiments.config import initial
from experiments.config.run import load
from experiments.evaluation.config import load as load_evaluation
from experiments.exporting import export
from experiments.finetuning.config import load as load_tuning
from experiments.runs.finished import FinishedRun
from experiments.support.checkpoint import read_sealed, sha256
from experiments.support.errors import UserError
from experiments.support.results import read_training
from experiments.training import pretraining
from tests.experiments.conftest import TINY_MODEL, quiet, words_of

FILES = ["model.safetensors", "latent.safetensors", "ema.safetensors", "tokenizer.json"]
READERS = {
    "evaluate": lambda run, text: evaluate.run(
        load_evaluation([f"run={run}", f"ppl={text}", "block_size=8", "impl.device=cpu"]), quiet
    ),
    "export": lambda run, _: export.export(FinishedRun.open(run), report=quiet),
    "finetune": lambda run, _: finetune.run(
        load_tuning([f"run={run}", "task=rte", "impl.device=cpu", "data.source=who/glue"]), quiet
    ),
    "the dense model": lambda run, _: FinishedRun.open(run).model("dense"),
    "the tokenizer": lambda run, _: FinishedRun.open(run).tokenizer(),
}


@pytest.fixture(scope="module")
def made(corpus_dir, tmp_path_factory):
    """Overrides of a finished run with averaged weights, in a folder of its own."""
    runs = tmp_path_factory.mktemp("damaged") / "runs"
    overrides = [
        *TINY_MODEL, "method=ste", "train.steps=3", "train.batch_size=2", "train.warmup_steps=0",
        "train.eval_samples=4", "train.ema=0.5", "impl.device=cpu", "impl.threads=1",
        *words_of(corpus_dir), f"runs={runs}",
    ]  # fmt: skip
    pretraining.run(load(overrides), quiet)
    return overrides


@pytest.fixture
def config(made, tmp_path):
    """The config of the run of `made`, in a copy of its folder."""
    whole = load(made)
    shutil.copytree(whole.runs, tmp_path / "runs")
    config = load([*made, f"runs={tmp_path / 'runs'}"])
    path = config.directory() / "result.json"
    result = read_sealed(path) | {"command": config.command}
    path.write_text(json.dumps(result))
    return config


def flip(path):
    """One bit in the middle of its content."""
    content = bytearray(path.read_bytes())
    content[len(content) * 3 // 4] ^= 1
    path.write_bytes(content)


def test_a_run_that_is_not_whole_is_not_done_and_its_command_mends_it(config):
    directory = config.directory()
    for path, harm in itertools.product((directory / name for name in FILES), (flip, Path.unlink)):
        before, content = sha256(path), path.read_bytes()
        harm(path)
        assert pretraining.finished(config) is None
        with pytest.raises(UserError, match=f"{path.name} .*; make the run again: ") as caught:
            initial.check_run_files(directory, read_training(directory))
        if path.name != FILES[-1] or harm is flip:
            path.write_bytes(content)
    assert "\n" not in str(caught.value)
    words = shlex.split(str(caught.value).partition("again: ")[2])
    assert words[:3] == ["python", "-m", "experiments.pretrain"]
    said = []
    pretraining.run(load(words[3:]), said.append)
    assert said[0].startswith(f"{path} ") and said[0].endswith("; trained anew")
    assert pretraining.finished(config) is not None
    assert sha256(path) == before  # on a CPU the same bits


def test_whoever_reads_a_run_looks_at_the_hashes(config, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the mask keeps two of four weights and drops others " * 9)
    for reader, read in READERS.items():
        name = {"the dense model": FILES[1], "the tokenizer": FILES[3]}.get(reader, FILES[0])
        path = config.directory() / name
        content = path.read_bytes()
        flip(path)
        with pytest.raises(UserError, match=f"{name} .*again: python -m experiments.pretrain"):
            read(config.directory(), text)
        path.write_bytes(content)


def test_a_run_is_not_begun_with_damaged_weights_and_stays_done_once_they_are_mended(config, made):
    runs = f"runs={config.runs}"
    after = load([*made, runs, "method=dense", f"init={config.directory()}"])
    other = load([*made, runs, "method=s_ste", f"init={config.directory()}"])
    pretraining.run(after, quiet)
    flip(config.directory() / "model.safetensors")
    for dependant in (after, other):
        with pytest.raises(UserError, match=r"again: python -m .* method=ste "):
            pretraining.run(dependant, quiet)
    pretraining.run(config, quiet)
    said = []
    pretraining.run(after, said.append)
    assert said == [f"done already: {after.directory()}"]


def test_a_result_from_before_there_were_hashes_is_read(config):
    path = config.directory() / "result.json"
    result = read_sealed(path)
    del result["files"], result["command"]
    path.write_text(json.dumps(result))
    assert pretraining.finished(config) is not None
    FinishedRun.open(config.directory()).model("dense")
    (config.directory() / "model.safetensors").unlink()
    assert pretraining.finished(config) is None
    with pytest.raises(UserError, match=r"model\.safetensors is missing; .*config\.json"):
        FinishedRun.open(config.directory()).model()
