"""Texts and labels of the user's own, in CSV and JSON."""

import csv
import json

import numpy as np
import pytest

from experiments import finetune
from experiments.finetuning import own, tasks
from experiments.support.errors import UserError
from tests.experiments.finetuning.test_glue import Letters

TRAIN = [("good, really", "yes"), ('say "bad"', "no"), ("two\nlines", "yes"), ("", "no")]
DEV = [("good", "yes"), ("bad", "no"), ("bad\tagain", "no")]


def write(folder, ending=".csv"):
    for split, pairs in (("train", TRAIN), ("dev", DEV)):
        table = [{"review": text, "liked": label} for text, label in pairs]
        with (folder / f"{split}{ending}").open("w", newline="", encoding="utf-8") as file:
            if ending == ".csv":
                writer = csv.DictWriter(file, [*table[0]])
                writer.writeheader()
                writer.writerows(table)
            elif ending == ".json":
                json.dump(table, file)
            else:
                file.writelines(json.dumps(row) + "\n\n" for row in table)


def test_all_formats_give_the_same(tmp_path):
    for ending in own.ENDINGS:
        (folder := tmp_path / ending[1:]).mkdir()
        write(folder, ending)
        splits, classes = own.load(str(folder), ("review",), "liked")
        assert classes == ("no", "yes")
        assert splits["train"].texts == [(text,) for text, _ in TRAIN]
        assert splits["train"].labels.tolist() == [1, 0, 1, 0]
        assert splits["dev"].labels.tolist() == [1, 0, 0]


def test_accuracy_and_the_mean_of_f1_by_hand():
    # Class 0: TP 1, FN 1 -> F1 2/3. Class 1: TP 1, FP 1 -> 2/3. Class 2: 1.
    result = own.metrics(np.array([0, 1, 1, 2]), np.array([0, 0, 1, 2]))
    expected = {"score": 75.0, "accuracy": 75.0, "f1_macro": 100 * (2 / 3 + 2 / 3 + 1) / 3}
    assert result == pytest.approx(expected)


def test_what_is_wrong_is_named_with_its_place(tmp_path):
    for file, content, message in (
        ("dev.csv", "text,liked\na,yes\n", r"dev\.csv, row 1: it must have values for review, l"),
        ("dev.csv", "review,liked\na\n", r"dev\.csv, row 1: it must have values"),
        ("train.csv", "review,liked\na,yes\nb,\n", r"train\.csv, row 2: it must have values"),
        ("train.csv", "review,liked\na, b,yes\n", r"with commas in double quotes"),
        ("dev.csv", "review,liked\na,maybe\n", "the liked 'maybe' of the dev file is not in the"),
        ("dev.csv", "review,liked\n", "the dev file must have rows"),
        ("train.csv", 'review,liked\na,yes\n"b,no\n', r"train\.csv cannot be read: "),
        ("train.csv", "review,liked\na,yes\n", "must name two classes or more .* which has 1"),
        ("train.json", "[]", "needs a folder with one train and one dev file"),
    ):
        write(tmp_path)
        (tmp_path / file).write_text(content)
        with pytest.raises(UserError, match=message):
            own.load(str(tmp_path), ("review",), "liked")


def test_settings_are_checked_first_and_predictions_have_the_names_of_the_classes(tmp_path):
    given = ["run=nowhere", "task=own"]
    with pytest.raises(UserError, match=r"data\.source=null; task=own needs a folder with one tra"):
        finetune.load(given)
    write(tmp_path)
    given.append(f"data.source={tmp_path}")
    with pytest.raises(UserError, match=r"data\.text=\[.*\]; give the names of one or two"):
        finetune.load([*given, "data.text=[a,b,c]"])
    config = finetune.load([*given, "data.text=[review]", "data.label=liked"])
    problem = tasks.load_problem(config, Letters())
    assert problem.labels == ("no", "yes") and problem.examples == {"train": 4, "dev": 3}
    no, yes = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    logits = {"dev": [yes, yes, no]}
    assert problem.metrics(logits)["score"] == pytest.approx(200 / 3)
    assert problem.files(logits) == {"dev.csv": "prediction,label\nyes,yes\nyes,no\nno,no\n"}
