"""GLUE: its files with all their faults, inputs of both kinds of model, metrics by hand."""

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
from experiments.finetuning import glue
from experiments.finetuning.glue import Examples, load, metrics
from experiments.support.checkpoint import content_hash
from experiments.support.errors import UserError

GLUE = Path(__file__).parent / "glue"
TEXTS = ["Anna waits in the garden .", "Ben is not in the kitchen .", "Zoë sings ."]


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
    for number, (task, file, change, message) in enumerate((
        ("rte", "RTE/train.tsv", None, r"RTE/train\.tsv is missing: data\.source="),
        ("rte", "RTE/train.tsv", lambda x: [x[0].replace("label", "gold"), *x[1:]],
         r"train\.tsv, line 1: no column 'label' among index, sentence1, sentence2, gold"),
        ("rte", "RTE/train.tsv", lambda x: [*x[:3], x[3].replace("entailment", "entails"), *x[4:]],
         r"train\.tsv, line 4: .* is no example of rte, with the label entailment, not_entailment"),
        ("stsb", "STS-B/dev.tsv", lambda x: [*x[:2], x[2].replace("1.400", "nan"), *x[3:]],
         r"STS-B/dev\.tsv, line 3: .* with the label from 0 to 5"),
        ("qqp", "QQP/train.tsv", lambda x: [*x[:4], "900\t1\t2\ta?\tb?\t2", *x[4:]],
         r"QQP/train\.tsv, line 5: "),
    )):  # fmt: skip
        path = Path(shutil.copytree(GLUE, tmp_path / str(number))) / file
        if change is None:
            path.unlink()
        else:
            path.write_text("\n".join(change(path.read_text(encoding="utf-8").split("\n"))))
        with pytest.raises(UserError, match=message):
            load(task, str(tmp_path / str(number)))


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


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    path.write_text(train_bpe(TEXTS, 270))
    return load_bpe(path)


@pytest.fixture(scope="module")
def wordpiece():
    return HFTokenizer(train_wordpiece(TEXTS * 3, 110), 3)


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
