"""A small corpus and a model of a few thousand parameters for the drivers."""

import gzip
import json
import random
import resource
import struct
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from experiments.bench.__main__ import main
from experiments.config.run import load
from experiments.data.manifest import DataConfig
from experiments.data.prepare import prepare
from experiments.runs.finished import FinishedRun
from experiments.support.checkpoint import read_sealed, sha256
from experiments.training import pretraining
from experiments.training.tracking import read_metrics
from experiments.training.trainer import Trainer


def settings(group, **values):
    """settings("train", steps=12) -> ["train.steps=12"]: overrides of one group."""
    return [f"{group}.{name}={value}" for name, value in values.items()]


TINY_MODEL = settings("model", n_layer=1, n_head=2, n_embd=16, vocab_size=320, block_size=16)
CPU = settings("impl", device="cpu", threads=1)
SHORT = settings("train", steps=12, batch_size=4, warmup_steps=2, log_every=1)
SHORT += [*settings("train", eval_every=4, eval_samples=4), *CPU, "impl.checkpoint_every=3"]


def quiet(message):
    """Take a message on progress, and show nothing."""


def untimed(config):
    """The log of a run without its times."""
    found = read_metrics(config.directory() / "metrics.jsonl")
    return [{k: v for k, v in r.items() if k != "step_seconds"} for r in found]


def losses(directory, key="loss"):
    return {r["step"]: r[key] for r in read_metrics(directory / "metrics.jsonl") if key in r}


def words_of(corpus_dir):
    """Overrides of the corpus that most tests train on."""
    return settings(
        "data", name="words", source=corpus_dir / "text", root=corpus_dir, vocab_size=300
    )


def bench(benchmark, out, *more):
    """The exit status of a benchmark on a CPU that times everything twice."""
    options = ["--device", "cpu", "--threads", "1", "--repeats", "2", "--out", str(out)]
    return main([benchmark, *options, *more])


@pytest.fixture(autouse=True)
def threads():
    """Restore the number of threads, which runs set."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_corpus(tmp_path_factory):
    """make_corpus("these are drawn"): folder with a prepared corpus named `words`, 400 documents of
    random ones of these words, and its `text`."""

    def make(words, seed=0):
        root = tmp_path_factory.mktemp("corpus")
        source = root / "text"
        source.mkdir()
        generator = random.Random(seed)
        for name in ("a.txt", "b.txt"):
            lines = (" ".join(generator.choices(words.split(), k=20)) for _ in range(200))
            (source / name).write_text("\n".join(lines) + "\n")
        prepare(DataConfig("words", str(source), str(root), tokenizer="bpe", vocab_size=300))
        return root

    return make


@pytest.fixture(scope="session")
def corpus_dir(make_corpus):
    """Folder with the corpus that most tests train on."""
    return make_corpus("the mask keeps two of four weights and drops others")


@pytest.fixture
def overrides(corpus_dir, tmp_path):
    """Hydra overrides of a run of twelve steps under `tmp_path/runs`."""
    return [*TINY_MODEL, *SHORT, *words_of(corpus_dir), f"runs={tmp_path / 'runs'}"]


@pytest.fixture(scope="session")
def trained(corpus_dir, tmp_path_factory):
    """FinishedRun of a nano GPT-2 with dense master weights behind its 2:4 ones, made once. A test
    that changes its files copies `trained.directory`."""
    runs = f"runs={tmp_path_factory.mktemp('runs')}"
    more = ["model.block_size=32", "train.learning_rate=1e-2", "method=ste"]
    config = load([*TINY_MODEL, *SHORT, *words_of(corpus_dir), runs, *more])
    pretraining.run(config, quiet)
    return FinishedRun.open(config.directory())


@pytest.fixture
def full_disk():
    """`with full_disk(size):` no file grows beyond so many bytes, as where the disk is full."""

    @contextmanager
    def limited(size=100_000):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited


@pytest.fixture
def tiny(overrides):
    """`tiny("method=ste", "seed=1")` -> RunConfig."""
    return lambda *more: load([*overrides, *more])


class Interrupted(Exception):
    """Stands for the end of the process."""


@pytest.fixture
def interrupted(monkeypatch):
    """`with interrupted(step):` the training in it ends in the middle of `step`."""

    @contextmanager
    def ending(step):
        original = Trainer._train_step

        def dying(self, batches):
            if self.step == step:
                raise Interrupted
            return original(self, batches)

        with monkeypatch.context() as patch, pytest.raises(Interrupted):
            patch.setattr(Trainer, "_train_step", dying)
            yield

    return ending


@pytest.fixture(scope="session")
def made_again():
    """made_again(directory, change): a run with other weights, as if it was made anew: `change` is
    called with the state dict and returns what is stored in its place."""

    def replace(directory, change):
        path = directory / "model.safetensors"
        save_file(change(load_file(path)), path)
        result = read_sealed(directory / "result.json")
        if "files" in result:
            result["files"][path.name] = sha256(path)
        (directory / "result.json").write_text(json.dumps(result))

    return replace


@pytest.fixture(scope="session")
def write_idx():
    """write_idx(folder): 12 images for training and 6 for validation, of three classes, as four idx
    files; returns the folder. The level of an image tells its class."""

    def write(root, size=8, zipped=False, seed=0):
        root.mkdir(parents=True)
        generator = np.random.default_rng(seed)
        for name, count in (("train", 12), ("t10k", 6)):
            labels = (np.arange(count) % 3).astype(np.uint8)
            noise = generator.integers(0, 40, (count, size, size), dtype=np.uint8)
            pixels = (60 * labels[:, None, None] + noise).astype(np.uint8)
            for kind, values in (("images-idx3", pixels), ("labels-idx1", labels)):
                dims = struct.pack(f">{values.ndim}I", *values.shape)
                content = bytes((0, 0, 8, values.ndim)) + dims + values.tobytes()
                path = root / f"{name}-{kind}-ubyte{'.gz' if zipped else ''}"
                path.write_bytes(gzip.compress(content) if zipped else content)
        return root

    return write
