"""Atomic writing, locks, hashes, results, and tensors in one file or several."""

import json
import math
import os
from pathlib import Path

import pytest
import torch

from experiments.config.initial import check_run_files
from experiments.runs.finished import FinishedRun
from experiments.support import checkpoint, tensor_files
from experiments.support.errors import UserError
from experiments.support.results import (
    NoResult,
    read,
    read_finished,
    write_result,
)
from experiments.training import pretraining


def test_content_is_synced_before_it_gets_its_name_and_the_folder_after(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def recorded(descriptor):
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    checkpoint.write_text(tmp_path / "a", "text")
    assert synced == [tmp_path / f".a.{os.getpid()}", tmp_path]
    building, file = tmp_path / "b", tmp_path / "b" / "c" / "d"
    file.parent.mkdir(parents=True)
    file.write_text("text")
    synced.clear()
    checkpoint.publish(building, tmp_path / "e")
    assert {*synced[:-1]} == {building, file.parent, file} and synced[-1] == tmp_path


def test_one_process_holds_a_directory_and_removes_the_debris_of_the_last_one(tmp_path):
    checkpoint.write_text(tmp_path / "checkpoints" / "step-000000003", "")
    whole = {p for p in tmp_path.rglob("*") if p.is_file()}
    for debris in (".metrics.jsonl.17", "checkpoints/.step-000000006.0"):
        (tmp_path / debris).write_text("half")
    with checkpoint.exclusive(tmp_path):
        files = {p for p in tmp_path.rglob("*") if p.is_file()}
        assert files == whole | {tmp_path / ".lock"}
        written = tmp_path / ".x.json.17"  # the first process is in the middle of a write
        written.write_text("half")
        message = f"another process is running in {tmp_path}"
        with pytest.raises(UserError, match=message), checkpoint.exclusive(tmp_path):
            pass
        assert written.exists()
    with checkpoint.exclusive(tmp_path):
        assert not written.exists()


def test_no_cell_of_a_csv_file_is_a_formula():
    rows = [{"a": "=1+1", "b": "+x", "c": -0.5}, {"a": "@x", "b": "x=1", "c": None}]
    assert checkpoint.csv_text(rows) == "a,b,c\n'=1+1,'+x,-0.5\n'@x,x=1,\n"


@pytest.fixture
def folder(tmp_path):
    for number in range(8):
        (tmp_path / f"{number}.bin").write_bytes(bytes([number]) * 100)
    return tmp_path


def fingerprint(folder):
    files = sorted(path for path in folder.iterdir())
    return checkpoint.fingerprint(folder, [(path.name, path.stat().st_size) for path in files])


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_every_bit_of_a_small_folder_counts_and_every_name(folder):
    first = fingerprint(folder)
    flip(folder / "5.bin", 50)
    assert fingerprint(folder) != first
    flip(folder / "5.bin", 50)
    (folder / "5.bin").rename(folder / "9.bin")
    assert fingerprint(folder) != first


def test_of_a_large_folder_the_ends_of_some_files_count(folder, monkeypatch):
    monkeypatch.setattr(checkpoint, "LIMIT", 500)
    monkeypatch.setattr(checkpoint, "SAMPLED", 4)
    monkeypatch.setattr(checkpoint, "END", 10)
    first = fingerprint(folder)
    for name, position, counts in (
        ("2.bin", 0, True), ("2.bin", 99, True), ("2.bin", 50, False), ("3.bin", 0, False),
    ):  # fmt: skip
        flip(folder / name, position)
        assert (fingerprint(folder) != first) is counts
        flip(folder / name, position)
    with (folder / "3.bin").open("ab") as file:
        file.write(b"x")
    assert fingerprint(folder) != first  # all sizes do


def test_a_file_is_read_once_as_long_as_it_is_left_alone(tmp_path, monkeypatch):
    path, read, sha256 = tmp_path / "weights", [], checkpoint.sha256
    path.write_bytes(b"a")
    monkeypatch.setattr(checkpoint, "sha256", lambda path: read.append(path) or sha256(path))
    first = checkpoint.file_hash(path)
    # It may be written again any moment.
    assert checkpoint.file_hash(path) == first and len(read) == 2
    monkeypatch.setattr(checkpoint, "_SETTLED", 0)
    assert [checkpoint.file_hash(path) for _ in range(3)] == [first] * 3 and len(read) == 3
    (tmp_path / "new").write_bytes(b"b")
    (tmp_path / "new").replace(path)
    assert checkpoint.file_hash(path) != first and len(read) == 4


WHOLE = {"schema": 1, "config_hash": "0", "metrics": {}}


def test_why_there_is_no_result(tmp_path):
    for number, (file, content, why) in enumerate((
        ("x", "", "missing"),
        ("metrics.jsonl", "", "unfinished"),
        ("result.json", '{"sche', "damaged"),
        ("result.json", {"config_hash": "1"}, "other"),
        ("result.json", {"schema": 2}, "other"),
        ("result.json", {"metrics": {"val_loss": None}}, "diverged"),
    )):  # fmt: skip
        folder = tmp_path / str(number)
        folder.mkdir()
        if isinstance(content, dict):
            content = json.dumps(WHOLE | content)
        (folder / file).write_text(content)
        with pytest.raises(NoResult) as caught:
            read(folder, "0")
        assert caught.value.why == why and "\n" not in str(caught.value)
        if why in ("damaged", "other"):
            with pytest.raises(NoResult):
                read_finished(folder, "0")
        else:
            assert read_finished(folder, "0") is None


def test_a_changed_digit_is_noticed_and_a_result_of_an_earlier_version_is_read(tmp_path):
    content = {"config_hash": "0", "metrics": {"val_loss": 1.25}, "by_number": {1: (2, math.nan)}}
    write_result(tmp_path, content)
    assert read(tmp_path) == read_finished(tmp_path, "0")
    path = tmp_path / "result.json"
    text = path.read_text()
    path.write_text(text.replace("1.25", "1.24"))
    with pytest.raises(NoResult, match=r"damaged \(its content does not fit its sha256\)") as error:
        read(tmp_path)
    assert error.value.why == "damaged"
    path.write_text("".join(line for line in text.splitlines() if '"sha256"' not in line))
    assert read(tmp_path)["metrics"] == {"val_loss": 1.25}


CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch):
    """`small(n)`: from now on no file has more than n bytes of tensors."""
    return lambda size: monkeypatch.setattr(tensor_files, "LARGEST", size)


