"""The shell scripts: they install once per pyproject.toml, constraints.txt and extra."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from reproduce.specs.table import read_tables

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def clone(tmp_path):
    """A repository with setup.sh alone and a `.venv` whose pip only writes down its arguments."""
    (tmp_path / "reproduce").mkdir()
    shutil.copy(ROOT / "reproduce" / "setup.sh", tmp_path / "reproduce")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / "constraints.txt").write_text("torch==2\n")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f"""#!/usr/bin/env bash
case "$*" in
    "-m pip install "*" -c constraints.txt -e ."*)
        echo "${{@: -1}}" >>{tmp_path}/installed; exit ${{PIP_STATUS:-0}} ;;
    "-m pip install "*) echo "$*" >{tmp_path}/torch ;;
    "-m pip "*) exit 0 ;;
    *"find_spec('torch')"*) exit 1 ;;
    *) exec {sys.executable} "$@" ;;
esac
"""
    )
    python.chmod(0o755)
    return tmp_path


def use(clone, extra="", **environment):
    """`use_environment [extra]` from another folder; the finished process."""
    script = f"set -euo pipefail; source {clone}/reproduce/setup.sh; use_environment {extra}; pwd"
    environment = {"PATH": "/usr/bin:/bin"} | environment
    options = {"cwd": "/", "env": environment, "capture_output": True, "text": True}
    return subprocess.run(["bash", "-c", script], **options)


def installed(clone):
    """The packages that pip was asked to install since the last call."""
    path = clone / "installed"
    lines = path.read_text().split() if path.exists() else []
    path.unlink(missing_ok=True)
    return lines


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_cpu_build_of_torch_comes_first_if_it_is_asked_for(clone):
    """Without its dependencies: PyTorch's index lacks some of the versions in constraints.txt."""
    use(clone, SPARSE24_TORCH="cpu")
    (said,) = (clone / "torch").read_text().splitlines()
    index = "--no-deps --index-url https://download.pytorch.org/whl/cpu"
    assert said.endswith(f"{index} -c constraints.txt torch torchvision")
    assert installed(clone) == ["."]


def test_installs_once_what_covers_the_rest_and_again_after_a_failure(clone):
    failed = use(clone, PIP_STATUS="1")
    assert failed.returncode == 1 and failed.stderr.startswith("error: the installation failed")
    assert installed(clone) == ["."]
    for extra, asked in (
        ("", ["."]), ("", []), ("dev", [".[dev]"]), ("dev", []), ("", []),
        ("de", [".[de]"]),  # a part of a name is no name
    ):  # fmt: skip
        done = use(clone, extra)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == str(clone) and installed(clone) == asked
        assert asked or done.stdout == f"{clone}\n"


def test_without_a_fitting_python(clone):
    """One line that names the version found; no half-made `.venv`."""
    shutil.rmtree(clone / ".venv")
    programs = clone / "bin"
    programs.mkdir()
    for name in ("bash", "dirname", "cat"):
        (programs / name).symlink_to(shutil.which(name))
    old = programs / "python3"
    old.write_text('#!/bin/bash\n[ "$1" = --version ] && echo Python 3.9.2 || exit 1\n')
    old.chmod(0o755)
    done = use(clone, PATH=str(programs))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "no Python 3.11, 3.12 or 3.13" in done.stderr
    assert "python3 is Python 3.9.2" in done.stderr
    assert not (clone / ".venv").exists()


def test_every_table_and_figure_has_a_script_that_asks_for_it(clone):
    """From any folder, with the arguments as they are."""
    names = {table.command for table in read_tables() if table.paper} | {"all", "quickstart"}
    scripts = {path.stem for path in (ROOT / "reproduce").glob("*.sh")} - {"run", "setup"}
    assert scripts == names
    for path in (ROOT / "reproduce").glob("*.sh"):
        shutil.copy(path, clone / "reproduce")
    (clone / "reproduce" / "__init__.py").touch()
    (clone / "reproduce" / "__main__.py").write_text("import sys; print(sys.argv[1:])")
    for name in names:
        done = subprocess.run(
            ["bash", clone / "reproduce" / f"{name}.sh", "paper=sste", "launch=a b"],
            cwd="/", capture_output=True, text=True,
        )  # fmt: skip
        asked = f"['{name}', 'paper=sste', 'launch=a b']"
        assert done.stdout.splitlines()[-1] == asked, done.stderr


def test_help_installs_nothing(clone):
    for name in ("run.sh", "table2.sh", "usage.txt"):
        shutil.copy(ROOT / "reproduce" / name, clone / "reproduce")
    shutil.rmtree(clone / ".venv")
    for words in (["--help"], ["tier=mini", "-h"]):
        script = ["bash", clone / "reproduce" / "table2.sh", *words]
        done = subprocess.run(script, cwd="/", capture_output=True, text=True)
        assert done.stdout == (ROOT / "reproduce" / "usage.txt").read_text(), done.stderr
    assert not (clone / ".venv").exists()


def test_an_active_environment_is_used_if_it_has_this_checkout(clone):
    """And a module of the extra; nothing is installed into it, and what is passed by is told."""
    (clone / "reproduce" / "__init__.py").touch()
    mine = shutil.copytree(clone / ".venv", clone / "mine") / "bin" / "python"
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        for path, module, own in (
            (clone, "", True), (clone, "json", True), (clone, "no_such", False), ("", "", False),
        ):  # fmt: skip
            environment = {name: str(clone / "mine"), "PYTHONPATH": str(path)}
            done = use(clone, f'hf {module}; echo "$python"', **environment)
            assert (str(mine) in done.stdout) is own, done.stderr
            told = f"using .venv: {clone}/mine has no sparse24[hf] of this checkout\n"
            assert (told in done.stdout) is not own
            assert installed(clone) == [] if own else installed(clone) in ([], [".[hf]"])
    done = use(clone, VIRTUAL_ENV=str(clone / ".venv"))
    assert done.stdout == f"{clone}\n" and done.stderr == ""
