"""The benchmark of the real command."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from experiments.bench import driver
from experiments.bench.__main__ import main
from experiments.support.errors import UserError


def test_the_command_stands_beside_a_bare_loop(overrides, tmp_path):
    """The run has twelve steps, a record of each, and three evaluations."""
    out = tmp_path / "cpu.json"
    asked = ["--only", "fst", "--repeats", "2", "--threads", "1", "--out", str(out)]
    assert main(["driver", *overrides, "--device", "cpu", *asked]) == 0
    (row,) = json.loads(out.read_text())["benchmarks"]["driver"]["rows"]
    assert (row["name"], row["dtype"]) == ("fst", "fp32")
    assert row["shape"] == "gpt2 on words, 1 x 4 samples" and row["backend"] == "dense"
    figures, bare = row["figures"], row["peers"]["bare loop"]
    assert figures["tokens/s"] == pytest.approx(1e3 * 4 * 16 / row["ms"])
    assert figures["beside the bare loop %"] == pytest.approx(100 * (row["ms"] / bare - 1))
    assert not (tmp_path / "runs").exists()  # the run itself is not kept


def test_a_command_that_fails_is_one_line(monkeypatch, tmp_path):
    code = "import sys; print('working'); sys.exit('error: train.dtype=' + sys.argv[1])"
    monkeypatch.setattr(driver, "COMMAND", (sys.executable, "-c", code))
    with pytest.raises(UserError, match=r"fp8 failed: error: train.dtype=fp8$"):
        driver.watch(["fp8"], tmp_path)


def test_the_command_ends_with_the_benchmark(tmp_path):
    """... which is told to end twice, as by `timeout`: itself and with its group."""
    code = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(f'{{os.getpid()}} ')\n"
    program = (
        "import sys; from pathlib import Path\n"
        "from experiments.bench import __main__, driver\n"
        f"driver.COMMAND = (sys.executable, '-c', {code + 'time.sleep(600)'!r})\n"
        "driver.bench = lambda options, report: driver.watch([], Path('.'))\n"
        "sys.exit(__main__.main(['driver', '--device', 'cpu', '--out', sys.argv[1]]))\n"
    )
    bench = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "cpu.json")],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not (told := tmp_path / "pid").exists() or not told.read_text().endswith(" "):
        assert bench.poll() is None
        time.sleep(0.01)
    for _ in range(2):
        bench.send_signal(signal.SIGTERM)
    _, said = bench.communicate(timeout=60)
    with pytest.raises(ProcessLookupError):
        os.kill(int(told.read_text()), signal.SIGKILL)
    assert bench.returncode == 143
    assert said.count("\n") == 1 and said.endswith("; finished ones are kept\n")


def test_a_step_is_the_time_between_records_of_what_has_warmed_up():
    seen = [(0, 30.0), (10, 40.0), (20, 41.0), (30, 42.0), (40, 43.2), (50, 44.2), (60, 45.2)]
    step = driver.of_a_step(seen)
    assert step.ms == pytest.approx(1e3 * 5.2 / 50)
    assert step.p20 == pytest.approx(100) and step.p80 == pytest.approx(104)
