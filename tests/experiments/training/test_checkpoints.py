"""Checkpoints of one process and of several ranks: what is kept, and what damage leads to."""

import pickle

import pytest
import torch
from safetensors.torch import save_file

from experiments.support.errors import UserError
from experiments.training import checkpoints
from experiments.training.checkpoints import STATE, found
from experiments.training.distributed import World
from tests.experiments.conftest import quiet

ALONE = World(0, 1, torch.device("cpu"))


def save(folder, step, state):
    checkpoints.finish(folder, step, checkpoints.write(folder, step, 0, {}, state))
    return folder / f"step-{step:09d}"


def save_sharded(folder, step):
    w = torch.arange(14.0).view(7, 2)
    state = {"model": {"w": {checkpoints._NOTE: "/model/w", "shape": (7, 2)}}, "step": step}
    files = checkpoints.write(folder, step, 0, {"/model/w": w[:4]}, state)
    files |= checkpoints.write(folder, step, 1, {"/model/w": w[4:].clone()}, {})
    checkpoints.finish(folder, step, files)
    return folder / f"step-{step:09d}"


def heard(folder):
    messages = []
    state = checkpoints.load_latest(folder, messages.append, ALONE)
    return checkpoints.placed(state, None), messages


def test_the_newest_is_loaded_and_two_are_kept(tmp_path):
    for step in (5, 10, 15):
        save(tmp_path, step, {"step": step, "w": torch.tensor([1.5])})
    state, messages = heard(tmp_path)
    assert state["step"] == 15 and torch.equal(state["w"], torch.tensor([1.5]))
    assert messages == []
    assert [path.name for path in found(tmp_path)] == ["step-000000010", "step-000000015"]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("file", [STATE, "index.json", "rank-1.safetensors"])
def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_used(tmp_path, file):
    save_sharded(tmp_path, 5)
    path = save_sharded(tmp_path, 10)
    content = (path / file).read_bytes()
    bit = content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
    for damage in (None, content[: len(content) // 2], bit, b"{}", b"[]", b"\xff\xfe"):
        if damage is None:
            (path / file).unlink()
        else:
            (path / file).write_bytes(damage)
        if damage == bit and file == "index.json":
            continue  # the hash of a file, or its name
        state, [message] = heard(tmp_path)
        assert state["step"] == 5
        assert torch.equal(state["model"]["w"], torch.arange(14.0).view(7, 2))
        assert message.startswith(f"checkpoint {path} is damaged (")
        assert message.endswith("; step-000000005, the one before it, is used")
    for step in (10, 15, 20):  # the damaged one is replaced, and later removed
        save(tmp_path, step, {"step": step})
        assert heard(tmp_path) == ({"step": step}, [])
    assert len(list(tmp_path.iterdir())) == 2


def test_after_damage_the_new_ones_are_kept_and_the_damaged_ones_go(tmp_path):
    """A run that begins anew before damaged checkpoints must not take them for its newest."""
    for step in (6, 9):
        (save(tmp_path, step, {"step": step}) / STATE).write_bytes(b"")
    state, messages = heard(tmp_path)
    assert state is None and len(messages) == 2
    assert all(m.endswith("; none is whole, so the run begins anew") for m in messages)
    for step in (1, 2):
        save(tmp_path, step, {"step": step})
        assert heard(tmp_path) == ({"step": step}, [])
    assert {path.name for path in tmp_path.iterdir()} == {"step-000000001", "step-000000002"}
    (tmp_path / "step-000000002" / STATE).write_bytes(b"")
    assert heard(tmp_path)[0] == {"step": 1}


def test_an_intact_checkpoint_is_never_removed_before_the_same_step_is_written(tmp_path):
    """A run that resumes and stops at once saves the step that it resumed from."""
    path = save(tmp_path, 3, {"step": 3})
    inode = path.stat().st_ino
    save(tmp_path, 3, {"step": 3})
    assert path.stat().st_ino == inode and [*tmp_path.iterdir()] == [path]
    (path / STATE).write_bytes(b"")  # a damaged one is replaced
    save(tmp_path, 3, {"step": 3})
    assert heard(tmp_path) == ({"step": 3}, []) and [*tmp_path.iterdir()] == [path]


def test_nothing_is_unpickled(tmp_path, capsys):
    """A file that would run code on a plain `torch.load` is refused."""

    class Evil:
        def __reduce__(self):
            return (print, ("executed",))

    save(tmp_path, 1, {"x": Evil()})
    with pytest.raises(pickle.UnpicklingError):
        heard(tmp_path)
    assert capsys.readouterr().out == ""


def test_rows_are_read_by_any_number_of_ranks(tmp_path):
    """Rows of a tensor whose first dim no number of ranks divides."""
    whole = torch.arange(14.0).view(7, 2)
    files = tuple(tmp_path / f"{rank}.safetensors" for rank in range(2))
    for file, part in zip(files, (whole[:4], whole[4:]), strict=True):
        save_file({"w": part.contiguous()}, file)
    rows = checkpoints.Rows(files, "w", (7, 2))
    assert torch.equal(rows.read(), whole)
    for ranks in (1, 2, 3, 5, 8):
        chunk = -(-7 // ranks)
        read = [rows.read(min(7, i * chunk), min(7, (i + 1) * chunk)) for i in range(ranks)]
        assert torch.equal(torch.cat(read), whole)


def test_a_folder_that_ranks_do_not_share_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "PATIENCE", 0.0)
    with pytest.raises(UserError, match=r": rank-1\.safetensors of step 3, .* all nodes share$"):
        checkpoints.finish(tmp_path, 3, {"rank-1.safetensors": {}})
    monkeypatch.setattr(World, "all_gather", lambda *_: [["step-000000003"], []])
    with pytest.raises(UserError, match="rank 0 does not see step-000000003, which rank 0 sees"):
        checkpoints.load_latest(tmp_path, quiet, World(1, 2, torch.device("cpu")))
