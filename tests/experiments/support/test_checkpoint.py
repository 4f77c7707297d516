"""Atomic writing, and the lock of a directory."""

import os
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


@pytest.mark.parametrize("kind", ["safetensors", "text"])
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, full_disk, kind):
    def write(path):
        if kind == "safetensors":
            save_file({"w": torch.zeros(100_000)}, path)
        else:
            path.write_text("x" * 400_000)

    path = tmp_path / "file"
    with full_disk(), pytest.raises(UserError) as caught:
        checkpoint.write_atomic(path, write)
    assert str(caught.value).startswith(f"{path} cannot be written: File too large; make room")
    assert list(tmp_path.iterdir()) == []


def test_no_cell_of_a_csv_file_is_a_formula():
    rows = [{"a": "=1+1", "b": "+x", "c": -0.5}, {"a": "@x", "b": "x=1", "c": None}]
    assert checkpoint.csv_text(rows) == "a,b,c\n'=1+1,'+x,-0.5\n'@x,x=1,\n"
