"""Token corpora and mixtures of them: which windows a batch holds, and what is refused before
training starts."""

import dataclasses
import json
import random
import shlex
import shutil

import numpy as np
import pytest
import torch

from experiments.config.run import load
from experiments.data.corpus import TokenFiles, check_fits, load_tokens
from experiments.data.manifest import DataConfig, file_record, fingerprint, read_manifest
from experiments.data.mlm import MLMConfig
from experiments.data.order import Order
from experiments.data.prepare import prepare
from experiments.data.tokenizer import folder_tokenizer
from experiments.runs.finished import FinishedRun
from experiments.support.errors import UserError


@pytest.fixture
def config(tmp_path):
    """A corpus whose token at position i is i, so that a window shows where it was cut."""
    config = DataConfig("count", "unused", str(tmp_path), tokenizer="bpe", vocab_size=7000)
    config.directory.mkdir(parents=True)
    splits = {}
    for split, count in (("train", 5000), ("val", 1000)):
        path = config.directory / f"{split}.bin"
        np.arange(count).astype("<u2").tofile(path)
        splits[split] = {**file_record(path), "tokens": count}
    tokenizer = {"kind": "bpe", "vocab_size": 7000, "end_of_text": 0, "file": None}
    made_from = {"path": "unused"}
    manifest = {"schema": 1, "source": made_from, "tokenizer": tokenizer, "splits": splits}
    (config.directory / "manifest.json").write_text(json.dumps(manifest))
    return config


@pytest.fixture
def corpus(config):
    return load_tokens(config, seed=3)


