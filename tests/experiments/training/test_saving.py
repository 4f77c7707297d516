"""Checkpoints that are written while the training goes on."""

import errno
import multiprocessing
import os
import threading
import time

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file

from experiments.config.run import load
from experiments.support import checkpoint
from experiments.support.errors import UserError
from experiments.training import checkpoints, pretraining
from experiments.training.checkpoints import Saver
from experiments.training.distributed import World, world
from experiments.training.tracking import read_metrics
from tests.experiments.conftest import SHORT, TINY_MODEL, quiet, untimed, words_of

ALONE = World(0, 1, torch.device("cpu"))


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
