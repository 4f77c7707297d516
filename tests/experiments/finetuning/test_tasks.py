"""GLUE and SQuAD: files with all their faults, inputs of both kinds of model, scores by hand."""

# ruff: noqa: RUF001 (typographic quotation marks and dashes are what is tested)

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from experiments.data.tokenizer import (
    Frame,
    HFTokenizer,
    encode,
    load_bpe,
    train_bpe,
    train_wordpiece,
)
from experiments.finetuning import glue, squad
from experiments.finetuning.glue import Examples, load, metrics
from experiments.finetuning.squad import Question, Window, best_answers, tokenize, windows
from experiments.support.checkpoint import content_hash
from experiments.support.errors import UserError

GLUE, SQUAD = (Path(__file__).parent / name for name in ("glue", "squad"))
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


def test_every_task_reads_its_own_files():
    sizes = {"sst2": [64, 32], "mnli": [48, 15, 15]}
    for task in glue.TASKS:
        splits = load(task, str(GLUE))
        assert [*splits][:2] == ["train", "dev"]
        assert [*map(len, splits.values())] == sizes.get(task, [48, 16])
        texts = 1 if task in ("cola", "sst2") else 2
        for own in splits.values():
            assert all(len(t) == texts and all(t) for t in own.texts)
            if task != "stsb":
                assert set(own.labels) == set(range(len(glue.TASKS[task].labels)))
        assert content_hash([*glue.files(task, str(GLUE)).values()]) != content_hash([])
    # A quotation mark is a character, and quotes no tab or line.
    assert any(text.count('"') == 1 for (text,) in load("sst2", str(GLUE))["train"].texts)


def test_a_bad_file_is_one_line_with_file_and_line(tmp_path):
    path = Path(shutil.copytree(GLUE, tmp_path / "glue")) / "RTE/train.tsv"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("\tentailment", "\tentails", 1))
    with pytest.raises(UserError, match=r"train\.tsv, line \d+: .* is no example of rte, with the"):
        load("rte", str(tmp_path / "glue"))
    path.unlink()
    with pytest.raises(UserError, match=r"RTE/train\.tsv is missing: data\.source="):
        load("rte", str(tmp_path / "glue"))
    answer = {"text": "the garden", "answer_start": 40}
    asked = {"id": "q7", "question": "Where?", "answers": [answer]}
    paragraph = {"context": "Anna is in  the garden.", "qas": [asked]}
    content = {"version": "1.1", "data": [{"title": "T", "paragraphs": [paragraph]}]}
    path = tmp_path / "train-v1.1.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"^{path}.* question q7 has an answer outside"):
        squad.load(str(tmp_path))


def test_the_broken_lines_of_qqp_are_left_out(tmp_path):
    """In the published file the text of some questions goes on in a line of its own."""
    clean = load("qqp", str(GLUE))["train"]
    path = Path(shutil.copytree(GLUE, tmp_path / "glue")) / "QQP/train.tsv"
    lines = path.read_text().split("\n")
    path.write_text("\n".join([*lines[:4], "900\t1\t2\tIs it", "true?\tIs it not?\t0", *lines[4:]]))
    broken = load("qqp", str(tmp_path / "glue"))["train"]
    assert broken.texts == clean.texts and broken.labels.tolist() == clean.labels.tolist()


def test_the_hub_gives_the_same_examples_as_the_files(monkeypatch):
    import datasets

    columns = {"mnli": ["premise", "hypothesis"], "sst2": ["sentence"], "stsb": list(glue._PAIR)}
    expected = {task: load(task, str(GLUE)) for task in columns}

    def load_dataset(name, config, revision):
        assert (name, revision) == ("nyu-mll/glue", glue.REVISION) and len(revision) == 40
        made = {}
        for split, own in expected[config].items():
            theirs = split.replace("dev", "validation")
            if config == "mnli" and split == "dev":
                theirs = "validation_matched"
            texts = dict(zip(columns[config], map(list, zip(*own.texts, strict=True)), strict=True))
            made[theirs] = datasets.Dataset.from_dict({**texts, "label": own.labels.tolist()})
        return datasets.DatasetDict(made)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for task, splits in expected.items():
        loaded = load(task, glue.HUB)
        assert loaded.keys() == splits.keys()
        for split, own in splits.items():
            assert loaded[split].texts == own.texts
            assert loaded[split].labels.tolist() == own.labels.tolist()