def philox4x64(counter, key, mask=2**64 - 1):
    """Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011)."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [(b >> 64) ^ c[1] ^ k[0], b & mask, (a >> 64) ^ c[3] ^ k[1], a & mask]
        k = [(k[0] + 0x9E3779B97F4A7C15) & mask, (k[1] + 0xBB67AE8584CAA73B) & mask]
    return c


def test_a_batch_is_windows_at_philox_words_of_seed_split_step_and_index(corpus):
    for split, stream, size in (("train", 0, 5000), ("val", 1, 1000)):
        batch = corpus.batch(split, 11, slice(0, 6), block=20)
        # NumPy's generator steps its counter before it makes four words.
        words = philox4x64((1, 11, 0, 0), (3, stream)) + philox4x64((2, 11, 0, 0), (3, stream))
        starts = torch.tensor([word % (size - 20) for word in words[:6]])
        assert torch.equal(batch["input"], starts[:, None] + torch.arange(20))
        assert torch.equal(batch["target"], batch["input"] + 1)


def test_evaluation_windows_are_fixed_disjoint_and_spread(corpus, config):
    def starts(corpus, count, batch_size):
        batches = list(corpus.eval_batches(count, batch_size, block=10))
        assert all(torch.equal(b["target"], b["input"] + 1) for b in batches)
        return torch.cat([b["input"][:, 0] for b in batches]).tolist()

    # 1000 tokens hold 99 windows of 10 tokens with a target each
    assert starts(corpus, 3, 2) == [0, 330, 660]
    assert starts(corpus, None, 32) == list(range(0, 990, 10))
    assert starts(load_tokens(config, seed=99), 7, 3) == starts(corpus, 7, 4)


def test_slices_of_several_arrays_are_those_of_one():
    array = np.arange(23)
    files = TokenFiles(np.split(array, [5, 6, 17]))
    assert len(files) == 23
    for first in range(23):
        for last in range(first + 1, 25):
            assert files[first:last].tolist() == array[first:last].tolist()


def in_two_files(corpus_dir, root):
    """A copy of the corpus `words` with its training split in two files, as earlier versions
    write it."""
    folder = shutil.copytree(corpus_dir / "words-v300", root / "words-v300")
    manifest = json.loads((folder / "manifest.json").read_text())
    whole = manifest["splits"]["train"]
    content = (folder / whole.pop("file")).read_bytes()
    paths = [folder / "train-00000.bin", folder / "train-00001.bin"]
    for path, part in zip(paths, (content[:3000], content[3000:]), strict=True):
        path.write_bytes(part)
    whole["shards"] = [{**file_record(p), "tokens": p.stat().st_size // 2} for p in paths]
    (folder / "train.bin").unlink()
    del manifest["sha256"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return DataConfig("words", str(corpus_dir / "text"), str(root), "bpe", 300), paths[1]


def test_a_split_in_two_files_gives_the_same_batches_and_changed_files_are_named(
    corpus_dir, tmp_path
):
    config, path = in_two_files(corpus_dir, tmp_path)
    first = DataConfig("words", str(corpus_dir / "text"), str(corpus_dir), "bpe", 300)
    one, two = load_tokens(first, seed=0), load_tokens(config, seed=0)
    assert two.fingerprint == one.fingerprint and config.identity() == first.identity()
    batches = [corpus.batch("train", 5, range(8), 64)["input"] for corpus in (one, two)]
    assert torch.equal(*batches)
    config_of_then = {**dataclasses.asdict(config), "shard_tokens": 1500}  # a finished run has it
    then = {"model": {"name": "gpt2"}, "data": config_of_then}
    assert FinishedRun(tmp_path, {"config": then}).data == config
    content = path.read_bytes()
    again = r"; delete .*words-v300 and run `.*data\.name=words"
    for damage, said in (
        (lambda: path.write_bytes(content[:-4] + b"\0" * 4), r"was changed: its sha256 .*"),
        (lambda: path.write_bytes(content[:-4]), "has .* bytes, .*"),
        (path.unlink, "is missing"),
    ):
        damage()
        with pytest.raises(UserError, match=rf"train-00001\.bin {said}{again}") as caught:
            load_tokens(config, seed=0)
        assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------ before training


def test_a_missing_corpus_names_the_file_and_the_command(tmp_path):
    config = DataConfig("openwebtext", "/some where", str(tmp_path))
    with pytest.raises(UserError) as error:
        load_tokens(config, seed=0)
    assert str(tmp_path / "openwebtext-gpt2" / "manifest.json") in str(error.value)
    command = "python -m experiments.prepare_data data=openwebtext 'data.source=/some where'"
    assert f"{command} data.root={tmp_path}`" in str(error.value)
    for kind, extra in ((DataConfig, []), (MLMConfig, ["model=bert_nano"])):
        config = kind("mine", "text", str(tmp_path), "wordpiece", 512, "body")
        python, flag, module, *overrides = shlex.split(config.prepare_command)
        assert (python, flag, module) == ("python", "-m", "experiments.prepare_data")
        assert overrides[: len(extra)] == extra
        composed = load(overrides).data
        assert (composed.directory, composed.source) == (config.directory, "text")
        assert composed.text_column == "body"


def test_a_changed_manifest_is_one_line(corpus_dir, tmp_path):
    folder = shutil.copytree(corpus_dir / "words-v300", tmp_path / "words-v300")
    config = DataConfig("words", str(corpus_dir / "text"), str(tmp_path), "bpe", 300)
    path = folder / "manifest.json"
    whole = json.loads(path.read_text())
    for change, said in (
        ({"name": "others"}, "is damaged"),
        ({"schema": 99, "sha256": None}, "has schema 99, this version reads 1; delete"),
    ):
        manifest = {**whole, **change}
        path.write_text(json.dumps({k: v for k, v in manifest.items() if v is not None}))
        with pytest.raises(UserError, match=said) as caught:
            load_tokens(config, seed=0)
        assert "\n" not in str(caught.value)


def test_a_prepared_corpus_lends_only_the_tokenizer_of_its_manifest(corpus_dir, tmp_path):
    for name in ("whole", "manifest.json", "tokenizer.json"):
        folder = shutil.copytree(corpus_dir / "words-v300", tmp_path / name)
        if name == "whole":
            assert folder_tokenizer(str(folder)).encode_ordinary_batch(["the mask"])[0]
            continue
        (folder / name).write_text((folder / name).read_text().replace("9", "8", 1))
        with pytest.raises(UserError, match="do not belong together; prepare it again"):
            folder_tokenizer(str(folder))


def test_check_fits(corpus):
    check_fits(corpus, vocab_size=7000, block_size=999)
    with pytest.raises(UserError, match=r"7000 token ids, the model only 6999.*vocab_size to 7040"):
        check_fits(corpus, vocab_size=6999, block_size=999)
    corpus.manifest["tokenizer"]["kind"] = "wordpiece"
    with pytest.raises(UserError, match=r"data\.tokenizer=wordpiece data\.vocab_size=6999"):
        check_fits(corpus, vocab_size=6999, block_size=999)
    with pytest.raises(UserError, match=r"val split .* has 1000 tokens, a window needs 1001"):
        check_fits(corpus, vocab_size=7000, block_size=1000)


# ------------------------------------------------------------------------------ mixtures


@pytest.fixture(scope="module")
def parts(corpus_dir, tmp_path_factory):
    """Folder with two corpora, `left` and `right`, with the tokenizer of `words`, and `other` with
    one of its own."""
    root = tmp_path_factory.mktemp("parts")
    shutil.copytree(corpus_dir / "words-v300", root / "words-v300")
    for name, vocabulary, tokenizer in (
        ("left", "the mask keeps two of four", str(root / "words-v300")),
        ("right", "the mask drops others", str(root / "words-v300")),
        ("other", "a b", "bpe"),
    ):
        (root / f"{name}-text").mkdir()
        draw = random.Random(len(vocabulary))
        for i in range(60):
            text = " ".join(draw.choices(vocabulary.split(), k=20))
            (root / f"{name}-text" / f"{i}.txt").write_text(text)
        prepare(DataConfig(name, str(root / f"{name}-text"), str(root), tokenizer, 300))
    return root


def mixture(root, names=("left", "right"), weights=(0.75, 0.25), tokenizer=None):
    return DataConfig(
        "mix", "mixture", str(root), tokenizer or str(root / "words-v300"), 300,
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
            tokens = singles[part].tokens["train"]
            starts = range(0, len(tokens) - 16, 16)
            [start] = [s for s in starts if np.array_equal(tokens[s : s + 16], row.numpy())]
            seen[part].add(start)
        share = corpus.batch("train", step, range(4, 8), 16)["target"]
        assert torch.equal(share, batch["target"][4:])
    assert len(seen[0]) > len(seen[1]) > 20
    record = corpus.describe(16)
    assert set(record["epochs"]) == {"left", "right"}
    assert record["splits"]["train"]["tokens"] == len(corpus.tokens["train"])
    vals = np.concatenate([single.tokens["val"] for single in singles])
    assert np.array_equal(corpus.tokens["val"][0 : len(vals)], vals)
    assert corpus.fingerprint not in [fingerprint(single.manifest) for single in singles]
    assert corpus.encoding.decode(corpus.tokens["val"][0:5].tolist())


def test_parts_that_do_not_fit_are_refused(parts):
    with pytest.raises(UserError, match=r"other-v300 has another tokenizer .* than .*words"):
        read_manifest(mixture(parts, ("words", "other"), (0.5, 0.5), "bpe"))
    with pytest.raises(UserError, match=r"/none-.*manifest.json is missing; run `.*name=none"):
        read_manifest(mixture(parts, ("left", "none"), (0.5, 0.5)))
    corpus = load_tokens(mixture(parts), 0, BEFORE)
    long = {"train": np.zeros(10**5), "val": np.zeros(10**5)}
    longer = type(corpus)(corpus.directory, corpus.manifest, long, 0, corpus.order)
    with pytest.raises(UserError, match=r"left has \d+ tokens for training, a window needs"):
        check_fits(longer, 999, 5 * len(corpus.tokens["train"]))
