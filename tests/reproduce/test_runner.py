"""The runner of blocks, with children that are done at once, fail, wait, or are killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments.support.checkpoint import write_text
from experiments.support.errors import UserError
from reproduce.__main__ import main
from reproduce.execute import blocks, processes, queue, runner
from reproduce.execute.blocks import Block
from reproduce.execute.jobs import Job, plan
from reproduce.execute.runner import run_block
from reproduce.specs.table import TableRow
from tests.faults import check
from tests.reproduce.conftest import make_result

# Arguments: what to do, the run directory, what to write as its result.
CHILD = """
import json, os, pathlib, signal, sys, time
do, directory, result = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3]
directory.mkdir(parents=True, exist_ok=True)
names = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"
seen = {"group": os.getpgid(0), "process": os.getpid(), **{n: os.environ.get(n) for n in names}}

def stop(*_):
    if do == "stay":
        return
    (directory / "saved").touch()
    sys.exit(143)

signal.signal(signal.SIGTERM, stop)
(directory / "seen.json").write_text(json.dumps(seen))
print("step 1")
if do == "fail":
    sys.exit("error: train.steps does not fit")
if do == "die":
    os.kill(os.getpid(), signal.SIGKILL)
if do.startswith("signal"):
    os.kill(os.getppid(), int(do.split()[1]))
if do != "train":
    for _ in range(600):  # a signal right before a sleep begins is handled after it
        time.sleep(0.1)
part = directory / "result.part"
part.write_text(result)
part.rename(directory / "result.json")  # at once: a clock of the tests looks for it
"""


@pytest.fixture
def children(tmp_path, monkeypatch):
    """Stand-ins for trainings: `.do[variant]` says what they do, `.started` which there were."""

    made = SimpleNamespace(do={}, started=[], prepared=[], metrics={})

    def command(job, words=()):
        made.started.append(str(job))
        result = make_result(
            job.config.digest(),
            metrics={"val_loss": 1.0 + job.config.seed} | made.metrics,
            init=job.config.init_weights(),
        )
        variant = str(job).rpartition(": ")[2].partition(",")[0]
        do, directory = made.do.get(variant, "train"), str(job.config.directory())
        return [sys.executable, "-S", "-c", CHILD, do, directory, json.dumps(result)]

    monkeypatch.chdir(tmp_path)  # where no corpus is, so that results name none
    monkeypatch.setattr(Job, "command", command)
    monkeypatch.setattr(runner, "prepare", lambda data: made.prepared.append(data.name))
    monkeypatch.setattr(queue, "POLL", 0.01)
    return made


@pytest.fixture
def start(children, tmp_path):
    """start(block, ...) -> (whether all is done, what was reported)."""

    def run(block, **options):
        said = []
        children.started.clear()
        done = run_block(block, tmp_path, report=said.append, committed=tmp_path / "no", **options)
        return done, said

    return run


@pytest.fixture
def clock(monkeypatch):
    """clock(now): the runner's clock shows `now()`."""
    return lambda now: monkeypatch.setattr("time.monotonic", lambda: float(now()))


@pytest.fixture
def handlers():
    """Signals are handled as at a terminal, and afterwards as before."""
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    yield
    for one, handler in before.items():
        signal.signal(one, handler)


def block(seeds=(0, 1), **variants):
    """A block of tiny runs; variants by their overrides."""
    variants = variants or {"dense": ["method=dense"], "ste": ["method=ste"]}
    return Block("t", "T", ["train.steps=20"], variants, list(seeds))


def second():
    """A block that goes on from the variant `dense` of `block()`."""
    source, variants = block().only("dense"), {"ast": ["method=ast"], "gmp": ["method=gmp"]}
    return Block("u", "U", ["train.steps=20"], variants, [0, 1], source=source)


def directories(of, folder):
    return {str(run): run.config.directory() for run in of.runs(folder)}


def wait_for(path):
    for _ in range(1000):
        if path.exists():
            return
        time.sleep(0.01)
    raise AssertionError(f"{path} does not appear")


