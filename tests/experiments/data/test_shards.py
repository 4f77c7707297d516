"""Splits of more than one token file, tokens beyond uint16, and mixtures of prepared corpora."""

import json
import random

import numpy as np
import pytest
import torch

from experiments.data import shards
from experiments.data.corpus import check_fits, load_tokens
from experiments.data.manifest import SPLITS, DataConfig, fingerprint, read_manifest, token_type
from experiments.data.order import Order
from experiments.data.prepare import prepare
from experiments.data.shards import TokenFiles
from experiments.support.checkpoint import exclusive
from experiments.support.errors import UserError

TEXTS = [f"document {i}: naïve café {'and so on ' * (i % 7)}" for i in range(300)]


@pytest.fixture(scope="module")
def hub_cache(tmp_path_factory):
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("hub")
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
        yield


@pytest.fixture
def text(tmp_path, hub_cache):
    folder = tmp_path / "text"
    folder.mkdir()
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def config_of(text, root, **options):
    return DataConfig("mine", str(text), str(root), "bpe", 300, **options)


@pytest.fixture
def whole(text, tmp_path):
    config = config_of(text, tmp_path / "whole")
    prepare(config)
    return load_tokens(config, seed=0)


@pytest.fixture
def sharded(text, tmp_path):
    return config_of(text, tmp_path / "shards", shard_tokens=300)


def test_slices_of_several_arrays_are_those_of_one():
    array = np.arange(23)
    files = TokenFiles(np.split(array, [5, 6, 17]))
    assert len(files) == 23
    for first in range(23):
        for last in range(first + 1, 25):
            assert files[first:last].tolist() == array[first:last].tolist()


def test_shards_hold_the_tokens_of_one_file_and_give_its_batches(whole, sharded):
    directory = prepare(sharded)
    corpus = load_tokens(sharded, seed=0)
    for split in SPLITS:
        assert np.array_equal(corpus.tokens[split][0 : 10**9], whole.tokens[split])
        ours, theirs = corpus.manifest["splits"][split], whole.manifest["splits"][split]
        assert {k: ours[k] for k in theirs if k in ours} == {
            k: theirs[k] for k in theirs if k in ours
        }
        files = [shard["file"] for shard in ours["shards"]]
        assert len(files) == {"train": 17, "val": 2}[split]
        for shard in ours["shards"]:
            tokens = np.fromfile(directory / shard["file"], dtype="<u2")
            assert len(tokens) == shard["tokens"]
            assert tokens[-1] == corpus.manifest["tokenizer"]["end_of_text"]
    assert fingerprint(corpus.manifest) == fingerprint(whole.manifest)
    for ours, theirs in (
        (corpus.batch("train", 5, range(8), 64), whole.batch("train", 5, range(8), 64)),
        (next(corpus.eval_batches(3, 3, 16)), next(whole.eval_batches(3, 3, 16))),
    ):
        assert torch.equal(ours["input"], theirs["input"])
    names = {path.name for path in directory.iterdir()}
    shards_named = {s["file"] for r in corpus.manifest["splits"].values() for s in r["shards"]}
    assert names == shards_named | {"manifest.json", "tokenizer.json"}
    assert [path.name for path in directory.parent.iterdir()] == ["mine-v300"]


def test_a_run_in_shards_is_the_run_in_one_file(text):
    """So neither a finished run nor a checkpoint is lost when the files are cut anew."""
    assert config_of(text, "a").identity() == config_of(text, "b", shard_tokens=9).identity()
    assert config_of(text, "a").identity() == {
        "name": "mine",
        "tokenizer": "bpe",
        "vocab_size": 300,
        "corpus": "mine-v300",
    }
    assert config_of(text, "a", order="epochs").identity()["order"] == "epochs"


