"""Pairs of sentences: numbers in words, parallel files, bundles of like lengths."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from experiments.data import parallel
from experiments.data.corpus import Corpus, load_tokens
from experiments.data.manifest import read_manifest
from experiments.data.pairs import TranslationPairs, cut
from experiments.data.parallel import PairsConfig
from experiments.data.prepare import prepare
from experiments.support.errors import UserError
from models.transformer import Transformer, TransformerConfig
from tests.experiments.data.test_prepare_data import documents_of

MODEL = TransformerConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=384, block_size=32)
END = 299


def test_numbers_in_words():
    for number, german, english in (
        (0, "null", "zero"),
        (1, "eins", "one"),
        (16, "sechzehn", "sixteen"),
        (21, "einundzwanzig", "twenty-one"),
        (101, "einhunderteins", "one hundred one"),
        (201_000, "zweihunderteintausend", "two hundred one thousand"),
        (234_070, "zweihundertvierunddreißigtausendsiebzig",
         "two hundred thirty-four thousand seventy"),
    ):  # fmt: skip
        assert (parallel.german(number), parallel.english(number)) == (german, english)
    splits = [parallel.numbers(split) for split in parallel.SIZES]
    assert len({n for found in splits for n in found}) == sum(parallel.SIZES.values())


def test_the_embedded_numbers_give_back_every_sentence(monkeypatch, tmp_path):
    """A hundredth of them, prepared on first use."""
    monkeypatch.setattr(parallel, "SIZES", {"test": 20, "val": 40, "train": 400})
    config = PairsConfig("numbers", "numbers", str(tmp_path), "bpe", 300, source_language="de",
                         target_language="en")  # fmt: skip
    corpus = load_tokens(config, seed=3)
    test = documents_of(corpus, "test")
    numbers = parallel.numbers("test")
    assert test[::2] == [parallel.german(n) for n in numbers]
    assert test[1::2] == [parallel.english(n) for n in numbers]
    documents = {name: record["documents"] for name, record in corpus.manifest["splits"].items()}
    assert documents == {"train": 800, "val": 80, "test": 40}


LINES = {
    "train": [("A b c.", "Ä b c."), ("Two  words", "Zwei Wörter"), ("", "leer"), ("x", "y")],
    "val": [("one", "eins")],
    "test": [("the end", "das Ende")],
}


def write_text(folder):
    for split, pairs in LINES.items():
        for language, sentences in zip(("en", "de"), zip(*pairs, strict=True), strict=True):
            text = "".join(f"{sentence}\n" for sentence in sentences)
            (folder / f"{split}.{language}").write_text(text, encoding="utf-8")


def write_parquet(folder):
    """Write the lines as WMT14's files on the hub have them."""
    import datasets

    for split, pairs in LINES.items():
        rows = [{"translation": {"de": german, "en": english}} for english, german in pairs]
        path = folder / f"{parallel.SPLITS[split]}-00000-of-00001.parquet"
        datasets.Dataset.from_list(rows).to_parquet(path)


