"""Perplexity, probes, beam search and BLEU: by hand and against scikit-learn and sacrebleu."""

import math

import numpy as np
import pytest
import sacrebleu
import torch
from sacrebleu.tokenizers.tokenizer_intl import TokenizerV14International
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from torch import nn

from experiments.evaluation import probes, translation
from experiments.evaluation.perplexity import Text, perplexity, raw_rows, window_losses
from experiments.evaluation.probes import features, knn, linear, logistic_regression
from experiments.evaluation.translation import Search, translate
from experiments.images.dataset import ImageConfig
from experiments.images.source import ImageBatches
from experiments.support.errors import UserError
from models.transformer import Transformer, TransformerConfig
from models.vit import ViT, ViTConfig
from tests.each import each


class Fixed(nn.Module):
    """Gives every position the same logits."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, input):
        return self.logits.expand(*input.shape, -1), None


def test_by_hand():
    """Probabilities 1/2, 1/4, 1/4: the first token of a window is given, not predicted. Uniform
    ones; and all of it on token 0 in a text of token 1, so that the loss is the gap in nats."""
    model = Fixed(torch.tensor([2.0, 1.0, 1.0]).log())
    data = torch.tensor([[2, 0, 0], [0, 1, 0]])  # costs in bits: 1 + 1 and 2 + 1
    losses = window_losses(model, data, batch=1) / math.log(2)
    torch.testing.assert_close(losses, torch.tensor([1.0, 1.5], dtype=torch.float64))
    assert perplexity(model, data, batch=1)["ppl"] == pytest.approx(2**1.25)
    found = perplexity(Fixed(torch.zeros(50257)), torch.randint(0, 50257, (3, 8)), batch=2)
    assert found["ppl"] == pytest.approx(50257, rel=1e-13)
    assert (found["ppl_windows"], found["ppl_tokens"]) == (3, 21)
    for gap, expected in ((700.0, math.exp(700)), (710.0, math.inf)):
        found = perplexity(Fixed(torch.tensor([gap, 0.0])), torch.ones(2, 4, dtype=torch.int64), 2)
        assert found["ppl_loss"] == pytest.approx(gap)
        assert found["ppl"] == pytest.approx(expected, rel=1e-9)


RAW = " \n = Title = \n \n First line . \n Second line . \n \n"
ROWS = ["", " = Title = \n", "", " First line . \n", " Second line . \n", ""]


def test_the_raw_file_and_the_hub_s_rows_are_the_same_text(tmp_path, monkeypatch):
    """The hub's at one revision; any other file is taken as it is, if it can be read."""
    import pyarrow
    import pyarrow.parquet

    assert raw_rows(RAW) == ROWS
    (tmp_path / "wiki.test.raw").write_text(RAW)
    pyarrow.parquet.write_table(pyarrow.table({"text": ROWS}), tmp_path / "test.parquet")
    joined = "\n\n = Title = \n\n\n\n\n First line . \n\n\n Second line . \n\n\n"
    for name in ("wiki.test.raw", "test.parquet"):
        assert Text(str(tmp_path / name)).content == joined
    asked = []
    monkeypatch.setattr(
        "experiments.evaluation.perplexity.load_dataset",
        lambda *given: asked.append(given) or {"test": {"text": ROWS}},
    )
    text = Text("wikitext2")
    assert text.content == joined
    [(name, config, revision)] = asked
    assert (name, config) == ("Salesforce/wikitext", "wikitext-2-raw-v1") and len(revision) == 40
    assert text.identity() == {"name": "wikitext2", "revision": revision}
    (tmp_path / "a.txt").write_text("ein Wort\n\n\nnoch eins; Überschuß", encoding="utf-8")
    assert Text(str(tmp_path / "a.txt")).content == "ein Wort\n\n\nnoch eins; Überschuß"
    with pytest.raises(UserError, match=r"ppl=.*missing\.txt is no file"):
        _ = Text(str(tmp_path / "missing.txt")).content


@pytest.fixture(scope="module")
def digits():
    """(x [600, 64], y, test_x [200, 64], test_y): pixels, float64."""
    x, y = load_digits(return_X_y=True)
    x, y = torch.from_numpy(x / 16.0), torch.from_numpy(y.astype(np.int64))
    return x[:600], y[:600], x[600:800], y[600:800]


