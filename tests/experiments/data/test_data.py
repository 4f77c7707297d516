"""Token corpora: which windows a batch holds, and what is refused before training starts."""

import functools
import json
import shlex
import shutil

import numpy as np
import pytest
import torch

from experiments.config.run import load
from experiments.data.corpus import check_fits, load_tokens
from experiments.data.manifest import DataConfig, file_record
from experiments.data.mlm import MLMConfig
from experiments.data.tokenizer import folder_tokenizer
from experiments.support.errors import UserError


def write_corpus(root, train=5000, val=1000, vocab_size=7000):
    """A corpus whose token at position i is i, so that a window shows where it was cut."""
    config = DataConfig("count", "unused", str(root), tokenizer="bpe", vocab_size=vocab_size)
    config.directory.mkdir(parents=True)
    splits = {}
    for split, count in (("train", train), ("val", val)):
        path = config.directory / f"{split}.bin"
        np.arange(count).astype("<u2").tofile(path)
        splits[split] = {**file_record(path), "tokens": count}
    tokenizer = {"kind": "bpe", "vocab_size": vocab_size, "end_of_text": 0, "file": None}
    made_from = {"path": "unused"}
    manifest = {"schema": 1, "source": made_from, "tokenizer": tokenizer, "splits": splits}
    (config.directory / "manifest.json").write_text(json.dumps(manifest))
    return config


@pytest.fixture
def config(tmp_path):
    return write_corpus(tmp_path)


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


@pytest.mark.parametrize(("split", "stream", "size"), [("train", 0, 5000), ("val", 1, 1000)])
def test_positions_are_philox_words_of_seed_split_step_and_index(corpus, split, stream, size):
    starts = corpus.batch(split, 11, slice(0, 6), block=20)["input"][:, 0].tolist()
    # NumPy's generator steps its counter before it makes four words.
    words = philox4x64((1, 11, 0, 0), (3, stream)) + philox4x64((2, 11, 0, 0), (3, stream))
    assert starts == [word % (size - 20) for word in words[:6]]


def test_a_batch_is_windows_and_their_successors(corpus):
    batch = corpus.batch("train", 0, slice(0, 5), block=8)
    assert set(batch) == {"input", "target"}
    assert batch["input"].shape == (5, 8) and batch["input"].dtype == torch.int64
    assert torch.equal(batch["input"], batch["input"][:, :1] + torch.arange(8))
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
    assert [len(b["input"]) for b in corpus.eval_batches(7, 3, block=10)] == [3, 3, 1]


# ------------------------------------------------------------------------------ before training


def test_a_missing_corpus_names_the_file_and_the_command(tmp_path):
    config = DataConfig("openwebtext", "/some where", str(tmp_path))
    with pytest.raises(UserError) as error:
        load_tokens(config, seed=0)
    assert str(tmp_path / "openwebtext-gpt2" / "manifest.json") in str(error.value)
    command = "python -m experiments.prepare_data data=openwebtext 'data.source=/some where'"
    assert f"{command} data.root={tmp_path}`" in str(error.value)


def test_the_command_for_a_text_of_ones_own_composes(tmp_path):
    for kind, extra in ((DataConfig, []), (MLMConfig, ["model=bert_nano"])):
        config = kind("mine", "text", str(tmp_path), "wordpiece", 512, "body")
        python, flag, module, *overrides = shlex.split(config.prepare_command)
        assert (python, flag, module) == ("python", "-m", "experiments.prepare_data")
        assert overrides[: len(extra)] == extra
        composed = load(overrides).data
        assert (composed.directory, composed.source) == (config.directory, "text")
        assert composed.text_column == "body"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((f"tokenizer.{key}", None) for key in ("kind", "vocab_size", "end_of_text")),
        *(("tokenizer.vocab_size", value) for value in (-3, 0, "3")),
        *(("splits.train.tokens", value) for value in (-5, 4999, 2.5, None)),
        ("splits.val", None),
    ],
)
def test_a_manifest_with_a_value_that_cannot_be_is_one_line(config, key, value):
    path = config.directory / "manifest.json"
    manifest = json.loads(path.read_text())
    *outer, last = key.split(".")
    part = functools.reduce(dict.get, outer, manifest)
    part[last] = value
    path.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=rf"is damaged \(its {key} is missing or wrong\); delete"):
        load_tokens(config, seed=0)


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
