"""Checkpoints of one process and of several ranks: what is kept, what damage leads to, and how they
are written while the training goes on. Messages between ranks."""

import errno
import multiprocessing
import os
import pickle
import threading
import time

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file

from experiments.config.run import load
from experiments.support import checkpoint
from experiments.support.errors import UserError
from experiments.training import checkpoints, distributed, pretraining
from experiments.training.checkpoints import STATE, Saver
from experiments.training.distributed import World, world
from experiments.training.tracking import read_metrics
from tests.experiments.conftest import SHORT, TINY_MODEL, quiet, untimed, words_of

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


def test_damage_that_another_rank_finds_counts(tmp_path, monkeypatch):
    save(tmp_path, 5, {"step": 5})
    found = "rank-1.safetensors is missing"
    gathered = lambda _, own: [own, found if own is None else own]  # noqa: E731
    monkeypatch.setattr(World, "all_gather", gathered)
    state, [message] = heard(tmp_path)
    assert state is None and found in message


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


@pytest.fixture
def gate(monkeypatch):
    """An event that the writing of a file waits for."""
    opened, write = threading.Event(), checkpoints.write

    def waiting(*arguments):
        assert opened.wait(60)
        return write(*arguments)

    monkeypatch.setattr(checkpoints, "write", waiting)
    yield opened
    opened.set()


def test_what_changes_after_the_call_is_not_in_the_file(tmp_path, gate):
    weight, lines = torch.arange(1000.0), ["a"]
    module = torch.nn.Linear(2, 2)
    state = {"a": weight, "tied": weight, "log": lines, "model": module.state_dict(), "step": 1}
    saver = Saver(tmp_path, ALONE)
    saver.save(1, state)
    first = module.weight.detach().clone()
    weight.zero_(), lines.append("b"), module.weight.data.zero_()
    saver.poll()
    assert checkpoints.found(tmp_path) == []  # it waits for the gate, the training does not
    gate.set()
    saver.wait()
    found = checkpoints.load_latest(tmp_path, quiet, ALONE)
    assert torch.equal(found["a"], torch.arange(1000.0)) and found["log"] == ["a"]
    assert found["a"].data_ptr() == found["tied"].data_ptr()
    assert torch.equal(found["model"]["weight"], first)
    assert found["model"]._metadata == state["model"]._metadata
    saver.close()


def test_an_error_of_the_writer_is_that_of_the_next_step(tmp_path, full_disk, gate, monkeypatch):
    """It is told to all ranks, since one that raised it alone would leave the others waiting."""

    def stale(path):
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    saver = Saver(tmp_path, ALONE)
    with full_disk():
        saver.save(1, {"w": torch.zeros(100_000)})
        saver.poll()
        gate.set()
        saver.close()
    with pytest.raises(UserError, match=r"state\.pt cannot be written: File too large"):
        saver.poll()
    assert list(tmp_path.iterdir()) == []
    saver = Saver(tmp_path, ALONE)
    monkeypatch.setattr(checkpoint, "sha256", stale)
    saver.save(1, {"w": torch.zeros(4)})
    with pytest.raises(UserError, match=r"state\.pt cannot be written: Stale file handle; fix"):
        saver.wait()
    saver.close()


def get_stuck():
    """Let the writing of the checkpoint of step 6 never end on this rank."""
    write_atomic = checkpoint.write_atomic

    def half(path, write):
        if "step-000000006" in str(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_name(f".{path.name}.{os.getpid()}").write_bytes(b"half")
            time.sleep(600)
        write_atomic(path, write)

    checkpoint.write_atomic = half


def work(rank, store, stuck, configs, folder):
    """Train `configs`; `stuck`: until killed."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    with world("cpu"):
        if stuck and rank == 1:
            get_stuck()
        for config in configs:
            with (folder / "said").open("a") as said:
                pretraining.run(config, lambda line: print(line, file=said))
        torch.distributed.barrier()
    os._exit(0)  # gloo's threads outlive the group and abort an interpreter that ends


@pytest.fixture(scope="module")
def killed(corpus_dir, tmp_path_factory):
    """(folder, a run on two ranks that was killed while it wrote a checkpoint and then resumed, one
    in peace, what the killed one left)."""
    folder = tmp_path_factory.mktemp("killed")
    more = ["method=fst", "method.refresh_every=4", "impl.shard=fsdp2"]
    war, peace = (
        load([*TINY_MODEL, *SHORT, *words_of(corpus_dir), *more, f"runs={folder / name}"])
        for name in ("war", "peace")
    )
    modules = ["experiments.training.pretraining", "torch.distributed.fsdp", "hydra", __name__]
    multiprocessing.set_forkserver_preload(modules)

    def start(name, stuck, *configs):
        store = (folder / name).as_uri()
        return mp.start_processes(
            work, (store, stuck, configs, folder), 2, join=False, start_method="forkserver"
        )  # fmt: skip

    running = start("store1", True, war)
    deadline = time.monotonic() + 120
    metrics = war.directory() / "metrics.jsonl"
    # The steps go on while the file is half written, up to the next checkpoint, which waits for it.
    while not any(record["step"] == 8 for record in read_metrics(metrics)):
        assert time.monotonic() < deadline and all(p.is_alive() for p in running.processes)
        time.sleep(0.01)
    for process in running.processes:
        process.kill()
        process.join()
    left = sorted(p.name for p in (war.directory() / "checkpoints").iterdir())
    start("store2", False, war, peace).join()
    return folder, war, peace, left


def test_a_kill_in_the_middle_of_writing_leaves_the_checkpoint_before(killed):
    folder, war, peace, left = killed
    assert [n for n in left if n[0] != "."] == ["step-000000003"]
    assert any(name.startswith(".step-000000006") for name in left)
    assert "resumed at step 3 of 12" in (folder / "said").read_text().splitlines()

    assert untimed(war) == untimed(peace)
    found, weights = (load_file(c.directory() / "model.safetensors") for c in (war, peace))
    torch.testing.assert_close(found, weights, rtol=0, atol=0)


def test_an_error_of_rank_0_is_raised_on_every_rank_and_printed_by_one(monkeypatch):
    sent = []

    def broadcast(values):
        sent[:] = sent or values
        values[:] = sent

    def chooses():
        raise UserError("no such task")

    monkeypatch.setattr(distributed.dist, "broadcast_object_list", broadcast)
    for rank, work in ((0, chooses), (1, lambda: pytest.fail("asked on another rank"))):
        with pytest.raises(UserError, match="no such task") as caught:
            World(rank, 2, torch.device("cpu")).broadcast_from_rank0(work)
        assert caught.value.elsewhere is (rank > 0)