def test_tensors_come_back_from_several_files(tmp_path, small):
    path = tmp_path / "model.safetensors"
    tensors = {"a": torch.arange(6.0).view(3, 2).t(), "b": torch.ones(1000), "c": torch.ones(())}
    tensors["d"] = torch.zeros(3, dtype=torch.bool)
    assert tensor_files.save(tensors, path) == [path.name]
    assert tensor_files.files(path) == [path]
    small(100)
    names = tensor_files.save(tensors, path)  # one tensor alone is larger
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert names == ["model.safetensors.index.json", *shards]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(names)  # the one file is gone
    assert [p.name for p in tensor_files.files(path)] == names
    found, shapes = tensor_files.load(path, CPU), tensor_files.load(path, torch.device("meta"))
    assert found.keys() == shapes.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor)
        assert shapes[name].is_meta and shapes[name].shape == tensor.shape
    index = json.loads((tmp_path / names[0]).read_text())
    assert index["metadata"] == {"total_size": 24 + 4000 + 4 + 3}
    where = {"a": shards[1], "b": shards[0], "c": shards[1], "d": shards[1]}
    assert index["weight_map"] == where
    small(10**6)
    assert tensor_files.save(tensors, path) == [path.name]
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_in_several_files_is_read_as_one(tiny, tmp_path, small):
    options = ["method=s_ste", "train.steps=2", "train.warmup_steps=0", "train.ema=0.5"]
    one, several = (tiny(*options, f"runs={tmp_path / name}") for name in ("one", "several"))
    for config, size in ((one, 10**9), (several, 4000)):
        small(size)
        pretraining.run(config, lambda line: None)
    first, second = (FinishedRun.open(config.directory()) for config in (one, several))
    files = second.result["files"]
    for name in ("model", "latent", "ema"):
        assert f"{name}.safetensors.index.json" in files and f"{name}.safetensors" not in files
    for opened in (FinishedRun.model, lambda run: run.model("dense"), FinishedRun.averaged):
        found, expected = (opened(run).state_dict() for run in (second, first))
        assert all(torch.equal(found[key], value) for key, value in expected.items())
    shards = [name for name in files if name.startswith("model-0000")]
    assert pretraining.finished(several) is not None
    (second.directory / shards[-1]).unlink()
    with pytest.raises(UserError, match=f"{shards[-1]} is missing; make the run again"):
        check_run_files(second.directory, second.result, "model.safetensors")
    assert pretraining.finished(several) is None
