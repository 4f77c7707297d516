"""From text in its real formats to token files, and the embedded corpus."""

import gzip
import hashlib
import json
import sysconfig
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tiktoken

from experiments import prepare_data
from experiments.data import prepare as preparing
from experiments.data.corpus import CausalText, load_tokens
from experiments.data.manifest import SPLITS, DataConfig, read_manifest, token_type
from experiments.data.prepare import prepare
from experiments.data.tokenizer import (
    END_OF_TEXT,
    SPECIAL,
    HFTokenizer,
    load_bpe,
    train_bpe,
    train_wordpiece,
)
from experiments.support.checkpoint import exclusive
from experiments.support.errors import UserError

TEXTS = [f"document {i}: naïve café \U0001f600\n" for i in range(30)]


def documents_of(corpus, split):
    """The documents of a split, decoded one by one."""
    tokens = corpus.tokens[split]
    ends = np.flatnonzero(tokens == corpus.manifest["tokenizer"]["end_of_text"])
    assert ends[-1] == len(tokens) - 1
    pieces = np.split(tokens, ends[:-1] + 1)
    return [corpus.encoding.decode(piece[:-1].tolist()) for piece in pieces]


def test_bpe_by_hand(tmp_path):
    """Words abc, " abc" twice, " ab" twice: pair ab counts 5, then " ab" 4; end-of-text is last."""
    path = tmp_path / "tokenizer.json"
    path.write_text(train_bpe(["abc abc abc ab ab"], vocab_size=259), encoding="utf-8")
    encoding = load_bpe(path)
    assert encoding.n_vocab == 259
    assert encoding.decode_single_token_bytes(256) == b"ab"
    assert encoding.decode_single_token_bytes(257) == b" ab"
    assert encoding.encode_single_token(END_OF_TEXT) == encoding.eot_token == 258
    ids = encoding.encode_ordinary("ab ab b")
    assert [encoding.decode_single_token_bytes(i) for i in ids] == [b"ab", b" ab", b" ", b"b"]
    text = "".join(map(chr, range(0x3000))) + f"\r\n\t  \u3042 \U0001f9ea {END_OF_TEXT} don't"
    assert encoding.decode(encoding.encode_ordinary(text)) == text
    assert encoding.eot_token not in encoding.encode_ordinary(text)


def test_wordpiece_by_hand():
    """Words ab twice, abc and b: pair a ##b counts 3, then ab ##c once, and nothing is left."""
    tokenizer = HFTokenizer(train_wordpiece(["\u00c1b ab", "aBc,\n b"], vocab_size=64), 3)
    pieces = [*SPECIAL, "##a", "##b", "##c", ",", "a", "b", "c", "ab", "abc"]
    assert tokenizer.n_vocab == len(pieces)
    assert [tokenizer.decode([i]) for i in range(8, 14)] == pieces[8:]
    assert tokenizer.special_tokens == {piece: i for i, piece in enumerate(SPECIAL)}
    ids = tokenizer.encode_ordinary_batch(["ABC  abb!", "cab x", "[SEP]"])
    assert [[pieces[i] for i in row] for row in ids] == [
        ["abc", "ab", "##b", "[UNK]"],
        ["c", "##a", "##b", "[UNK]"],
        ["[UNK]", "[UNK]", "[UNK]"],  # a special token's name in a text is text
    ]
    assert tokenizer.decode(ids[0][:3]) == "abc abb"


def test_gpt2_without_network_names_the_choices(tmp_path, monkeypatch):
    import requests

    def unreachable(*args, **kwargs):
        raise requests.ConnectionError("no route")

    monkeypatch.setattr(requests, "get", unreachable)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.delitem(tiktoken.registry.ENCODINGS, "gpt2", raising=False)
    with pytest.raises(UserError, match=r"TIKTOKEN_CACHE_DIR .* data\.tokenizer=bpe"):
        prepare(DataConfig("x", "stdlib", str(tmp_path / "data")))
    assert not (tmp_path / "data").exists()


@pytest.fixture(autouse=True)
def hub_cache(tmp_path, monkeypatch):
    """The `datasets` library, offline, with its cache in the test's folder."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def folder(tmp_path):
    """The folder of a source."""
    path = tmp_path / "source"
    path.mkdir()
    return path


@pytest.fixture
def byte_gpt2(monkeypatch):
    """An encoding with GPT-2's size and end-of-text token, but with bytes as its only tokens."""
    ranks = {bytes([i]): i for i in range(256)}
    encoding = tiktoken.Encoding(
        "bytes", pat_str=r"(?s).", mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 50256}
    )
    monkeypatch.setattr(preparing.tokenizer, "gpt2_encoding", lambda: encoding)
    return encoding


