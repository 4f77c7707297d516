"""Tests of what smoke tiers are measured on: in the real formats, deterministic, and as asked."""

import filecmp

import pytest

from experiments.finetuning import glue, squad
from reproduce.execute import smoke_tasks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return smoke_tasks.write(tmp_path_factory.mktemp("a") / "tasks")


def test_the_real_loaders_read_balanced_tasks(folder):
    for task in ("sst2", "rte"):
        splits = glue.load(task, str(folder))
        for split, size in smoke_tasks.SIZES.items():
            assert len(splits[split]) == size
            assert splits[split].labels.mean() == 0.5
        texts = {split: set(examples.texts) for split, examples in splits.items()}
        assert len(texts["train"] & texts["dev"]) < 5  # other modules


def test_the_answer_is_where_squad_says(folder):
    splits = squad.load(str(folder))
    assert len(splits["train"]) == smoke_tasks.SIZES["train"]
    for question in splits["dev"]:
        [(text, start)] = question.answers
        assert question.context[start - 4 :].startswith(f"def {text}(")


def test_twice_the_same_and_never_written_over(folder, tmp_path):
    again = smoke_tasks.write(tmp_path / "tasks")
    names = ["SST-2/train.tsv", "RTE/dev.tsv", "train-v1.1.json", "text.txt", "lm_eval/dev.jsonl"]
    assert filecmp.cmpfiles(folder, again, names, shallow=False)[0] == names
    (again / "text.txt").write_text("mine")
    assert smoke_tasks.write(again) == again
    assert (again / "text.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["tasks"]
