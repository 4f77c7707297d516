"""Checkpoints that are written while the training goes on."""

import dataclasses
import multiprocessing
import os
import threading
import time
from contextlib import nullcontext

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file

from experiments.config.run import load
from experiments.support import checkpoint
from experiments.support.errors import UserError
from experiments.training import checkpoints, pretraining, routine
from experiments.training.distributed import World, world
from experiments.training.saving import Saver
from experiments.training.tracking import read_metrics
from tests.experiments.conftest import SHORT, TINY_MODEL, quiet

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


def test_a_checkpoint_waits_for_the_one_before(tmp_path, gate):
    saver = Saver(tmp_path, ALONE)
    saver.save(1, {"step": 1})
    second = threading.Thread(target=saver.save, args=(2, {"step": 2}))
    second.start()
    second.join(0.05)
    assert second.is_alive()
    gate.set()
    second.join()
    assert [path.name for path in checkpoints.found(tmp_path)] == ["step-000000001"]
    saver.wait()
    assert checkpoints.load_latest(tmp_path, quiet, ALONE) == {"step": 2}
    saver.close()


def test_an_error_of_the_writer_is_that_of_the_next_step(tmp_path, full_disk, gate):
    saver = Saver(tmp_path, ALONE)
    with full_disk():
        saver.save(1, {"w": torch.zeros(100_000)})
        saver.poll()
        gate.set()
        saver.close()
    with pytest.raises(UserError, match=r"state\.pt cannot be written: File too large"):
        saver.poll()
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ ranks, and their end


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


def unshared(folder, rank, here):
    """Write to a file the errors that a rank raises whose folder is not that of the others."""
    checkpoints.PATIENCE = 0.1
    own, told = folder / f"node{rank}", []
    mesh = torch.distributed.init_device_mesh("cpu", (here.size,))
    rows = torch.distributed.tensor.distribute_tensor(torch.arange(8.0), mesh)
    saver = Saver(own, here)
    saver.save(3, {"w": rows, "step": 3})
    seen = folder / "kept" if here.is_main else own
    for attempt in (saver.wait, lambda: checkpoints.load_latest(seen, quiet, here)):
        try:
            attempt()
        except UserError as error:
            told.append(str(error))
    saver.close()
    saver = Saver(folder / "said" if rank else own, here)  # a file, in which there is no folder
    with pytest.raises(UserError) as caught:
        saver.save(9, {"w": rows})
        saver.wait()
    told.append(str(caught.value))
    saver.close()
    assert list(own.iterdir()) == []  # what cannot become a checkpoint takes no room
    (folder / f"told{rank}").write_text("\n".join(told))


def refused(config, folder, here):
    """Write to a file the errors that each rank raises after a lock that rank 0 meets, and after a
    full disk."""
    told = []
    with checkpoint.exclusive(config.directory()) if here.is_main else nullcontext():
        with pytest.raises(UserError) as caught:
            pretraining.run(config, quiet)
        told.append(f"{caught.value.elsewhere} {caught.value}")

    def full(*given):
        raise UserError("the disk is full")

    routine.save_model = full
    with pytest.raises(UserError) as caught:
        pretraining.run(config, quiet)
    (folder / f"refused{here.rank}").write_text(
        "\n".join([*told, f"{caught.value.elsewhere} {caught.value}"])
    )


def work(rank, store, stuck, configs, folder):
    """Train `configs`; `stuck`: until killed."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    with world("cpu") as here:
        if stuck and rank == 1:
            get_stuck()
        for config in configs:
            with (folder / "said").open("a") as said:
                pretraining.run(config, lambda line: print(line, file=said))
        unshared(folder, rank, here)
        refused(dataclasses.replace(configs[-1], seed=1), folder, here)
        torch.distributed.barrier()
    os._exit(0)  # gloo's threads outlive the group and abort an interpreter that ends


@pytest.fixture(scope="module")
def killed(corpus_dir, tmp_path_factory):
    """(folder, a run on two ranks that was killed while it wrote a checkpoint and then resumed, one
    in peace, what the killed one left)."""
    folder = tmp_path_factory.mktemp("killed")
    data = ["data.name=words", f"data.source={corpus_dir / 'text'}", f"data.root={corpus_dir}"]
    more = ["method=fst", "method.refresh_every=4", "impl.shard=fsdp2", "data.vocab_size=300"]
    war, peace = (
        load([*TINY_MODEL, *SHORT, *data, *more, f"runs={folder / name}"])
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
    (folder / "kept" / "step-000000003").mkdir(parents=True)
    start("store2", False, war, peace).join()
    return folder, war, peace, left


def test_a_kill_in_the_middle_of_writing_leaves_the_checkpoint_before(killed):
    folder, war, peace, left = killed
    assert [n for n in left if n[0] != "."] == ["step-000000003"]
    assert any(name.startswith(".step-000000006") for name in left)
    assert "resumed at step 3 of 12" in (folder / "said").read_text().splitlines()

    def records(config):
        found = read_metrics(config.directory() / "metrics.jsonl")
        return [{k: v for k, v in r.items() if k != "step_seconds"} for r in found]

    assert records(war) == records(peace)
    weights = load_file(peace.directory() / "model.safetensors")
    for name, value in load_file(war.directory() / "model.safetensors").items():
        assert torch.equal(value, weights[name])


def test_what_one_rank_meets_is_said_by_all(killed):
    """A folder that is not that of the others, an error of the system, and what stops rank 0
    before and after the steps."""
    folder, common = killed[0], "runs= must lie on storage that all nodes share"
    told = [(folder / f"told{rank}").read_text().splitlines() for rank in range(2)]
    for said in told:
        assert said[0].startswith(f"{folder / 'node0'}: rank-1.safetensors of step 3, which other")
        assert said[1].endswith(f"see step-000000003, which rank 0 sees; {common}")
        assert said[2].startswith(f"{folder / 'said' / '.step-000000009.0'} cannot be written: Not")
        assert len(said) == 3
    for rank, elsewhere in ((0, False), (1, True)):  # who leaves the printing to rank 0
        locked, full = (folder / f"refused{rank}").read_text().splitlines()
        assert locked.startswith(f"{elsewhere} another process is running in ")
        assert full == f"{elsewhere} the disk is full"
