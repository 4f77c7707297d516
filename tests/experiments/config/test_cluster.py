"""A run of a sweep as a job of submitit's local executor."""

import os
import subprocess
import sys

import pytest

from experiments.config.run import load


@pytest.mark.extra
def test_a_sweep_is_submitted_and_run(overrides, tmp_path):
    """In a process of its own, that is found again by what it prints."""
    pytest.importorskip("submitit")
    short = [*[o for o in overrides if not o.startswith("train.steps")], "train.steps=3"]
    command = [sys.executable, "-m", "experiments.pretrain", "-m", "+cluster=local"]
    command += ["hydra.launcher.timeout_min=10", "method=ste", *short]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert (load([*short, "method=ste"]).directory() / "result.json").is_file()
    printed = [path.read_text() for path in (tmp_path / "runs/.submitit").glob("*/*_log.out")]
    assert [text.count("ste, seed") for text in printed] == [1]