def test_bert_sees_cls_a_sep_b_sep_and_gpt2_a_b(bpe, wordpiece):
    a, b = wordpiece.encode_ordinary_batch(["Anna waits", "in the garden ."])
    frame = Frame.of(wordpiece)
    pad, cls, sep = (wordpiece.special_tokens[t] for t in ("[PAD]", "[CLS]", "[SEP]"))
    assert frame.pad == pad
    [single] = encode(wordpiece, frame, [("Anna waits",)], 32)
    assert single == ([cls, *a, sep], len(a) + 2)  # no token of type 1
    [pair] = encode(wordpiece, frame, [("Anna waits", "in the garden .")], 32)
    assert pair == ([cls, *a, sep, *b, sep], len(a) + 2)
    a, b = bpe.encode_ordinary_batch(["Anna waits", "in the garden ."])
    frame = Frame.of(bpe)
    assert frame.pad == bpe.eot_token
    [pair] = encode(bpe, frame, [("Anna waits", "in the garden .")], 64)
    assert pair == ([*a, *b], len(a))
    assert encode(bpe, frame, [("",)], 64) == [([bpe.eot_token], 1)]


class Letters:
    """A tokenizer with a token a letter."""

    eot_token = 0

    def encode_ordinary_batch(self, texts):
        return [[ord(c) for c in text] for text in texts]


def test_the_longer_text_gives_way_first():
    for a, b, kept_a, kept_b in ((3, 2, 3, 2), (9, 3, 5, 3), (3, 9, 3, 5), (9, 9, 4, 4)):
        texts = ("a" * a, "b" * b)
        encoded = encode(Letters(), Frame.of(Letters()), [texts], 8)
        assert encoded == [([97] * kept_a + [98] * kept_b, kept_a)]
        framed = encode(Letters(), Frame((1,), (2,), (2,), 0), [texts], 11)
        assert framed == [([1, *[97] * kept_a, 2, *[98] * kept_b, 2], kept_a + 2)]
    alone = encode(Letters(), Frame((1,), (2,), (2,), 0), [("aaaa",)], 4)
    assert alone == [([1, 97, 97, 2], 4)]


def score(task, predicted, labels, **others):
    examples = {"dev": Examples([], np.array(labels))}
    given = {"dev": np.array(predicted)}
    for split, (p, y) in others.items():
        given[split], examples[split] = np.array(p), Examples([], np.array(y))
    return metrics(task, given, examples)


def test_metrics_by_hand():
    # TP 2, TN 1, FP 1, FN 1: (2 * 1 - 1 * 1) / sqrt(3 * 3 * 2 * 2) = 1 / 6
    assert score("cola", [1, 1, 0, 1, 0], [1, 1, 1, 0, 0])["matthews"] == pytest.approx(100 / 6)
    assert score("cola", [1, 1, 1], [1, 0, 1])["score"] == 0.0  # one class alone
    # TP 2, FP 1, FN 1: F1 = 2 * 2 / (2 * 2 + 1 + 1) = 2/3; 4 of 6 right
    result = score("qqp", [1, 1, 1, 0, 0, 0], [1, 1, 0, 1, 0, 0])
    assert result == pytest.approx({"score": 200 / 3, "f1": 200 / 3, "accuracy": 200 / 3})
    assert score("mrpc", [0, 0], [1, 0])["f1"] == 0.0
    result = score("mnli", [0, 1, 2, 2], [0, 1, 2, 1], dev_mismatched=([0, 0], [1, 0]))
    assert result == {"score": 75.0, "accuracy": 75.0, "accuracy_mismatched": 50.0}
    # Monotone but not linear: ranks agree in full. Pearson of (0, 1, 2), (0, 1, 4): cov 4 / 3...
    result = score("stsb", [0.0, 1.0, 2.0], [0.0, 1.0, 4.0])
    deviations = [(-1, -5 / 3), (0, -2 / 3), (1, 7 / 3)]
    covariance = sum(x * y for x, y in deviations)
    pearson = covariance / math.sqrt(2 * sum(y * y for _, y in deviations))
    assert result["spearman"] == pytest.approx(100) == result["score"]
    assert result["pearson"] == pytest.approx(100 * pearson)
    for predicted, labels in (([1.0, 1.0], [0.0, 5.0]), ([1.0, 2.0], [3.0, 3.0]), ([1.0], [3.0])):
        none = {"score": 0.0, "spearman": 0.0, "pearson": 0.0}
        assert score("stsb", predicted, labels) == none


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


def test_the_best_pair_wins_and_scores_are_right_by_hand():
    # The best start is in the question, the best end before the best start that is left.
    scores = logits(15, {0: 9.0, 6: 4.0, 3: 2.0}, {14: 9.0, 4: 5.0, 8: 1.0})
    assert best_answers(ASKED, [window()], [scores]) == {"q": "bc"}  # 2 + 5 > 4 + 1
    scores[4, 1] = 2.5
    assert best_answers(ASKED, [window()], [scores]) == {"q": "efg"}  # 4 + 1 > 2 + 2.5
    asked = [Question("q", "?", "The end", (("The", 0),)), Question("r", "?", "end", (("end", 0),))]
    assert squad.metrics(asked, {"r": "end"}) == {"score": 50.0, "f1": 50.0, "exact_match": 50.0}
    # An article is normalized to nothing, and so is "".
    assert squad.metrics(asked, {"q": "", "r": "end"})["exact_match"] == 100.0
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