def test_a_block_is_run_seed_by_seed_and_once(start, children, tmp_path):
    done, said = start(block())
    assert done
    order = ["dense, seed 0", "ste, seed 0", "dense, seed 1", "ste, seed 1"]
    assert children.started == order
    assert children.prepared == ["stdlib"]  # once for all
    assert said[0] == "t: 4 runs, 0 done already; 1 at a time"
    assert said[4].startswith("[4/4] ste, seed 1: val_loss 2.0000, 2000.0 ms a step, ")
    assert said[4].endswith(" elapsed, about 0:00:00 left)") and len(said) == 5
    kept = tmp_path / "evidence" / "t"
    names = [f"{variant}-seed{seed}.json" for variant in ("dense", "ste") for seed in (0, 1)]
    assert sorted(path.name for path in kept.iterdir()) == names
    every = ["t: 4 runs, 4 done already; 1 at a time"]
    assert start(block()) == (True, every) and children.started == []
    assert start(block(seeds=[0, 1, 2]))[0]
    assert children.started == ["dense, seed 2", "ste, seed 2"]
    # A runner killed between a run's end and its record writes the record when started again.
    (kept / "ste-seed1.json").unlink()
    assert start(block()) == (True, every) and (kept / "ste-seed1.json").is_file()
    # A machine that has the records and no run directories trains only what has no record.
    (tmp_path / "evidence").rename(tmp_path / "no")
    (tmp_path / "gpt2-stdlib").rename(tmp_path / "elsewhere")
    assert start(block()) == (True, every)
    (tmp_path / "no" / "t" / "ste-seed1.json").unlink()
    assert start(block())[0] and children.started == ["ste, seed 1"]


def test_what_cannot_run_is_refused_before_any_work(start, children, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for own, message in [
        (["impl.device=cuda"], r"^block t: a GPU is needed, and torch sees none here"),
        (["method=dense"], "block t: dense and it have the same config"),
    ]:
        with pytest.raises(UserError, match=message):
            start(block(dense=["method=dense"], it=own))
        assert not children.started


def test_what_a_block_starts_from_is_trained_first(start, children, tmp_path):
    """A source is trained once for all variants of a seed, and has a record of its own."""
    done, said = start(second())
    names = ("t: dense", "ast", "gmp")
    assert done and children.started == [f"{name}, seed {s}" for s in (0, 1) for name in names]
    assert said[0] == "u: 4 runs, 0 done already; 1 at a time"
    assert said[1] == "before them 2 of block t, where they start"
    assert said[2].startswith("[1/6] t: dense, seed 0: val_loss 1.0000, ")
    kept = sorted(path.name for path in (tmp_path / "evidence").glob("[tu]/*"))
    assert kept == [f"{name}-seed{s}.json" for name in ("ast", "dense", "gmp") for s in (0, 1)]
    assert start(second()) == (True, ["u: 4 runs, 4 done already; 1 at a time"])
    assert start(block(), per_gpu=2)[0] and {*children.started} == {"ste, seed 0", "ste, seed 1"}


def test_what_starts_from_a_run_that_diverged_is_left_out(start, children):
    children.metrics = {"val_loss": None}
    done, said = start(second())
    assert not done and len(said) == 6 and said[3] == "left out: 2 runs that start there"
    assert children.started == ["t: dense, seed 0", "t: dense, seed 1"]
    assert said[2].startswith("[1/6] t: dense, seed 0: val")


def test_a_failure_is_one_line_and_the_rest_go_on(start, children, tmp_path):
    children.do = {"dense": "fail"}
    done, said = start(block())
    assert not done
    log = directories(block(), tmp_path)["dense, seed 0"] / "output.txt"
    assert f"failed: dense, seed 0: error: train.steps does not fit (see {log})" in said
    assert sum(line.startswith("failed: ") for line in said) == 2
    assert said[-1].startswith("[2/4] ste, seed 1: ")  # nothing is left that was not tried
    children.do = {"dense": "die"}
    assert start(block())[1][1].startswith("failed: dense, seed 0: it was ended by SIGKILL; see ")
    children.do = {}
    assert start(block())[0] and children.started == ["dense, seed 0", "dense, seed 1"]
    assert log.read_bytes().count(b"step 1") == 3  # a later attempt loses nothing of the first


def test_children_end_with_a_runner_that_is_killed(tmp_path):
    command = [sys.executable, "-S", "-c", CHILD, "stand", str(tmp_path / "run"), "{}"]
    if (parent := os.fork()) == 0:
        processes.Process(command, tmp_path / "log.txt")
        time.sleep(60)
        os._exit(0)
    wait_for(tmp_path / "run" / "seen.json")
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    wait_for(tmp_path / "run" / "saved")


def test_a_fault_of_the_disk_is_made_up_for_by_the_next_call(children, monkeypatch, tmp_path):
    class Child:  # which writes in this process
        def __init__(self, command, stdout, **options):
            *_, directory, result = command
            try:
                write_text(Path(directory) / "result.json", result)
                self.returncode = 0
            except (UserError, OSError) as error:
                stdout.write(str(error).encode())
                self.returncode = 1

        def poll(self):
            return self.returncode

        terminate = wait = lambda self, *_: None

    monkeypatch.setattr(subprocess, "Popen", Child)
    root = tmp_path / "runs"
    root.mkdir()
    check(root, lambda: run_block(block([0]), root, report=str, committed=tmp_path / "no"), 6)


def test_the_runs_of_a_table_go_side_by_side(children, small, tmp_path, monkeypatch):
    """By the same queue: each on a GPU, with its share of the cores, a run that starts from another
    after it."""
    monkeypatch.setattr(processes, "visible_gpus", lambda: ["3", "5"])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(12))
    rows = [TableRow("dense", ["method=dense"]), TableRow("AST", ["method=ast"])]
    rows[1].starts_from = "dense"
    jobs, said = plan(small(rows, [0, 1]), "smoke", tmp_path).jobs, []
    launch = queue.Launch(per_gpu=2)
    with monkeypatch.context() as patch:
        patch.setattr(Job, "command", lambda job, words: [str(tmp_path)])  # no program
        assert queue.execute(jobs, said.append, launch) == 4
    assert said[1].startswith("failed: dense, seed 0: ") and "Permission denied" in said[1]
    assert said.count("left out: 1 runs that start there") == 2
    assert queue.execute(jobs, said.append, launch) == 4
    assert all(job.result() is not None for job in jobs)
    seen = [json.loads((job.config.directory() / "seen.json").read_text()) for job in jobs]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in seen[:2]] == ["3", "5"]
    assert {one["OMP_NUM_THREADS"] for one in seen} == {"3"}


