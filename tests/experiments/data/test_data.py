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


def test_the_generator_of_this_test_is_philox():
    # known answer published with the authors' Random123 library
    assert philox4x64((0, 0, 0, 0), (0, 0)) == [
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    ]


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


def test_ranks_and_micro_batches_see_their_share_of_one_global_batch(corpus, config):
    whole = corpus.batch("train", 7, slice(0, 12), block=8)["input"]
    shares = [corpus.batch("train", 7, slice(i, i + 3), block=8)["input"] for i in (0, 3, 6, 9)]
    assert torch.equal(torch.cat(shares), whole)
    strided = [corpus.batch("train", 7, slice(r, 12, 2), block=8)["input"] for r in (0, 1)]
    assert torch.equal(torch.stack(strided, 1).flatten(0, 1), whole)
    again = load_tokens(config, seed=3).batch("train", 7, [11, 2], block=8)["input"]
    assert torch.equal(again, whole[[11, 2]])


def test_seeds_and_steps_differ_and_the_global_generators_do_not_matter(corpus, config):
    def starts(corpus, step):
        return corpus.batch("train", step, slice(0, 8), block=8)["input"][:, 0].tolist()

    first = starts(corpus, 0)
    torch.manual_seed(1)
    np.random.seed(1)
    assert starts(corpus, 0) == first
    assert starts(corpus, 1) != first
    assert starts(load_tokens(config, seed=4), 0) != first


def test_windows_are_uniform_and_reach_both_ends(tmp_path):
    corpus = load_tokens(write_corpus(tmp_path, train=28), seed=0)
    starts = corpus.batch("train", 0, slice(0, 10_000), block=8)["input"][:, 0]
    counts = torch.bincount(starts, minlength=20)
    assert len(counts) == 20  # the last window's last target is the last token
    # chi-square with 19 degrees of freedom: mean 19, sigma sqrt(38); within 4 sigma
    assert ((counts - 500) ** 2 / 500).sum() < 19 + 4 * 38**0.5


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


@pytest.mark.parametrize("count", [0, 100])
def test_too_many_evaluation_windows_are_refused(corpus, count):
    with pytest.raises(UserError, match=f"{count} evaluation sequences .* holds 99"):
        corpus.eval_batches(count, 4, block=10)


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


def test_a_corpus_of_ones_own_that_is_missing_is_not_looked_for_on_the_hub(config, tmp_path):
    """Nor are corpora forgotten that have its name and another tokenizer."""
    published = "hf://datasets/Skylion007/openwebtext/**/*.parquet"
    asked = DataConfig("count", published, str(config.directory.parent), "gpt2")
    with pytest.raises(UserError) as error:
        load_tokens(asked, seed=0)
    assert "gpt2/manifest.json is missing (there is count-v7000, of another" in str(error.value)
    assert "data.name=count data.source=FOLDER" in str(error.value)
    owt = DataConfig("openwebtext", published, str(tmp_path), "gpt2")
    assert shlex.quote(f"data.source={published}") in owt.prepare_command


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_truncated_file_is_refused(config, split):
    path = config.directory / f"{split}.bin"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UserError, match=f"{split}.bin has {size - 2} bytes.*says {size}; delete"):
        load_tokens(config, seed=0)


def flip_byte(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_a_changed_token_is_refused(config):
    flip_byte(config.directory / "train.bin", 5001)
    with pytest.raises(UserError, match=r"train\.bin was changed: its sha256"):
        load_tokens(config, seed=0)


def test_a_missing_split_is_refused(config):
    (config.directory / "val.bin").unlink()
    with pytest.raises(UserError, match=r"val\.bin is missing; delete"):
        load_tokens(config, seed=0)


def test_another_schema_is_refused(config):
    path = config.directory / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 99}))
    with pytest.raises(UserError, match="schema 99, this version reads 1"):
        load_tokens(config, seed=0)


@pytest.mark.parametrize(
    ("content", "lacks"),
    [
        (b"[]", "it is missing or wrong"),
        (b"{}", "its schema is missing or wrong"),
        (b'{"schema": 1}', "its source is missing or wrong"),
        (b'{"schema": 1, "source": {"path": "unused"}, "splits": []}', "its splits is missing"),
        (b"\xff\xfe", "'utf-8' codec"),
        (b'{"schema": 1, "sha256": "0"}', "its content does not fit its sha256"),
    ],
)
def test_a_damaged_manifest_is_one_line(config, content, lacks):
    path = config.directory / "manifest.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"manifest.*{lacks}.*; delete") as caught:
        load_tokens(config, seed=0)
    assert "\n" not in str(caught.value)


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tokenizer": "words"},
            "tokenizer=words is neither gpt2, bpe nor wordpiece, nor a folder",
        ),
        ({"tokenizer": "gpt2", "vocab_size": 2048}, "vocab_size=2048, but GPT-2's"),
        ({"tokenizer": "bpe", "vocab_size": 2**32 + 1}, "4294967297 does not fit into uint32"),
    ],
)
def test_impossible_configs_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        DataConfig("x", "y", **options)


def test_a_negative_seed_is_refused(config):
    with pytest.raises(UserError, match="seed=-1"):
        load_tokens(config, seed=-1)