def test_neighbours_vote_as_scikit_learn_s_do(digits, monkeypatch):
    """20 neighbours at a temperature of 0.07 (DINO, appendix F.1)."""
    x, y, test_x, _ = digits
    neighbours = KNeighborsClassifier(20, weights=lambda d: np.exp((1 - d) / 0.07), metric="cosine")
    ours = knn(x, y, test_x, 10)
    assert ours.tolist() == neighbours.fit(x, y).predict(test_x).tolist()
    monkeypatch.setattr(probes, "_COSINES", 600)  # one test image at a time
    assert torch.equal(knn(x, y, test_x, 10), ours)


def test_the_regression_reaches_the_minimum_on_correlated_features():
    """The standard deviations of 64 directions lie between 10 and 0.01, and each direction tells
    the classes apart as well as the others. Features of vision transformers are like that."""
    generator, decay = torch.Generator().manual_seed(0), 1e-6
    own, to_classes, turn = (
        torch.randn(size, generator=generator, dtype=torch.float64)
        for size in ((4000, 64), (64, 5), (64, 64))
    )
    y = (own @ to_classes / 8).softmax(1).multinomial(1, generator=generator)[:, 0]
    x = own * torch.logspace(1, -2, 64) @ torch.linalg.qr(turn)[0]
    theirs = LogisticRegression(C=1 / (decay * len(x)), solver="newton-cholesky", tol=1e-9)
    theirs.fit(x, y)

    def objective(weight, bias):
        loss = torch.nn.functional.cross_entropy(x @ weight.T + bias, y)
        return float(loss + decay / 2 * weight.square().sum())

    # For a convex function f(a) - f(b) <= f'(a) . (a - b). Ours stops where no slope is above 1e-6,
    # so this is at most 1e-6 times the distance of the two in the coordinates of the search.
    ours = logistic_regression(x, y, 5, decay)
    other = torch.from_numpy(theirs.coef_), torch.from_numpy(theirs.intercept_)
    apart = torch.linalg.solve(probes._basis(x, 5, decay), (ours[0] - other[0]).T)
    distance = float(apart.abs().sum() + (ours[1] - other[1]).abs().sum())
    assert objective(*ours) <= objective(*other) + 1e-6 * distance


def test_the_decay_is_chosen_on_a_held_out_tenth(digits, monkeypatch):
    """In the same standardised features, of which a constant one has no deviation to divide by."""
    x, y, test_x, _ = digits
    given, fits = [], []

    def spy(x, y, n_classes, decay):
        given.append((x, y, decay))
        fits.append(logistic_regression(x, y, n_classes, decay))
        return fits[-1]

    monkeypatch.setattr(probes, "logistic_regression", spy)
    monkeypatch.setattr(probes, "DECAYS", (1e-4, 1e-2, 1.0))
    padded = [torch.cat([part, torch.ones(len(part), 1)], 1) for part in (x, test_x)]
    predicted, decay = linear(padded[0], y, padded[1], 10)
    assert [given_decay for *_, given_decay in given] == [*probes.DECAYS, decay]
    deviation, mean = torch.std_mean(x, dim=0)
    deviation[deviation == 0] = 1.0
    whole, test = (
        torch.cat([(part - mean) / deviation, torch.zeros(len(part), 1)], 1) for part in (x, test_x)
    )
    held_out = torch.arange(600) % 10 == 0
    for (fit_x, fit_y, _), rows in ((given[0], ~held_out), (given[-1], held_out | ~held_out)):
        torch.testing.assert_close(fit_x, whole[rows])
        assert torch.equal(fit_y, y[rows])
    right = [
        int(((whole @ weight.T + bias).argmax(1) == y)[held_out].sum())
        for weight, bias in fits[:-1]
    ]
    assert len({*right}) > 1 and decay == max(zip(right, probes.DECAYS, strict=True))[1]
    weight, bias = fits[-1]
    assert torch.equal(predicted, (test @ weight.T + bias).argmax(1))


