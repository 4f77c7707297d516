"""Beam search against that of one sentence, and BLEU against sacrebleu."""

import pytest
import sacrebleu
import torch
from sacrebleu.tokenizers.tokenizer_intl import TokenizerV14International

from experiments.evaluation import translation
from experiments.evaluation.translation import Search, translate
from models.transformer import Transformer, TransformerConfig
from tests.each import each

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
    # Without a common run of four words there is nothing, where SacreBLEU smooths.
    assert translation.score(["a b c"], ["a b d"])[0]["bleu_tokenized"] == 0.0
