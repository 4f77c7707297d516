"""Tables whose runs are processes of their own, with children that are done at once or fail."""

import json
import os
import shlex
import signal
import sys
import threading
import time

import pytest

from reproduce.__main__ import main
from reproduce.execute import processes
from reproduce.execute.jobs import Job, execute, plan, quoted
from reproduce.execute.processes import Launch, commands
from reproduce.execute.processes import Process as launched
from reproduce.specs.table import TableRow
from tests.reproduce.conftest import make_result

CHAIN = [TableRow("dense", ["method=dense"]), TableRow("AST", ["method=ast"], starts_from="dense")]
# Arguments: the run directory, what to write as its result.
CHILD = """
import json, os, pathlib, sys, time
directory, result = pathlib.Path(sys.argv[1]), sys.argv[2]
time.sleep(0.3 if result else 60)
print(os.environ.get("CUDA_VISIBLE_DEVICES"))
if result == "fail":
    sys.exit("error: no corpus")
(directory / "result.json").write_text(result)
"""


@pytest.fixture
def children(monkeypatch, tmp_path):
    """Stand-ins for trainings; `children.do[label]` = "fail", or "" to stay."""
    monkeypatch.chdir(tmp_path)

    def command(job, words):
        init = job.config.init_weights() if job.driver == "pretrain" else None
        result = json.dumps(make_result(job.config.digest(), init=init))
        done = command.do.get(str(job), result)
        return [sys.executable, "-c", CHILD, str(job.config.directory()), done]

    command.do = {}
    monkeypatch.setattr(Job, "command", command)
    return command


def gpus_of(jobs):
    return [(job.config.directory() / "output.txt").read_text().split()[0] for job in jobs]


def test_runs_go_side_by_side_each_on_a_gpu(children, small, tmp_path, monkeypatch):
    """A run that starts from another waits for it; a failure is one line, and the rest goes on."""
    monkeypatch.setattr(processes, "visible_gpus", lambda: ["3", "5"])
    jobs, said = plan(small(CHAIN, [0, 1]), "smoke", tmp_path).jobs, []
    children.do = {"dense, seed 1": "fail"}
    way = Launch([], 1)
    execute(jobs, said.append, way.run, way.at_once, way.stop)
    labels = [str(job) for job in jobs if job.result() is not None]
    assert labels == ["dense, seed 0", "AST, seed 0"]
    assert sorted(gpus_of(jobs[:2])) == ["3", "5"]
    output = jobs[1].config.directory() / "output.txt"
    assert f"failed: dense, seed 1: error: no corpus (see {output})" in said
    assert "failed: AST, seed 1: it needs the finished run of dense, seed 1" in said
    children.do = {}
    execute(jobs, said.append, way.run, way.at_once, way.stop)
    assert all(job.result() is not None for job in jobs)


def test_an_interrupt_ends_the_children(children, small, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE", 5.0)
    jobs, begun = plan(small(seeds=[0]), "smoke", tmp_path).jobs, []
    monkeypatch.setattr(
        processes, "Process", lambda *given: begun.append(launched(*given)) or begun[-1]
    )
    children.do = {str(job): "" for job in jobs}
    way = Launch([], 2)

    def interrupt():
        while len(begun) < len(jobs):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            execute(jobs, lambda message: None, way.run, way.at_once, way.stop)
    finally:
        signal.signal(signal.SIGINT, before)
    assert [process.process.returncode for process in begun] == [-signal.SIGTERM] * len(jobs)


def test_commands_are_those_that_are_left(small, tmp_path, fake, capsys):
    jobs = plan(small(CHAIN, [0]), "smoke", tmp_path).jobs
    words = ["torchrun", "--nproc_per_node=8"]
    _, dense, _, ast = commands(jobs, words)
    assert dense.startswith("torchrun --nproc_per_node=8 -m experiments.pretrain train.steps=20 ")
    assert f"init={quoted(jobs[0].config.directory())}" in shlex.split(ast)
    execute(jobs[:1], lambda message: None, fake)
    assert len(commands(jobs, [])) == 2
    options = ["quickstart", f"launch={sys.executable} -u", "commands"]
    assert main(options, runs=tmp_path / "none") == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(f"{sys.executable} -u -m experiments.") for line in lines) >= 6
    assert not [*(tmp_path / "none").rglob("result.json")]
    # A measurement has one process, whatever starts a training.
    measuring = Job("m", "evaluate", [], tmp_path, jobs[0], "run")
    assert measuring.command(words)[:3] == [sys.executable, "-m", "experiments.evaluate"]
