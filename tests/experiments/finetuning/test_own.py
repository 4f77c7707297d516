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
TESTS = [("a", None), ("b", None)]


def rows(split, pairs):
    named = [{"review": text, "liked": label} for text, label in pairs]
    return [{"review": row["review"]} for row in named] if split == "test" else named


def write(folder, ending, **splits):
    folder.mkdir(parents=True, exist_ok=True)
    for split, pairs in splits.items():
        table, path = rows(split, pairs), folder / f"{split}{ending}"
        if ending == ".csv":
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, [*table[0]])
                writer.writeheader()
                writer.writerows(table)
        elif ending == ".json":
            path.write_text(json.dumps(table), encoding="utf-8")
        else:
            path.write_text("".join(json.dumps(row) + "\n\n" for row in table), encoding="utf-8")
    return folder


@pytest.mark.parametrize("ending", own.ENDINGS)
def test_all_formats_give_the_same(tmp_path, ending):
    folder = write(tmp_path, ending, train=TRAIN, dev=DEV, test=TESTS)
    splits, tests, classes = own.load(str(folder), ("review",), "liked")
    assert classes == ("no", "yes")
    assert splits["train"].texts == [(text,) for text, _ in TRAIN]
    assert splits["train"].labels.tolist() == [1, 0, 1, 0]
    assert splits["dev"].labels.tolist() == [1, 0, 0]
    assert tests == {"test": [("a",), ("b",)]}


def test_accuracy_and_the_mean_of_f1_by_hand():
    # Class 0: TP 1, FN 1 -> F1 2/3. Class 1: TP 1, FP 1 -> 2/3. Class 2: 1.
    result = own.metrics(np.array([0, 1, 1, 2]), np.array([0, 0, 1, 2]))
    expected = {"score": 75.0, "accuracy": 75.0, "f1_macro": 100 * (2 / 3 + 2 / 3 + 1) / 3}
    assert result == pytest.approx(expected)


def test_what_is_wrong_is_named_with_its_place(tmp_path):
    for file, content, message in (
        ("dev.csv", "text,liked\na,yes\n", r"dev\.csv, line 2: no 'review' among text, liked; set"),
        ("dev.csv", "review,liked\na,maybe\n", r"dev\.csv, line 2: the liked 'maybe' is not in tr"),
        ("dev.csv", "review,liked\n", r"dev\.csv has no rows"),
        ("dev.csv", "review,liked\na\n", r"dev\.csv, line 2: no 'liked' among review, liked"),
        ("train.csv", "review,liked\na,yes\nb,\n", r"train\.csv, line 3: the liked is empty"),
        ("train.csv", "review,liked\na, b,yes\n", r"train\.csv, line 2 has more values than col"),
        ("train.csv", 'review,liked\na,yes\n"b,no\n', r"train\.csv cannot be read: "),
        ("train.csv", "review,liked\na,yes\n", r"all rows have the liked 'yes'; it takes two cl"),
        ("train.json", "[]", r"has train\.csv and train\.json; keep one"),
    ):
        write(tmp_path, ".csv", train=TRAIN, dev=DEV)
        (tmp_path / file).write_text(content)
        with pytest.raises(UserError, match=message):
            own.load(str(tmp_path), ("review",), "liked")


def test_settings_and_files_are_asked_for_before_any_work(tmp_path):
    given = ["run=nowhere", "task=own"]
    with pytest.raises(UserError, match=r"data\.source=null; task=own needs a folder with train"):
        finetune.load(given)
    write(tmp_path, ".csv", train=TRAIN)
    given.append(f"data.source={tmp_path}")
    with pytest.raises(UserError, match=r"has no dev\.csv: each split is one file, out of \.csv"):
        finetune.load(given)
    write(tmp_path, ".csv", dev=DEV)
    with pytest.raises(UserError, match=r"data\.text=\[.*\]; give the names of one or two"):
        finetune.load([*given, "data.text=[a,b,c]"])
    config = finetune.load([*given, "data.text=[review]", "data.label=liked"])
    assert config.columns.text == ("review",) and config.recipe.epochs == 3


def test_predictions_have_the_names_of_the_classes(tmp_path):
    write(tmp_path, ".csv", train=TRAIN, dev=DEV, test=TESTS)
    named = [f"data.source={tmp_path}", "data.text=[review]", "data.label=liked"]
    config = finetune.load(["run=nowhere", "task=own", *named])
    problem = tasks.load_problem(config, Letters())
    assert problem.labels == ("no", "yes") and problem.examples == {"train": 4, "dev": 3}
    no, yes = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    logits = {"dev": [yes, yes, no], "test": [no, yes]}
    assert problem.metrics({"dev": logits["dev"]})["score"] == pytest.approx(200 / 3)
    assert problem.files(logits) == {
        "dev.csv": "prediction,label\nyes,yes\nyes,no\nno,no\n",
        "test.csv": "prediction\nno\nyes\n",
    }