def write_parquet(folder, texts):
    import pyarrow as pa
    import pyarrow.parquet as pq

    for i, part in enumerate((texts[:20], texts[20:])):
        pq.write_table(pa.table({"text": part}), folder / f"train-{i:05d}-of-00002.parquet")


def write_jsonl(folder, texts, name="part.jsonl"):
    lines = "".join(json.dumps({"text": text, "url": "x"}) + "\n" for text in texts).encode()
    (folder / name).write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)


def write_txt(folder, texts):
    (folder / "sub").mkdir()
    for i, text in enumerate(texts):
        (folder / "sub" / f"{i:03d}.txt").write_text(text, encoding="utf-8")


def test_every_format_gives_the_same_documents(tmp_path):
    """One in a hundred is held out, the first of NumPy's permutation with nanoGPT's seed. The last
    name is C4's form on the hub."""
    texts, c4 = TEXTS * 4, partial(write_jsonl, name="c4-train.00000-of-01024.json.gz")
    for number, write in enumerate((write_parquet, write_txt, write_jsonl, c4)):
        folder = tmp_path / f"source{number}"
        folder.mkdir()
        write(folder, texts)
        root = tmp_path / f"data{number}"
        config = DataConfig("openwebtext", str(folder), str(root), "bpe", vocab_size=280)
        assert prepare(config) == root / "openwebtext-v280"
        corpus = load_tokens(config, seed=0)
        order = np.random.default_rng(2357).permutation(120)
        for split, chosen in (("val", order[:2]), ("train", order[2:])):
            documents = [texts[i] for i in chosen]
            assert documents_of(corpus, split) == documents
            record = corpus.manifest["splits"][split]
            assert record["documents"] == len(documents)
            assert record["text_bytes"] == sum(len(text.encode()) for text in documents)
            assert record["tokens"] == len(corpus.tokens[split])


def test_a_source_is_known_by_its_content_and_not_by_its_place(tmp_path, folder, byte_gpt2):
    def config(place):
        return DataConfig("mini", str(place), str(tmp_path / "data"))

    write_txt(folder, TEXTS)
    path = prepare(config(folder))
    made_from = read_manifest(config(folder))["source"]
    size = sum(len(text.encode()) for text in TEXTS)
    assert (made_from["files"], made_from["bytes"]) == (30, size)
    moved = folder.rename(tmp_path / "moved")
    assert prepare(config(moved)) == path
    load_tokens(config(folder), seed=0)  # complete without its source
    file = moved / "sub" / "007.txt"
    file.write_text(TEXTS[7].replace("document", "documenT"), encoding="utf-8")  # as many bytes
    for use in (lambda c: load_tokens(c, seed=0), prepare):
        with pytest.raises(UserError, match=r"made from .*source .*, not from .*moved .* give"):
            use(config(moved))


def test_a_stopped_preparation_continues_and_gives_the_same_files(
    tmp_path, folder, byte_gpt2, monkeypatch
):
    """In training, where every other batch is saved, in validation, and at the end. A second
    process waits; a changed text begins anew."""
    write_jsonl(folder, [text * (i % 5 + 1) for i, text in enumerate(TEXTS * 4)])
    monkeypatch.setattr(preparing, "_BATCH", 4)
    monkeypatch.setattr(preparing, "_SAVED", 500)
    whole = DataConfig("mini", str(folder), str(tmp_path / "whole"))
    prepare(whole)
    encoded, stop = [], 0

    class Watched:
        n_vocab, eot_token = byte_gpt2.n_vocab, byte_gpt2.eot_token

        def encode_ordinary_batch(self, documents, num_threads):
            encoded.extend(documents)
            if len(encoded) == stop:
                raise KeyboardInterrupt
            return byte_gpt2.encode_ordinary_batch(documents)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(preparing.tokenizer, "gpt2_encoding", Watched)
    names = {"train.bin", "val.bin", "manifest.json"}
    for case, left in ((32, 96), (120, 2), (0, 0)):
        config = DataConfig("mini", str(folder), str(tmp_path / f"data{case}"))
        encoded.clear()
        stop = case
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(preparing.checkpoint, "write_sealed", interrupted)
            prepare(config)
        assert not config.directory.exists()
        encoded.clear()
        stop = 0  # nowhere
        prepare(config)
        assert len(encoded) == left
        assert {path.name for path in config.directory.iterdir()} == names
        for name in names:
            assert (config.directory / name).read_bytes() == (whole.directory / name).read_bytes()
        assert [path.name for path in config.directory.parent.iterdir()] == ["mini-gpt2"]
    config = DataConfig("mini", str(folder), str(tmp_path / "anew"))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(preparing.checkpoint, "write_sealed", interrupted)
        prepare(config)
    write_jsonl(folder, [text.upper() for text in TEXTS])
    with ExitStack() as other:
        other.enter_context(exclusive(config.directory.with_name(".mini-gpt2.building")))
        said = []
        monkeypatch.setattr(preparing, "say", lambda line: said.append(line) or other.close())
        prepare(config)
    assert said[0].startswith("another process is running in")
    tokens = np.fromfile(config.directory / "train.bin", dtype="<u2")
    assert tokens.astype(np.uint8).tobytes().count(b"DOCUMENT") == len(TEXTS) - 1