@pytest.mark.parametrize("stop", [("_write_shard", 5), ("_write_shard", 16), ("_record", 0)])
def test_a_stopped_preparation_goes_on_after_its_last_whole_shard(
    whole, sharded, monkeypatch, stop
):
    name, after = stop
    real, calls = getattr(shards, name), []

    def interrupted(*args):
        if len(calls) == after:
            raise KeyboardInterrupt
        calls.append(args)
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(shards, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(sharded)
    assert not sharded.directory.exists()
    building = sharded.directory.with_name(".mine-v300.shards")
    (building / ".train-00005.bin.4242").write_bytes(b"half")  # as a killed process leaves it
    before = {p.name: p.stat().st_mtime_ns for p in building.glob("*-[0-9]*[0-9].bin")}
    assert len(before) == (18 if name == "_record" else after)
    with exclusive(building), pytest.raises(UserError, match="another process is running in"):
        prepare(sharded)
    prepare(sharded)
    corpus = load_tokens(sharded, seed=0)
    for split in SPLITS:
        assert np.array_equal(corpus.tokens[split][0 : 10**9], whole.tokens[split])
    kept = {p.name: p.stat().st_mtime_ns for p in sharded.directory.glob("*.bin")}
    same = [name for name in before if kept.get(name) == before[name]]
    assert len(same) >= len(before) - 1  # of training, one was cut for validation
    assert not building.exists()


def test_shards_of_another_text_are_not_gone_on_from(text, sharded, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(shards, "_record", lambda paths: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(sharded)
    (text / "a.jsonl").write_text(
        "\n".join(json.dumps({"text": text.upper()}) for text in TEXTS), encoding="utf-8"
    )
    prepare(sharded)
    corpus = load_tokens(sharded, seed=0)
    assert "DOCUMENT" in corpus.encoding.decode(corpus.tokens["train"][0:100].tolist())
    assert corpus.manifest["splits"]["train"]["documents"] > 290


def test_missing_and_changed_shards_are_named(sharded):
    directory = prepare(sharded)
    path = directory / "train-00007.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-4] + b"\0" * 4)
    again = "delete .*shards/mine-v300 and run `.*data.shard_tokens=300`"
    with pytest.raises(UserError, match=rf"train-00007\.bin was changed: its sha256 .*; {again}"):
        load_tokens(sharded, seed=0)
    path.write_bytes(content[:-4])
    with pytest.raises(UserError, match=rf"train-00007\.bin has .* bytes, .*; {again}"):
        load_tokens(sharded, seed=0)
    path.unlink()
    with pytest.raises(UserError, match=rf"train-00007\.bin is missing; {again}") as caught:
        load_tokens(sharded, seed=0)
    assert "\n" not in str(caught.value)
    manifest = json.loads((directory / "manifest.json").read_text())
    del manifest["splits"]["val"]["shards"][0]["sha256"]
    del manifest["sha256"]  # as before manifests had one
    (directory / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"its splits\.val\.sha256 is missing or wrong"):
        load_tokens(sharded, seed=0)


# ------------------------------------------------------------------------------ large vocabularies


def test_tokens_beyond_uint16_are_uint32(text, tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    assert [token_type(size) for size in (65536, 65537)] == ["<u2", "<u4"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {c: 70_000 + i for i, c in enumerate(alphabet)}  # every byte is a large number
    fillers = {f"<{i}>": i for i in range(70_000)}
    tokenizer = Tokenizer(models.BPE({**fillers, **tokens, "<end>": 70_256}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.save_pretrained(tmp_path / "large")
    for options in ({}, {"shard_tokens": 5000}):
        root = tmp_path / str(len(options))
        config = DataConfig("mine", str(text), str(root), str(tmp_path / "large"), **options)
        assert config.vocab_size == 70_257
        prepare(config)
        corpus = load_tokens(config, seed=0)
        assert corpus.tokens["train"][0:2].dtype == np.dtype("<u4")
        assert corpus.batch("train", 0, range(4), 64)["input"].min() >= 70_000
        documents = corpus.encoding.decode(corpus.tokens["train"][0 : 10**9].tolist())
        assert sorted(documents.split("<end>")[:-1])[0] in TEXTS


# ------------------------------------------------------------------------------ mixtures


def words(root, name, seed, vocab=("the", "mask", "keeps", "two", "of", "four")):
    folder = root / f"{name}-text"
    folder.mkdir()
    draw = random.Random(seed)
    for i in range(60):
        text = " ".join(draw.choices([*vocab, name], k=20))
        (folder / f"{i}.txt").write_text(text)
    return folder


@pytest.fixture(scope="module")
def parts(tmp_path_factory, hub_cache):
    """Root of two corpora, `left` and `right`, with one tokenizer, and `own` with another."""
    root = tmp_path_factory.mktemp("parts")
    own = DataConfig("own", str(words(root, "own", 0)), str(root), "bpe", 300)
    prepare(own)
    tokenizer = own.directory
    for name, seed, options in (("left", 1, {}), ("right", 2, {"shard_tokens": 100})):
        source = str(words(root, name, seed))
        prepare(DataConfig(name, source, str(root), str(tokenizer), **options))
    other = DataConfig("other", str(words(root, "other", 3, ("a", "b"))), str(root), "bpe", 300)
    prepare(other)
    return root


def mixture(root, names=("left", "right"), weights=(0.75, 0.25), tokenizer=None):
    return DataConfig(
        "mix", "mixture", str(root), tokenizer or str(root / "own-v300"), 300,
        order="epochs", parts=names, weights=weights,
    )  # fmt: skip


BEFORE = np.arange(101) * 8


def test_the_samples_of_a_mixture_are_windows_of_its_parts(parts):
    config = mixture(parts)
    corpus = load_tokens(config, 3, BEFORE)
    singles = [load_tokens(part, 3) for part in config.corpora]
    assert isinstance(corpus.order, Order)
    seen = {0: set(), 1: set()}
    for step in range(20):
        of, _ = corpus.order.numbers(step * 8 + np.arange(8))
        batch = corpus.batch("train", step, range(8), 16)
        for part, row in zip(of, batch["input"], strict=True):
            tokens = singles[part].tokens["train"][0 : 10**9]
            starts = np.arange(0, len(tokens) - 16, 16)
            found = [s for s in starts if np.array_equal(tokens[s : s + 16], row.numpy())]
            assert len(found) == 1
            seen[part].add(found[0])
        share = corpus.batch("train", step, range(4, 8), 16)["target"]
        assert torch.equal(share, batch["target"][4:])
    assert len(seen[0]) > len(seen[1]) > 20
    record = corpus.describe(16)
    assert set(record["epochs"]) == {"left", "right"}
    assert record["splits"]["train"]["tokens"] == len(corpus.tokens["train"])
    vals = np.concatenate([single.tokens["val"][0 : 10**9] for single in singles])
    assert np.array_equal(corpus.tokens["val"][0 : 10**9], vals)
    assert corpus.fingerprint not in [single.fingerprint for single in singles]
    assert corpus.encoding.decode(corpus.tokens["val"][0:5].tolist())


def test_parts_that_do_not_fit_are_refused(parts):
    with pytest.raises(UserError, match=r"other-v300 has another tokenizer .* than .*own"):
        read_manifest(mixture(parts, ("own", "other"), (0.5, 0.5), "bpe"))
    with pytest.raises(UserError, match=r"/none-.*manifest.json is missing; run `.*name=none"):
        read_manifest(mixture(parts, ("left", "none"), (0.5, 0.5)))
    corpus = load_tokens(mixture(parts), 0, BEFORE)
    with pytest.raises(UserError, match=r"left has \d+ tokens for training, a window needs"):
        tokens = {"train": np.zeros(10**5), "val": np.zeros(10**5)}
        check_fits(type(corpus)(corpus.directory, corpus.manifest, tokens, 0, corpus.order), 999,
                   5 * len(corpus.tokens["train"]))  # fmt: skip
    with pytest.raises(UserError, match=r"data\.order=drawn: a mixture"):
        DataConfig("mix", "mixture", "x", "bpe", 300, parts=("left",), weights=(1.0,))
    with pytest.raises(UserError, match=r"data\.order=shuffled; choose one of drawn, epochs"):
        DataConfig("mine", "x", "x", "bpe", 300, order="shuffled")
