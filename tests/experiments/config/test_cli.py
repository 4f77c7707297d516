"""The commands as a user runs them: sweeps, SIGKILL, torchrun, and errors in one line."""

import importlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments import pretrain
from experiments.config.run import load
from experiments.config.yaml_files import CONF
from experiments.training.tracking import read_metrics
from tests.experiments.conftest import losses


def changed(overrides, *values):
    """The overrides with these in place of those of the same keys."""
    keys = {value.partition("=")[0] for value in values}
    return [o for o in overrides if o.partition("=")[0] not in keys] + [*values]


def test_a_sweep_makes_one_directory_per_run(overrides, tmp_path, monkeypatch, capsys):
    """... and compares them."""
    shorter = changed(overrides, "train.steps=2")
    monkeypatch.setattr("sys.argv", ["pretrain", "-m", "method=ste,stee", *shorter])
    with pytest.raises(SystemExit):  # before the first run
        pretrain.main()
    assert not (tmp_path / "runs").exists()
    monkeypatch.setattr("sys.argv", ["pretrain", "-m", "method=ste,slope", "seed=0,1", *shorter])
    pretrain.main()
    said = capsys.readouterr().out
    expected = {
        load([*shorter, f"method={method}", f"seed={seed}"]).directory() / "result.json"
        for method in ("slope", "ste")
        for seed in (0, 1)
    }
    assert {*(tmp_path / "runs").glob("*/*/*/result.json")} == expected and len(expected) == 4
    assert "\nwith curves: python -m experiments.compare " in said


def test_two_ranks_with_accumulation_equal_one_process(overrides, run_on_two_ranks, tmp_path):
    """At a learning rate of 0: every step starts from equal weights, and no rounding grows."""
    arguments = [*overrides, "method=s_ste", "train.learning_rate=0", "train.min_learning_rate=0"]
    one = [*arguments, "impl.micro_batch=4", f"runs={tmp_path / 'one'}"]
    two = [*arguments, "impl.micro_batch=1", f"runs={tmp_path / 'two'}"]
    pretrain.run(load(one), lambda _: None)
    run_on_two_ranks("experiments.pretrain", *two)
    # A last bit of dY draws another sample in few groups; other random bits would in half of them.
    for key, error in {"loss": {"abs": 1e-5}, "grad_norm": {"rel": 1e-2}}.items():
        single, double = (losses(load(a).directory(), key) for a in (one, two))
        assert len(single) == 12 and double == pytest.approx(single, **error)


BAD_INPUT = {
    "method.include=[encoder.*]": "no linear matches include=",
    "data.root=nowhere": "run `python -m experiments.prepare_data",
    "model.vocab_size=200": "set model.vocab_size to 320",
}


def test_bad_input_is_one_line_and_leaves_nothing(overrides, tmp_path, monkeypatch, capfd):
    """The command ends with a text, which Python prints before it exits with status 1."""
    monkeypatch.chdir(tmp_path)
    for argument, message in BAD_INPUT.items():
        monkeypatch.setattr("sys.argv", ["pretrain", *changed(overrides, argument)])
        with pytest.raises(SystemExit) as stop:
            pretrain.main()
        text = stop.value.code
        assert text.startswith("error: ") and "\n" not in text and message in text
        assert capfd.readouterr() == ("", "")
        assert list(tmp_path.iterdir()) == []


def test_methods_import_with_nothing_but_torch():
    # The import of torch._dynamo takes as long as that of torch.
    heavy = "hydra omegaconf transformers timm datasets matplotlib experiments torch._dynamo"
    code = f"""import importlib, sys, methods
for name in methods.available():
    importlib.import_module(f"methods.{{name}}")
sys.exit(" ".join(set("{heavy}".split()) & set(sys.modules)) or 0)"""
    subprocess.run([sys.executable, "-c", code], check=True)


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.extra
def test_a_rank_that_is_killed_is_started_anew(overrides, tmp_path):
    """torchrun ends the others, starts all again, and they go on."""
    arguments = changed(overrides, "train.steps=60", "train.eval_every=60")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["--max-restarts=1", "--monitor-interval=0.1", "-m", "experiments.pretrain"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    directory = load(arguments).directory()
    with (tmp_path / "said").open("w+") as said:
        command += arguments
        process = subprocess.Popen(command, stdout=said, stderr=said, env=environment)
        deadline = time.monotonic() + 300
        while len(read_metrics(directory / "metrics.jsonl")) < 10:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(children(process.pid)[1], signal.SIGKILL)
        assert process.wait(timeout=300) == 0
        said.seek(0)
        assert "resumed at step" in said.read()
    assert len(losses(directory)) == 60


@pytest.mark.extra
def test_a_sweep_is_submitted_and_run(overrides, tmp_path):
    """By the local executor of submitit, in a process that is found again by what it prints."""
    pytest.importorskip("submitit")
    short = changed(overrides, "train.steps=3", "method=ste")
    command = [sys.executable, "-m", "experiments.pretrain", "-m", "+cluster=local"]
    command += ["hydra.launcher.timeout_min=10", *short]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert (load(short).directory() / "result.json").is_file()
    printed = [path.read_text() for path in (tmp_path / "runs/.submitit").glob("*/*_log.out")]
    assert [text.count("ste, seed") for text in printed] == [1]


TRAINS = {"model", "data", "method", "train", "impl", "experiment"}
DRIVERS = {"pretrain": TRAINS, "prepare_data": {"data"}, "evaluate": {"impl"}, "export": set()}


def shown(capsys, monkeypatch, driver, *arguments):
    module = importlib.import_module(f"experiments.{driver}")
    monkeypatch.setattr(sys, "argv", [f"{driver}.py", *arguments])
    module.main()
    out, err = capsys.readouterr()
    assert err == ""
    return module, out


def test_help_describes_the_driver_and_each_option(capsys, monkeypatch):
    for driver, groups in DRIVERS.items():
        module, out = shown(capsys, monkeypatch, driver, "--help")
        assert out.startswith(f"usage: python -m experiments.{driver} [KEY=VALUE ...]")
        assert module.__doc__.strip() in out
        assert set(re.findall(r"^(\w+)=\w+, one of: ", out, re.M)) == groups
        if driver != "prepare_data":
            assert (CONF / f"{driver}.yaml").read_text().strip() in out
    _, out = shown(capsys, monkeypatch, "pretrain", "method=released/slope", "train.steps=7", "-h")
    assert re.search(r"^method=released/slope, one of: act24 ast ", out, re.M)
    assert re.search(r"^mask: random +# random \| magnitude; the mask is chosen once$", out, re.M)