def test_of_a_single_text_the_end_is_held_out(tmp_path, byte_gpt2):
    """All of it is in one of the splits, in its order; lines stay whole."""
    for name, end in (("lines", "\n"), ("spaces", " ")):
        text = "".join(f"{i} apples{end}" for i in range(1000))
        (tmp_path / f"{name}.txt").write_text(text)
        config = DataConfig(name, str(tmp_path / f"{name}.txt"), str(tmp_path / "data"))
        prepare(config)
        found = (np.fromfile(config.directory / f"{s}.bin", dtype="<u2")[:-1] for s in SPLITS)
        train, val = (tokens.astype(np.uint8).tobytes().decode() for tokens in found)
        assert train + val == text
        assert len(text) / 100 <= len(val) < len(text) / 80
        assert train.endswith("\n") == (end == "\n")


def test_the_command_line(tmp_path, folder, byte_gpt2, monkeypatch, capsys):
    write_jsonl(folder, TEXTS)
    monkeypatch.chdir(tmp_path)
    command = ["prepare_data", "data=openwebtext", "data.source=source", "data.root=out"]
    monkeypatch.setattr("sys.argv", command)
    prepare_data.main()
    size = len(TEXTS[np.random.default_rng(2357).permutation(30)[0]].encode()) + 1
    assert f"1 documents, {size} val tokens" in capsys.readouterr().out
    assert Path("out/openwebtext-gpt2/manifest.json").is_file()


def test_unusable_sources_are_refused(tmp_path):
    for number, (name, content, message) in enumerate((
        (None, None, "does not exist"),
        ("a.jsonl", b'{"body": "x"}\n', "data.text_column='text' .* has body"),
        ("a.jsonl", b'{"text": "x"}\n{"text": null}\n', "1 of 2 documents of .* have no text"),
        ("a.txt", b"caf\xe9 au lait", "a.txt is not UTF-8: it has the byte 0xe9; save it as UTF-8"),
    )):  # fmt: skip
        folder = tmp_path / f"source{number}"
        if name is not None:
            folder.mkdir()
            (folder / name).write_bytes(content)
        with pytest.raises(UserError, match=message):
            prepare(DataConfig("mini", str(folder), str(tmp_path / "data"), "bpe", vocab_size=300))
        assert not (tmp_path / "data").exists()


def test_stdlib_leaves_out_tests_and_packages_and_what_is_not_utf8(tmp_path, monkeypatch):
    names = [f"module{i}.py" for i in range(200)] + ["pkg/__init__.py", "pkg/latest.py"]
    left_out = ["test/a.py", "pkg/tests/b.py", "idlelib/idle_test/c.py", "site-packages/d.py"]
    for name in [*names, *left_out, "notes.txt", "latin1.py"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\r\n", encoding="utf-8", newline="")
    (tmp_path / "latin1.py").write_bytes(b"# caf\xe9\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    source = preparing._stdlib()
    assert source.description["undecodable_files"] == 1
    found = {split: [text for texts in source.batches(split) for text in texts] for split in SPLITS}
    held_out = [n for n in names if int(hashlib.sha256(n.encode()).hexdigest(), 16) % 20 == 0]
    assert found["val"] == [f"# {name}\r\n" for name in sorted(held_out)] != []
    assert found["train"] == [f"# {name}\r\n" for name in sorted(set(names) - set(held_out))]
    assert source.documents == {split: len(texts) for split, texts in found.items()}


def test_tokens_beyond_uint16_are_uint32(tmp_path, folder):
    """By a transformers tokenizer, whose tokens of bytes are large numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    assert [token_type(size) for size in (65536, 65537)] == ["<u2", "<u4"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {c: 70_000 + i for i, c in enumerate(alphabet)} | {f"<{i}>": i for i in range(70_000)}
    tokenizer = Tokenizer(models.BPE({**tokens, "<end>": 70_256}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.save_pretrained(tmp_path / "large")
    write_jsonl(folder, TEXTS)
    config = DataConfig("mine", str(folder), str(tmp_path), str(tmp_path / "large"))
    assert config.vocab_size == 70_257
    prepare(config)
    corpus = load_tokens(config, seed=0)
    assert corpus.tokens["train"].dtype == np.dtype("<u4")
    assert CausalText(corpus, 64).batch("train", 0, range(4))["input"].min() >= 70_000
