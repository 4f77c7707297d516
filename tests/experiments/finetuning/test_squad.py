"""SQuAD: its file format, spans of tokens in text, windows, the search, and the official scores."""

# ruff: noqa: RUF001 (typographic quotation marks and dashes are what is tested)

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.data.tokenizer import Frame, HFTokenizer, load_bpe, train_bpe, train_wordpiece
from experiments.finetuning import squad
from experiments.finetuning.squad import Question, Window, best_answers, tokenize, windows
from experiments.support.errors import UserError

SQUAD = Path(__file__).parent / "squad"
TEXTS = [
    "Zoë works in the kitchen. Anna works in the garden, José doesn't.",
    "Where does Zoë work? Where does Anna work?",
]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    path.write_text(train_bpe(TEXTS * 2, 300))
    return load_bpe(path)


@pytest.fixture(scope="module")
def hf_bpe():
    return HFTokenizer(train_bpe(TEXTS * 2, 300), 299)


@pytest.fixture(scope="module")
def wordpiece():
    return HFTokenizer(train_wordpiece(TEXTS * 5, 160), 3)


def document(**changes):
    answer = {"text": "the garden", "answer_start": 12}
    asked = {"id": "q7", "question": "Where?", "answers": [answer], **changes}
    paragraph = {"context": "Anna is in  the garden.", "qas": [asked]}
    return {"version": "1.1", "data": [{"title": "T", "paragraphs": [paragraph]}]}


def test_a_bad_file_is_one_line_with_file_and_question(tmp_path):
    garden = {"text": "the garden", "answer_start": 12}
    for content, message in (
        (document(answers=[{**garden, "answer_start": 40}]), "question q7 has an answer outside"),
        (document(answers=[]), "question q7 has an answer outside its context, or none"),
        ("{", "is not in the format of SQuAD v1.1: JSONDecodeError"),
        (None, "is missing"),
    ):
        path = tmp_path / "train-v1.1.json"
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(UserError) as caught:
            squad.load(str(tmp_path))
        said = str(caught.value)
        assert said.startswith(str(path)) and message in said and "\n" not in said


def test_spans_of_tiktoken_and_of_the_tokenizers_library_agree(bpe, hf_bpe):
    for text in (*TEXTS, "qß€😀q Zoë", "Ąę  x\n", ""):
        assert tokenize(bpe, text) == tokenize(hf_bpe, text)


def test_windows_share_the_stride_or_begin_at_its_multiples(bpe):
    context = "€" * 8  # three bytes each: 24 tokens of no merge
    asked = Question("q", "ß", context, (("€", 0),))
    ids = tokenize(bpe, context)[0]
    length = len(tokenize(bpe, "ß")[0])
    assert len(ids) == 24
    for stride, kind, firsts in (
        (3, "overlap", [0, 7, 14]),  # 10 - 3 tokens on
        (3, "step", [0, 3, 6, 9, 12, 15]),
        (30, "step", [0, 10, 20]),  # no token is left out
    ):
        made = windows(bpe, Frame.of(bpe), [asked], length + 10, stride, kind)
        assert [w.ids[length:] for w in made] == [ids[first : first + 10] for first in firsts]
        # The answer is the first character: no other window has it.
        assert [w.answer != (0, 0) for w in made] == [True] + [False] * (len(made) - 1)


def window(index=0, n=12):
    """Two tokens of a question, then one for each character of the context a, b, ... ."""
    spans = [None, None, *((i, i + 1) for i in range(n)), None]
    return Window(index, list(range(n + 3)), 2, spans, (0, 0))


def logits(n, start, end, low=-5.0):
    made = np.full((n, 2), low)
    for column, values in enumerate((start, end)):
        for position, value in values.items():
            made[position, column] = value
    return made


CONTEXT = "abcdefghijkl"
ASKED = [Question("q", "?", CONTEXT, (("a", 0),))]


def test_the_best_pair_in_order_and_inside_the_context_wins():
    # The best start is in the question, the best end before the best start that is left.
    scores = logits(15, {0: 9.0, 6: 4.0, 3: 2.0}, {14: 9.0, 4: 5.0, 8: 1.0})
    assert best_answers(ASKED, [window()], [scores]) == {"q": "bc"}  # 2 + 5 > 4 + 1
    scores[4, 1] = 2.5
    assert best_answers(ASKED, [window()], [scores]) == {"q": "efg"}  # 4 + 1 > 2 + 2.5


def test_a_question_without_a_prediction_is_wrong_where_an_empty_one_is_right():
    asked = [Question("q", "?", "The end", (("The", 0),)), Question("r", "?", "end", (("end", 0),))]
    assert squad.metrics(asked, {"r": "end"}) == {"score": 50.0, "f1": 50.0, "exact_match": 50.0}
    # An article is normalized to nothing, and so is "".
    assert squad.metrics(asked, {"q": "", "r": "end"})["exact_match"] == 100.0


def test_scores_of_predictions_checked_by_hand():
    context = "The Zugspitze, at 2,962 m, is the highest peak of Germany’s Alps. It isn't far."
    answers = {
        # (references, prediction, EM, F1)
        "article": (["highest peak"], "The highest peak!", 1, 1),
        "best": (["Zugspitze", "The Zugspitze, at 2,962 m"], "zugspitze at 2962 M", 1, 1),
        # common: peak, of; 3 words predicted (no article), 2 expected: 2 * 2 / 5
        "part": (["peak of"], "the highest peak of", 0, 0.8),
        "unicode": (["Germany’s Alps"], "Germany's Alps", 0, 0.5),  # ’ stays, ' goes; "alps" alone
        "apostrophe": (["isn't"], "isnt", 1, 1),
        "wrong": (["It"], "Alps", 0, 0),
        "none": (["far"], None, 0, 0),
        # far twice predicted, once expected: one in common of 2 and 1: 2 / 3
        "twice": (["far"], "far far", 0, 2 / 3),
    }
    questions = [
        Question(name, "?", context, tuple((text, context.index(text)) for text in texts))
        for name, (texts, *_) in answers.items()
    ]
    predicted = {name: p for name, (_, p, *_) in answers.items() if p is not None}
    for name, (texts, prediction, em, f1) in answers.items():
        own = prediction or ""
        assert max(squad.exact_match(own, text) for text in texts) == em, name
        assert max(squad.f1(own, text) for text in texts) == pytest.approx(f1), name
    result = squad.metrics(questions, predicted)
    assert result["exact_match"] == 100 * 3 / 8
    assert result["f1"] == result["score"] == pytest.approx(100 * (3 + 0.8 + 0.5 + 2 / 3) / 8)


def test_logits_at_the_labels_give_full_marks(bpe, wordpiece):
    splits = squad.load(str(SQUAD))
    assert {name: len(own) for name, own in splits.items()} == {"train": 24, "dev": 9}
    questions = splits["dev"]
    assert questions[0].question == "Where does Mr. Li work?"
    assert questions[0].answers == (("station", 20), ("the station", 16))
    for encoding in (bpe, wordpiece):
        made = windows(encoding, Frame.of(encoding), questions, 64, 12)
        scores = [logits(len(w.ids), *({position: 9.0} for position in w.answer)) for w in made]
        result = squad.metrics(questions, best_answers(questions, made, scores))
        assert result == {"score": 100.0, "f1": 100.0, "exact_match": 100.0}
