"""The one reader of `result.json`: what it says where there is no result to use."""

import json
import math

import pytest

from experiments.support.results import (
    NoResult,
    read,
    read_finished,
    read_training,
    runs_below,
    write_result,
)

SHAPE = {"metrics": dict}
LOST = {"metrics": {"val_loss": None}}
WHOLE = {"schema": 1, "config_hash": "0", "metrics": {}}


@pytest.mark.parametrize(
    ("files", "why", "message"),
    [
        ({"sparse24.json": "{}"}, "missing", "is an exported model; give the run"),
        ({}, "missing", r"holds no finished run \(result\.json is missing\); run it to its end"),
        ({"metrics.jsonl": ""}, "unfinished", r"run \(it was begun and has not ended\); run it to"),
        (
            {"result.json": '{"sche'},
            "damaged",
            r"result\.json is damaged \(.*\); remove it",
        ),
        ({"result.json": b"\xff"}, "damaged", r"result\.json is damaged \("),
        ({"result.json": "[]"}, "damaged", r"is damaged \(no result in it\)"),
        ({"result.json": {"schema": 1}}, "damaged", r"\(no config_hash in it\)"),
        ({"result.json": {**WHOLE, "metrics": 1}}, "damaged", r"\(no metrics in it\)"),
        *(
            ({"result.json": WHOLE | wrong}, "damaged", rf"\(no {key} in it\)")
            for key, wrong in {
                "metrics.val_loss": {"metrics": {"val_loss": "abc"}},
                "tokens": {"tokens": -5},
                "steps": {"steps": 2.5},
            }.items()
        ),
        (
            {"result.json": {**WHOLE, "config_hash": "1"}},
            "other",
            "is of another config",
        ),
        (
            {"result.json": {**WHOLE, "schema": 2}},
            "other",
            r"has schema 2, this .* reads 1; read it",
        ),
        (
            {"result.json": WHOLE | LOST},
            "diverged",
            r"diverged \(its val_loss is not finite\); train",
        ),
        (
            {"result.json": WHOLE | LOST | {"diverged": "why"}},
            "diverged",
            r"diverged \(why\); train",
        ),
    ],
)
def test_why_there_is_no_result(tmp_path, files, why, message):
    for name, content in files.items():
        text = json.dumps(content) if isinstance(content, dict) else content
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(NoResult, match=message) as caught:
        read(tmp_path, SHAPE, "0")
    assert caught.value.why == why and "\n" not in str(caught.value)
    if why in ("damaged", "other"):
        with pytest.raises(NoResult, match=message):
            read_finished(tmp_path, "0", SHAPE)
    else:
        assert read_finished(tmp_path, "0", SHAPE) is None


def test_a_path_that_does_not_exist_is_told_as_such(tmp_path):
    with pytest.raises(
        NoResult, match=r"nowhere holds no finished run \(there is no such folder\)"
    ):
        read(tmp_path / "nowhere", SHAPE)


def test_what_was_written_is_read(tmp_path):
    written = write_result(tmp_path, {"config_hash": "0", "metrics": {"val_loss": 1.0}})
    assert read(tmp_path, SHAPE) == read_finished(tmp_path, "0", SHAPE) == written
    with pytest.raises(NoResult, match=r"no config in it"):
        read_training(tmp_path)


def test_a_changed_digit_is_noticed_and_a_result_of_an_earlier_version_is_read(tmp_path):
    content = {"config_hash": "0", "metrics": {"val_loss": 1.25}, "by_number": {1: (2, math.nan)}}
    write_result(tmp_path, content)
    path = tmp_path / "result.json"
    text = path.read_text()
    path.write_text(text.replace("1.25", "1.24"))
    with pytest.raises(NoResult, match=r"damaged \(its content does not fit its sha256\)") as error:
        read(tmp_path, SHAPE)
    assert error.value.why == "damaged"
    path.write_text("".join(line for line in text.splitlines() if '"sha256"' not in line))
    assert read(tmp_path, SHAPE)["metrics"] == {"val_loss": 1.25}


def test_a_file_holds_no_run(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NoResult, match="file holds no finished run"):
        read(tmp_path / "file", SHAPE)


def test_runs_below_leave_out_what_is_no_training(tmp_path):
    run = {"config_hash": "0", "config": {"method": {"name": "ste"}}, "seed": 3}
    write_result(tmp_path / "a/seed3", {**run, "metrics": {"val_loss": None}})
    write_result(tmp_path / "a/bench", {"config_hash": "0", "config": {"method": "ste"}})
    write_result(tmp_path / "a/tuned", {**run, "metrics": {"score": 1.0}})
    assert runs_below(tmp_path) == ["a/seed3  ste, seed 3, val_loss not finite"]
    with pytest.raises(NoResult, match="holds no finished run itself, but 1 below") as caught:
        read_training(tmp_path)
    assert caught.value.choices == ["a/seed3  ste, seed 3, val_loss not finite"]
