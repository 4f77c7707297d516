"""Token corpora: which windows a batch holds, and what is refused before
training starts."""

import json
import shutil

import numpy as np
import pytest
import torch

from experiments.data.corpus import CausalText, check_fits, load_tokens
from experiments.data.manifest import DataConfig, file_record
from experiments.data.prepare import prepare
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
        batch = CausalText(corpus, 20).batch(split, 11, range(6))
        # NumPy's generator steps its counter before it makes four words.
        words = philox4x64((1, 11, 0, 0), (3, stream)) + philox4x64((2, 11, 0, 0), (3, stream))
        starts = torch.tensor([word % (size - 20) for word in words[:6]])
        assert torch.equal(batch["input"], starts[:, None] + torch.arange(20))
        assert torch.equal(batch["target"], batch["input"] + 1)


def test_evaluation_windows_are_fixed_disjoint_and_spread(corpus, config):
    def starts(corpus, count, batch_size):
        batches = list(CausalText(corpus, 10).eval_batches(count, batch_size))
        assert all(torch.equal(b["target"], b["input"] + 1) for b in batches)
        return torch.cat([b["input"][:, 0] for b in batches]).tolist()

    # 1000 tokens hold 99 windows of 10 tokens with a target each
    assert starts(corpus, 3, 2) == [0, 330, 660]
    assert starts(corpus, 99, 32) == list(range(0, 990, 10))
    assert starts(load_tokens(config, seed=99), 7, 3) == starts(corpus, 7, 4)


def test_a_changed_file_is_named(corpus_dir, tmp_path):
    folder = shutil.copytree(corpus_dir / "words-v300", tmp_path / "words-v300")
    config = DataConfig("words", str(corpus_dir / "text"), str(tmp_path), "bpe", 300)
    whole = {path: path.read_bytes() for path in folder.iterdir()}
    manifest = json.loads((folder / "manifest.json").read_text())
    newer = {**manifest, "schema": 99}
    del newer["sha256"]
    again = r"; delete .*words-v300 and run `python -m experiments\.prepare_data`"
    for name, content, said in (
        ("train.bin", whole[folder / "train.bin"][:-4] + b"\0" * 4, "was changed" + again),
        ("val.bin", whole[folder / "val.bin"][:-4], "was changed" + again),
        ("tokenizer.json", None, "is missing" + again),
        ("manifest.json", json.dumps({**manifest, "name": "others"}).encode(), "is damaged"),
        ("manifest.json", json.dumps(newer).encode(), "has schema 99, this version reads 1"),
        ("manifest.json", None, r"is missing; run `python -m experiments\.prepare_data`"),
    ):
        path = folder / name
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(UserError, match=f"{name} {said}"):
            load_tokens(config, seed=0)
        path.write_bytes(whole[path])


def test_check_fits(corpus):
    check_fits(corpus, vocab_size=7000, block_size=999)
    with pytest.raises(UserError, match=r"7000 token ids, the model only 6999.*vocab_size to 7040"):
        check_fits(corpus, vocab_size=6999, block_size=999)
    with pytest.raises(UserError, match=r"val split .* has 1000 tokens, a window needs 1001"):
        check_fits(corpus, vocab_size=7000, block_size=1000)


def test_the_tokenizer_of_a_prepared_corpus_gives_another_its_tokens(corpus_dir, tmp_path):
    own = DataConfig("words", str(corpus_dir / "text"), str(corpus_dir), "bpe", 300)
    same = DataConfig("same", str(corpus_dir / "text"), str(tmp_path), str(own.directory))
    prepare(same)
    first, second = load_tokens(own, 0), load_tokens(same, 0)
    assert same.vocab_size == first.vocab_size
    assert second.encoding.eot_token == first.encoding.eot_token
    assert second.tokens["train"].tolist() == first.tokens["train"].tolist()