def test_the_budget_ends_what_runs(start, children, tmp_path, clock):
    """The run under way is told to end and saves, no other is begun, and the next call goes on."""
    children.do = {"ste": "wait"}
    waiting = directories(block(), tmp_path)["ste, seed 0"]
    clock(lambda: 1000 if (waiting / "seen.json").is_file() else 0)
    done, said = start(block(), minutes=10)
    assert not done and children.started == ["dense, seed 0", "ste, seed 0"]
    assert said[-1] == "3 runs are left; start the same command again to go on"
    assert (waiting / "saved").is_file()
    children.do = {}
    assert start(block())[0]
    assert children.started == ["ste, seed 0", "dense, seed 1", "ste, seed 1"]


def test_a_run_that_does_not_stop_is_killed(start, children, monkeypatch, tmp_path, clock):
    monkeypatch.setattr(processes, "PATIENCE", 0.1)
    children.do = {"dense": "stay"}
    stays = directories(block(), tmp_path)["dense, seed 0"] / "seen.json"
    clock(lambda: 1000 if stays.is_file() else 0)
    assert not start(block(seeds=[0]), minutes=10)[0]
    with pytest.raises(ProcessLookupError):
        os.kill(json.loads(stays.read_text())["process"], 0)


@pytest.mark.parametrize(
    ("number", "status", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGHUP, 143, "terminated")],
)
def test_a_signal_ends_the_children(
    number, status, word, children, monkeypatch, tmp_path, capsys, handlers
):
    """Children get one signal: after a second one beside that of Ctrl-C they would not save. Here
    it comes in the midst of looking after a child, where an exception would leave the child's lock
    taken: a second look waits for it."""
    children.do = {"ste": f"signal {number.value}"}
    monkeypatch.setattr(blocks, "read_block", lambda name: block())
    poll, inside = subprocess.Popen.poll, []

    def look(process):
        inside.append(process)
        time.sleep(0.02)  # where the handler runs
        found = poll(process)
        inside.remove(process)
        return found

    monkeypatch.setattr(subprocess.Popen, "poll", look)
    assert main(["run", "t"], runs=tmp_path) == status
    assert not inside
    assert capsys.readouterr().err == f"{word}; the same command goes on\n"
    ended = directories(block(), tmp_path)["ste, seed 0"]
    assert (ended / "saved").is_file()
    child = json.loads((ended / "seen.json").read_text())
    assert child["group"] == child["process"] != os.getpgid(0)
    assert children.started == ["dense, seed 0", "ste, seed 0"]


def test_the_exit_status_and_arguments_that_mean_nothing(children, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(blocks, "read_block", lambda name: block(seeds=[0]))
    children.do = {"ste": "fail"}
    assert main(["run", "t"], runs=tmp_path) == 1
    children.do = {}
    assert main(["run", "t", "minutes=1", "per_gpu=2"], runs=tmp_path) == 0
    assert "t: 2 runs, 1 done already; 2 at a time" in capsys.readouterr().out


def test_the_gpus_are_those_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr("torch.cuda._lazy_init", lambda: pytest.fail("it initialises CUDA"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for variable, count, expected in [
        (None, 2, ["0", "1"]), ("", 0, []), ("GPU-c0ffee,GPU-dead", 2, ["GPU-c0ffee", "GPU-dead"]),
        ("4,9,5", 1, ["4"]),  # CUDA takes those before the first that is not there
    ]:  # fmt: skip
        if variable is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
        monkeypatch.setattr("torch.cuda.device_count", lambda count=count: count)
        assert processes.visible_gpus() == expected
