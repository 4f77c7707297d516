"""Atomic writing and damage."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from experiments.support import checkpoint
from experiments.support.errors import UserError


def heard(directory):
    messages = []
    return checkpoint.load_latest(checkpoint.found(directory), messages.append), messages


def test_the_newest_is_loaded_and_two_are_kept(tmp_path):
    for step in (5, 10, 15):
        checkpoint.save(tmp_path, step, {"step": step, "w": torch.tensor([1.5])})
    state, messages = heard(tmp_path)
    assert state["step"] == 15 and torch.equal(state["w"], torch.tensor([1.5]))
    assert messages == []
    kept = sorted(p.name for p in tmp_path.glob("*.pt"))
    assert kept == ["step-000000010.pt", "step-000000015.pt"]
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("damage", ["half", "bit", "sidecar", b"{}", b"[]", b"\xff\xfe"])
def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_used(tmp_path, damage):
    checkpoint.save(tmp_path, 5, {"step": 5})
    path = checkpoint.save(tmp_path, 10, {"step": 10})
    content = path.read_bytes()
    if damage == "half":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "bit":
        path.write_bytes(content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
    elif damage == "sidecar":
        path.with_suffix(".json").unlink()
        path.with_suffix(".json").mkdir()
    else:
        path.with_suffix(".json").write_bytes(damage)
    state, messages = heard(tmp_path)
    assert state["step"] == 5
    assert len(messages) == 1 and str(path) in messages[0] and "damaged" in messages[0]
    assert messages[0].endswith("; step-000000005.pt, the one before it, is used")
    for step in (10, 15, 20):  # the damaged one is replaced, and later removed
        checkpoint.save(tmp_path, step, {"step": step})
        assert heard(tmp_path) == ({"step": step}, [])
    assert len(list(tmp_path.iterdir())) == 4


def test_after_damage_the_new_ones_are_kept_and_the_damaged_ones_go(tmp_path):
    """A run that begins anew before damaged checkpoints must not take them for its newest."""
    for step in (6, 9):
        path = checkpoint.save(tmp_path, step, {"step": step})
        path.write_bytes(path.read_bytes()[:-1])
    state, messages = heard(tmp_path)
    assert state is None and len(messages) == 2
    assert all(m.endswith("; none is whole, so the run begins anew") for m in messages)
    for step in (1, 2):
        checkpoint.save(tmp_path, step, {"step": step})
        state, messages = heard(tmp_path)
        assert (state, messages) == ({"step": step}, [])
    names = {f"step-00000000{step}.{ending}" for step in (1, 2) for ending in ("pt", "json")}
    assert {p.name for p in tmp_path.iterdir()} == names
    (tmp_path / "step-000000002.pt").write_bytes(b"")
    assert heard(tmp_path)[0] == {"step": 1}


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "x.json"
    checkpoint.write_json(path, {"old": 1})

    def fail(temporary):
        temporary.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoint.write_atomic(path, fail)
    assert path.read_text() == '{\n  "old": 1\n}\n'
    assert list(tmp_path.iterdir()) == [path]


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


def test_what_a_killed_process_left_of_a_file_is_removed_when_it_is_written_again(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    names = [".t.md.1", f".t.md.{ended.pid}", f".other.md.{ended.pid}", ".t.md.99999999999"]
    for name in names:
        (tmp_path / name).write_text("half")
    checkpoint.write_text(tmp_path / "t.md", "whole")
    assert {path.name for path in tmp_path.iterdir()} == {names[0], names[2], "t.md"}


def test_one_process_holds_a_directory_and_removes_the_debris_of_the_last_one(tmp_path):
    checkpoint.save(tmp_path / "checkpoints", 3, {"step": 3})
    whole = {p for p in tmp_path.rglob("*") if p.is_file()}
    for debris in (".metrics.jsonl.17", "checkpoints/.step-000000006.pt.17"):
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


def test_a_look_at_a_lock_turns_nobody_away(tmp_path):
    ended = threading.Event()

    def look():
        while not ended.is_set():
            checkpoint.is_locked(tmp_path)

    others = [threading.Thread(target=look) for _ in range(2)]
    for other in others:
        other.start()
    try:
        for _ in range(200):
            with checkpoint.exclusive(tmp_path):
                assert checkpoint.is_locked(tmp_path)
    finally:
        ended.set()
        for other in others:
            other.join()
    assert not checkpoint.is_locked(tmp_path)


def test_nothing_is_unpickled(tmp_path, capsys):
    """A file that would run code on a plain `torch.load` is refused."""

    class Evil:
        def __reduce__(self):
            return (print, ("executed",))

    checkpoint.save(tmp_path, 1, {"x": Evil()})
    state, [message] = heard(tmp_path)
    assert state is None and "it is no file of tensors and plain values" in message
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"PK\x03\x04 no zip", None])
def test_a_file_that_is_no_checkpoint_is_passed_over(tmp_path, content):
    """Even where its checksum is right."""
    checkpoint.save(tmp_path, 1, {"step": 1})
    path = tmp_path / "step-000000002.pt"
    torch.save([1, 2], path) if content is None else path.write_bytes(content)
    content = path.read_bytes()
    record = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    path.with_suffix(".json").write_text(json.dumps(record))
    state, [message] = heard(tmp_path)
    assert state == {"step": 1} and str(path) in message


STATE = {"w": torch.zeros(100_000)}


@pytest.mark.parametrize("kind", ["checkpoint", "safetensors", "text"])
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, full_disk, kind):
    def write(path):
        if kind == "safetensors":
            save_file(STATE, path)
        else:
            path.write_text("x" * 400_000)

    checkpoint.save(tmp_path, 1, {"step": 1})
    before = set(tmp_path.iterdir())
    path = tmp_path / ("step-000000002.pt" if kind == "checkpoint" else "file")
    with full_disk(), pytest.raises(UserError) as caught:
        if kind == "checkpoint":
            checkpoint.save(tmp_path, 2, STATE)
        else:
            checkpoint.write_atomic(path, write)
    assert str(caught.value).startswith(f"{path} cannot be written: File too large; make room")
    assert set(tmp_path.iterdir()) == before
    assert heard(tmp_path) == ({"step": 1}, [])


def test_no_cell_of_a_csv_file_is_a_formula():
    rows = [{"a": "=1+1", "b": "+x", "c": -0.5}, {"a": "@x", "b": "x=1", "c": None}]
    assert checkpoint.csv_text(rows) == "a,b,c\n'=1+1,'+x,-0.5\n'@x,x=1,\n"