def test_files_of_both_kinds(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    for write in (write_parquet, write_text):
        folder = tmp_path / write.__name__
        folder.mkdir()
        write(folder)
        config = PairsConfig("own", str(folder), str(folder / "data"), "bpe", vocab_size=280)
        prepare(config)
        corpus = load_tokens(config, seed=0)
        for split, pairs in LINES.items():
            plain = [" ".join(sentence.split()) for pair in pairs for sentence in pair]
            assert documents_of(corpus, split) == plain
        source = TranslationPairs(corpus, config, replace(MODEL, vocab_size=280), 1)
        assert source.describe()["left_out"] == 1  # the empty one
    (folder / "val.de").write_text("other\n")
    with pytest.raises(UserError, match="was made from"):
        read_manifest(config)


def corpus_of(lengths, seed):
    """A corpus of these (source, target) lengths, ends counted; a pair's first token is its own."""
    tokens = []
    for number, pair in enumerate(lengths):
        for length in pair:
            tokens += [number] * (length - 1) + [END]
    splits = {split: np.array(tokens, dtype=np.uint16) for split in ("train", "val", "test")}
    manifest = {
        "tokenizer": {"vocab_size": 300, "end_of_text": END},
        "splits": {split: {"sha256": split} for split in splits},
    }
    return Corpus(SimpleNamespace(name="made"), manifest, splits, seed)


@pytest.fixture(scope="module")
def lengths():
    return np.random.default_rng(0).integers(2, 20, (90, 2)).tolist()


def source_of(lengths, batch_size=2, seed=0, model=MODEL, max_tokens=None):
    config = PairsConfig("own", "unused", tokenizer="bpe", vocab_size=300, batch_tokens=64,
                         max_tokens=max_tokens)  # fmt: skip
    return TranslationPairs(corpus_of(lengths, seed), config, model, batch_size)


def test_every_pair_comes_once_an_epoch_within_the_budget(lengths):
    source = source_of(lengths)
    count = source.describe()["bundles"]
    assert source.eval_size == count
    # 64 tokens: of seventeen of 5 eight, twice, then three of at most 20, one of 20 and one of 40.
    longest = np.array([5] * 17 + [19, 20, 20, 40])
    assert cut(longest, 64).tolist() == [0, 8, 16, 19, 20, 21]
    epochs = []
    for epoch in range(2):
        seen = []
        for number in range(epoch * count, (epoch + 1) * count):
            step, index = divmod(number, 2)
            batch = next(source.batches([(step, range(index, index + 1))]))
            assert batch["source"].numel() <= 64 and batch["target"].numel() <= 64
            seen.append(sorted(batch["source"][:, 0].tolist()))
        assert sorted(pair for bundle in seen for pair in bundle) == list(range(90))
        epochs.append(seen)
    assert epochs[0] != epochs[1]
    walked = list(source.batches((step, range(2)) for step in range(41)))[-1]
    late = [(40, range(2))]  # some epochs on
    [asked], [other] = source_of(lengths).batches(late), source_of(lengths, seed=1).batches(late)
    assert all(torch.equal(walked[name], asked[name]) for name in walked)
    assert not torch.equal(walked["source"][:, 0], other["source"][:, 0])
    odd = source_of([*lengths, [33, 2], [2, 33], [1, 5], [32, 32]])
    assert odd.describe()["left_out"] == 3  # too long, or empty
    with pytest.raises(UserError, match=r"no pair of the train split of .* has at most 8 tokens"):
        source_of([[9, 9]], max_tokens=8)


def test_a_batch_is_padded_and_shifted():
    [batch] = source_of([(3, 2), (2, 4)], batch_size=1).batches([(0, range(1))])
    order = batch["source"][:, 0].tolist()
    expected = {
        0: ([0, 0, END], [1, 1, 1], [END, 0, END, END], [0, END, -1, -1]),
        1: ([1, END, END], [1, 1, 0], [END, 1, 1, 1], [1, 1, 1, END]),
    }
    for row, pair in enumerate(order):
        names = ("source", "source_mask", "input", "target")
        assert tuple(batch[name][row].tolist() for name in names) == expected[pair]
    assert sorted(order) == [0, 1] and batch["target_tokens"] == 6


def test_any_split_of_a_step_gives_its_loss_and_gradient(lengths):
    """Ranks and micro-batches: the mean over them is the mean over the tokens of the step."""
    source = source_of(lengths, batch_size=4)
    torch.manual_seed(0)
    model = Transformer(replace(MODEL, dropout=0.0)).double()

    def of(*parts):
        model.zero_grad()
        total = 0.0
        for batch in source.batches((5, part) for part in parts):
            loss = model(**batch)[1] / len(parts)
            loss.backward()
            total += float(loss.detach())
        return total, model.encoder.layers[0].mlp.fc1.weight.grad.clone()

    whole = of(range(4))
    loss, gradient = of(*(range(i, i + 1) for i in range(4)))
    assert loss == pytest.approx(whole[0], rel=1e-12)
    torch.testing.assert_close(gradient, whole[1], rtol=1e-9, atol=1e-12)
