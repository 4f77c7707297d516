"""Atomic writing, the lock of a directory, and by which files are known again."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from experiments.support import checkpoint
from experiments.support.errors import UserError


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


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, full_disk):
    path = tmp_path / "file"
    for write in (
        partial(save_file, {"w": torch.zeros(100_000)}),
        lambda path: path.write_text("x" * 400_000),
    ):
        with full_disk(), pytest.raises(UserError) as caught:
            checkpoint.write_atomic(path, write)
        assert str(caught.value).startswith(f"{path} cannot be written: File too large; make room")
        assert list(tmp_path.iterdir()) == []


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


def test_every_bit_of_a_small_folder_counts_and_its_place_does_not(folder, tmp_path_factory):
    first = fingerprint(folder)
    other = tmp_path_factory.mktemp("elsewhere") / "moved"
    folder.rename(other)
    assert fingerprint(other) == first
    flip(other / "5.bin", 50)
    assert fingerprint(other) != first
    flip(other / "5.bin", 50)
    (other / "5.bin").rename(other / "9.bin")
    assert fingerprint(other) != first


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