def test_features_of_every_image_with_its_class(write_idx, tmp_path):
    torch.manual_seed(0)
    model = ViT(ViTConfig(16, 1, 2, image_size=8, patch_size=4, n_classes=0)).eval()
    config = ImageConfig(
        "mine", str(write_idx(tmp_path / "idx")), image_size=8, crop_pct=1.0, crop_scale=None,
        rand_augment=None, color_jitter=0.0, random_erasing=0.0,
    )  # fmt: skip
    held = ImageBatches(config, model.config, 0, 256, 0, "cpu")
    for split, count in (("train", 12), ("val", 6)):
        x, y = features(model, held, split)
        assert x.shape == (count, 16) and x.dtype == torch.float32 and not x.requires_grad
        plain = held.plain(split, np.arange(count))
        with torch.no_grad():
            expected = model.features(plain["input"])
        order = [int((expected - row).abs().sum(1).argmin()) for row in x]
        assert sorted(order) == list(range(count)) != order
        assert torch.equal(y, plain["target"][order])


END, WORDS = 3, 4  # of ids 0 to 3; the model has one more, which is no word


@pytest.fixture(scope="module", params=[8, 28])
def model(request):
    """Random models whose translations are not all empty, and differ by sentence and search."""
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 5, "block_size": 16}
    torch.manual_seed(request.param)
    model = Transformer(TransformerConfig(**shape))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
        model.embedding.weight[END] *= 0.4  # not always the most likely one
    return model.eval()


SOURCE = torch.tensor([[0, 1, END, END], [2, 2, 1, END], [1, END, END, END]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]])


def step_by_step(model, row, how):
    """Beam search of one sentence, without a cache, by the words of `translate`."""
    most = int(MASK[row].sum()) + how.longer
    beams, finished = [(0.0, [])], []
    for length in range(most + 1):
        every = []
        for score, tokens in beams:
            source = SOURCE[row : row + 1, : int(MASK[row].sum())]
            logits, _ = model(source, torch.tensor([[END, *tokens]]))
            each = logits[0, -1].log_softmax(-1)
            allowed = [END] if length == most else range(WORDS)
            every += [(score + float(each[id]), [*tokens, id]) for id in allowed]
        every.sort(key=lambda pair: -pair[0])
        ended = [pair for pair in every[: how.beam] if pair[1][-1] == END]
        finished += [(how.score(score, len(t)), t[:-1]) for score, t in ended]
        if len(finished) >= how.beam:
            break
        beams = [pair for pair in every if pair[1][-1] != END][: how.beam]
    return max(finished)[1] if finished else []


@each("beam, penalty", [(1, 0.6), (2, 0.0), (3, 0.6), (3, 2.0)])
@torch.no_grad()
def test_a_beam_is_that_of_one_sentence_at_a_time(model, beam, penalty):
    assert Search(length_penalty=0.5).score(-6.0, 19) == -3.0  # by ((5 + 19) / 6) ** 0.5
    how = Search(beam=beam, length_penalty=penalty, longer=6)
    together = translate(model, SOURCE, MASK, END, WORDS, how)
    assert together == [step_by_step(model, row, how) for row in range(3)]
    alone = [
        translate(model, SOURCE[r : r + 1], MASK[r : r + 1], END, WORDS, how)[0] for r in range(3)
    ]
    assert together == alone and any(together)
    assert all(len(found) <= 10 and END not in found for found in together)


REFERENCES = [
    "Der Ost-West-Konflikt hält an, sagte er (noch).",
    "Das Haus kostet 3.5 Millionen Euro.",
    "Ein kurzer Satz.",
    "Heute ist ein schöner Tag, und morgen auch.",
]
TRANSLATIONS = [
    "Der Ost-West Konflikt hält an, sagte er.",
    "Das Haus kostet 3.5 Millionen Euro.",
    "Ein Satz.",
    "Heute ist ein schöner Tag und morgen ist einer.",
]


def test_bleu_is_sacrebleu_s():
    scores, signature = translation.score(TRANSLATIONS, REFERENCES)
    assert scores["bleu"] == sacrebleu.corpus_bleu(TRANSLATIONS, [REFERENCES]).score
    assert 0 < scores["bleu"] < 100 and scores["exact_match"] == 25.0
    assert "tok:13a" in signature and f"version:{sacrebleu.__version__}" in signature
    split = TokenizerV14International()
    assert split(REFERENCES[0]) == "Der Ost - West - Konflikt hält an , sagte er ( noch ) ."
    texts = ([split(text) for text in side] for side in (TRANSLATIONS, REFERENCES))
    found, expected = texts
    plain = sacrebleu.corpus_bleu(found, [expected], smooth_method="none", tokenize="none")
    assert scores["bleu_tokenized"] == plain.score != scores["bleu"]
