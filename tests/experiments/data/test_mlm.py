"""Masked text: which tokens are hidden, how, and what a batch depends on."""

import hashlib
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from experiments.data.corpus import CausalText, Corpus
from experiments.data.mlm import MaskedText, MLMConfig, mask_tokens, unigram_entropy
from experiments.data.tokenizer import HFTokenizer, train_wordpiece
from models.bert import BertConfig, BertLM

PAD, UNK, CLS, SEP, MASK = range(5)
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
CONFIG = MLMConfig("letters", "unused", tokenizer="wordpiece", vocab_size=256)
MODEL = BertConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=256, block_size=128)


@pytest.fixture(scope="module")
def tokenizer():
    """26 letters, the same within words, and what merges of a short text give: below 256 tokens."""
    return HFTokenizer(train_wordpiece([" ".join(ALPHABET) + " " + ALPHABET], 256), SEP)


@pytest.fixture(scope="module")
def corpus(tokenizer, tmp_path_factory):
    """Random letters in documents of 50: a token at position 50 i + 49 is [SEP], another none."""
    directory = tmp_path_factory.mktemp("letters")
    (directory / "tokenizer.json").write_text(tokenizer.text, encoding="utf-8")
    generator = np.random.default_rng(0)
    splits = {}
    for split, size in (("train", 60_000), ("val", 6_000)):
        splits[split] = generator.integers(5, tokenizer.n_vocab, size, dtype=np.uint16)
        splits[split][49::50] = SEP
    record = {
        "kind": "wordpiece",
        "vocab_size": tokenizer.n_vocab,
        "end_of_text": SEP,
        "file": "tokenizer.json",
        "sha256": hashlib.sha256(tokenizer.text.encode()).hexdigest(),
    }
    files = {split: {"sha256": split} for split in splits}
    return Corpus(directory, {"tokenizer": record, "splits": files}, splits, seed=3)


def source(corpus, model=MODEL, **options):
    return MaskedText(corpus, replace(CONFIG, **options), model)


def batch(source, step=0, samples=range(8)):
    return next(source.batches([(step, samples)]))


def unmasked(batch):
    """The input with the hidden tokens put back."""
    return batch["target"].where(batch["target"] != -1, batch["input"])


def test_masking_by_hand():
    """Ranks are the upper halves of the words; lower halves 7, 8, 9, 28 end in 7, 8, 9, 8."""
    special = np.array([True, True, True, True, True, False, False, False])
    tokens = np.array([[CLS, 5, 6, 7, SEP, 6], [CLS, SEP, 5, SEP, SEP, 7]])
    rank = np.array([[0, 4, 1, 3, 0, 2], [0, 0, 9, 0, 0, 8]], dtype=np.uint64)
    low = np.array([[0, 7, 7, 28, 0, 9], [0, 0, 8, 0, 0, 5]], dtype=np.uint64)
    words = (rank << np.uint64(32)) | low
    found, target = mask_tokens(tokens, words, 3, special, MASK)
    # First row: of the words at 1, 2, 3, 5 that of 1 is the largest, so 5 is left alone. The 6
    # becomes [MASK] (7); the 7 is replaced (28: outcome 8, 28 // 10 = 2, the third of 5, 6, 7); the
    # last 6 stays (9). Second row: two ordinary tokens for three places.
    assert found.tolist() == [[CLS, 5, MASK, 7, SEP, 6], [CLS, SEP, 5, SEP, SEP, MASK]]
    assert target.tolist() == [[-1, -1, 6, 7, -1, 6], [-1, -1, 5, -1, -1, 7]]


