"""Sweeps as jobs: what is asked of SLURM, and a submission with submitit's local executor."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from experiments.config.run import load

INSTALLED = find_spec("submitit") is not None
needs_launcher = pytest.mark.skipif(not INSTALLED, reason="no hydra-submitit-launcher here")


@needs_launcher
def test_a_sweep_is_submitted_and_run(overrides, tmp_path):
    """Each run in a process of its own, that is found again by what it prints."""
    short = [*[o for o in overrides if not o.startswith("train.steps")], "train.steps=3"]
    command = [sys.executable, "-m", "experiments.pretrain", "-m", "+cluster=local"]
    command += ["hydra.launcher.timeout_min=10", "method=ste", "seed=0,1", *short]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    for seed in (0, 1):
        directory = load([*short, "method=ste", f"seed={seed}"]).directory()
        assert (directory / "result.json").is_file()
    printed = [path.read_text() for path in (tmp_path / "runs/.submitit").glob("*/*_log.out")]
    assert sorted(text.count("ste, seed") for text in printed) == [1, 1]
