"""Sweeps as jobs: what is asked of SLURM, and a submission with submitit's local executor."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from experiments.config.run import load
from experiments.config.yaml_files import CONF

INSTALLED = find_spec("submitit") is not None
needs_launcher = pytest.mark.skipif(not INSTALLED, reason="no hydra-submitit-launcher here")


def launcher(name, *overrides):
    with initialize_config_module("experiments.conf", version_base="1.3"):
        config = compose("pretrain", [f"+cluster={name}", *overrides], return_hydra_config=True)
    return OmegaConf.to_container(config.hydra.launcher, resolve=True)


@needs_launcher
def test_a_run_is_a_job_on_one_gpu():
    asked = launcher("slurm", "runs=there", "hydra.launcher.partition=fast")
    assert asked["_target_"].endswith(".SlurmLauncher") and asked["partition"] == "fast"
    assert asked["submitit_folder"] == "there/.submitit/%j"
    assert (asked["nodes"], asked["tasks_per_node"], asked["gpus_per_node"]) == (1, 1, 1)
    assert asked["max_num_timeout"] > 0  # a run goes on from its last checkpoint
    assert launcher("local")["_target_"].endswith(".LocalLauncher")
    # The cluster is no part of a run.
    assert load(["+cluster=slurm"]).digest() == load([]).digest()


def test_the_files_choose_the_launcher_and_nothing_else():
    for name in ["slurm", "local"]:
        content = OmegaConf.to_container(OmegaConf.load(CONF / "cluster" / f"{name}.yaml"))
        assert content.pop("defaults") == [{"override /hydra/launcher": f"submitit_{name}"}]
        assert content.keys() == {"hydra"} and content["hydra"].keys() == {"launcher"}


@pytest.mark.skipif(INSTALLED, reason="the launcher is installed")
def test_without_the_launcher_the_extra_is_named(overrides):
    command = [sys.executable, "-m", "experiments.pretrain", "-m", "+cluster=slurm", *overrides]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.endswith("launcher: pip install -c constraints.txt -e '.[slurm]' in the checkout")


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