def test_statistics_of_the_masks(corpus):
    """4000 samples of 19 targets between [CLS] and [SEP]: binomial counts within 4 sigma."""
    masked = batch(source(corpus), 5, range(4000))
    whole, chosen = unmasked(masked), masked["target"] != -1
    windows = CausalText(corpus, 126).batch("train", 5, range(4000))["input"]
    ends = torch.tensor([[CLS, SEP]]).expand(4000, 2)
    assert torch.equal(whole, torch.cat([ends[:, :1], windows, ends[:, 1:]], 1))
    special = torch.isin(whole, torch.tensor([PAD, UNK, CLS, SEP, MASK]))
    assert not torch.any(chosen & special) and int(chosen.sum()) == 4000 * 19
    after, before, ordinary = masked["input"][chosen], whole[chosen], corpus.vocab_size - 5
    kept = 0.1 + 0.1 / ordinary  # or replaced by itself
    for found, share in ((after == MASK, 0.8), (after == before, kept)):
        sigma = math.sqrt(len(after) * share * (1 - share))
        assert abs(int(found.sum()) - share * len(after)) < 4 * sigma
    # Every ordinary token replaces as often, and every position is as likely, but for its [SEP]s.
    replaced = torch.bincount(after[(after != MASK) & (after != before)], minlength=ordinary + 5)
    expected = replaced.sum() / ordinary
    assert not replaced[:5].any()
    chi2 = float(((replaced[5:] - expected) ** 2 / expected).sum())  # ordinary - 1 of freedom
    assert abs(chi2 - (ordinary - 1)) < 4 * math.sqrt(2 * (ordinary - 1))
    share = chosen.sum(0)[1:-1] / (~special).sum(0)[1:-1]
    assert torch.all((share - 19 / 123.5).abs() < 5 * math.sqrt(0.15 * 0.85 / 3900))
    for limit, count in ((20, 20), (27, 26)):  # a fifth of 128, at most
        own = source(corpus, mask_probability=0.2, max_predictions=limit)
        hidden = [batch(own)["target"], *(b["target"] for b in own.eval_batches(4, 2))]
        assert all(torch.all((target != -1).sum(1) == count) for target in hidden)
    target = masked["target"][:8][chosen[:8]]
    logits = torch.nn.functional.one_hot(target, 256).float()
    logits[:20] = -logits[:20]  # twenty wrong answers
    few = {name: value[:8] for name, value in masked.items()}
    sums, count = source(corpus).score(logits, torch.tensor(2.5), few)
    assert (count, float(sums["loss"]), int(sums["accuracy"])) == (152, 2.5 * 152, 132)


def test_pairs_of_sentences(corpus):
    """[CLS] 62 tokens [SEP] 63 tokens [SEP]; half of the second parts are from elsewhere."""
    model = replace(MODEL, next_sentence=True)
    pairs = batch(source(corpus, model, next_sentence=True), 2, range(1000))
    whole, label = unmasked(pairs), pairs["next_sentence"]
    assert torch.equal(whole[0, [0, 63, 127]], torch.tensor([CLS, SEP, SEP]))
    assert torch.equal(pairs["token_types"][5], (torch.arange(128) > 63).long())
    windows = CausalText(corpus, 125).batch("train", 2, range(1000))["input"]
    assert torch.equal(whole[:, 1:63], windows[:, :62])
    follows = (whole[:, 64:127] == windows[:, 62:]).all(1)
    assert torch.equal(follows, label == 0)  # that a random place is the right one has odds of 1e-5
    assert abs(int(label.sum()) - 500) < 4 * math.sqrt(1000 / 4)
    assert torch.all((pairs["target"] != -1).sum(1) == 19)
    assert torch.all(pairs["target"][:, [0, 63, 127]] == -1)
    with torch.no_grad():
        _, loss = BertLM(model)(**{name: value[:100] for name, value in pairs.items()})
    assert abs(float(loss) - math.log(256) - math.log(2)) < 0.1  # of an untrained model


def test_unigram_entropy_by_hand(corpus):
    """Train: a three times, b once, three [SEP]; counts + 1 are 4, 2 and 1 for each other token."""
    ordinary = corpus.vocab_size - 5
    tokens = {"train": [5, 5, SEP, SEP, 5, 6, SEP], "val": [5, 6, 7, SEP]}
    small = {k: np.array(v, dtype=np.uint16) for k, v in tokens.items()}
    own = source(corpus)
    own.corpus = replace(corpus, tokens=small)
    total = 4 + ordinary
    expected = -(math.log(4 / total) + math.log(2 / total) + math.log(1 / total)) / 3
    assert unigram_entropy(own) == pytest.approx(expected, rel=1e-12)
