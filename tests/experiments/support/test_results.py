"""The one reader of `result.json`: what it says where there is no result to use."""

import json
import math

import pytest

from experiments.support.results import (
    NoResult,
    read,
    read_finished,
    read_training,
    write_result,
)

LOST = {"metrics": {"val_loss": None}}
WHOLE = {"schema": 1, "config_hash": "0", "metrics": {}}


def test_why_there_is_no_result(tmp_path):
    for number, (file, content, why, message) in enumerate([
        ("x", "", "missing", r"no finished run \(result\.json is missing\); run it to its end"),
        ("metrics.jsonl", "", "unfinished", r"run \(it was begun and has not ended\); run it to"),
        ("result.json", '{"sche', "damaged", r"result\.json is damaged \(.*\); remove it"),
        ("result.json", {"config_hash": "1"}, "other", "is of another config"),
        ("result.json", {"schema": 2}, "other", r"has schema 2, this .* reads 1; read it"),
        ("result.json", LOST, "diverged", r"diverged \(its val_loss is not finite\); train"),
        ("result.json", LOST | {"diverged": "why"}, "diverged", r"diverged \(why\); train"),
    ]):  # fmt: skip
        folder = tmp_path / str(number)
        folder.mkdir()
        if isinstance(content, dict):
            content = json.dumps(WHOLE | content)
        (folder / file).write_text(content)
        with pytest.raises(NoResult, match=message) as caught:
            read(folder, "0")
        assert caught.value.why == why and "\n" not in str(caught.value)
        if why in ("damaged", "other"):
            with pytest.raises(NoResult, match=message):
                read_finished(folder, "0")
        else:
            assert read_finished(folder, "0") is None
    with pytest.raises(NoResult, match=r"holds no finished run \(there is no such folder\)"):
        read(tmp_path / "nowhere")


def test_a_changed_digit_is_noticed_and_a_result_of_an_earlier_version_is_read(tmp_path):
    content = {"config_hash": "0", "metrics": {"val_loss": 1.25}, "by_number": {1: (2, math.nan)}}
    write_result(tmp_path, content)
    assert read(tmp_path) == read_finished(tmp_path, "0")
    with pytest.raises(NoResult, match=r"is not the result of a training"):
        read_training(tmp_path)
    path = tmp_path / "result.json"
    text = path.read_text()
    path.write_text(text.replace("1.25", "1.24"))
    with pytest.raises(NoResult, match=r"damaged \(its content does not fit its sha256\)") as error:
        read(tmp_path)
    assert error.value.why == "damaged"
    path.write_text("".join(line for line in text.splitlines() if '"sha256"' not in line))
    assert read(tmp_path)["metrics"] == {"val_loss": 1.25}
