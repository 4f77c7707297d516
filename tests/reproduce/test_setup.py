"""The shell scripts: they parse, and they install once per pyproject.toml and extra."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from reproduce.reading import read_tables

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [*sorted((ROOT / "reproduce").glob("*.sh")), ROOT / "tests" / "run.sh"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse(script):
    subprocess.run(["bash", "-n", script], check=True)


@pytest.fixture
def clone(tmp_path):
    """A repository with setup.sh alone and a `.venv` whose pip only writes down its arguments."""
    (tmp_path / "reproduce").mkdir()
    shutil.copy(ROOT / "reproduce" / "setup.sh", tmp_path / "reproduce")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f"""#!/usr/bin/env bash
case "$*" in
    "-m pip install "*) echo "${{@: -1}}" >>{tmp_path}/installed; exit ${{PIP_STATUS:-0}} ;;
    "-m pip "*) exit 0 ;;
    *) exec {sys.executable} "$@" ;;
esac
"""
    )
    python.chmod(0o755)
    return tmp_path


def use(clone, extra="", **environment):
    """`use_environment [extra]` from another folder; the finished process."""
    script = f"set -euo pipefail; source {clone}/reproduce/setup.sh; use_environment {extra}; pwd"
    return subprocess.run(
        ["bash", "-c", script],
        cwd="/",
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
    )


def installed(clone):
    """What pip was asked to install, and forget it."""
    path = clone / "installed"
    lines = path.read_text().split() if path.exists() else []
    path.unlink(missing_ok=True)
    return lines


def test_installs_once(clone):
    done = use(clone)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(clone)
    assert installed(clone) == ["."]
    again = use(clone)
    assert (again.stdout, installed(clone)) == (f"{clone}\n", [])


def test_an_extra_is_installed_once_and_covers_the_rest(clone):
    use(clone)
    use(clone, "dev")
    assert installed(clone) == [".", ".[dev]"]
    for extra in ("dev", ""):
        use(clone, extra)
    assert installed(clone) == []
    use(clone, "de")  # a part of a name is no name
    assert installed(clone) == [".[de]"]


def test_a_changed_pyproject_is_installed_again(clone):
    use(clone, "dev")
    (clone / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    use(clone)
    use(clone, "dev")
    assert installed(clone) == [".[dev]", ".", ".[dev]"]


def test_a_failed_installation_is_tried_again(clone):
    failed = use(clone, PIP_STATUS="1")
    assert failed.returncode == 1
    assert failed.stderr.startswith("error: the installation failed")
    assert installed(clone) == ["."]
    assert use(clone).returncode == 0
    assert installed(clone) == ["."]


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
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "no Python 3.11, 3.12 or 3.13" in done.stderr
    assert "python3 is Python 3.9.2" in done.stderr
    assert not (clone / ".venv").exists()


def test_a_broken_environment_is_named(clone):
    (clone / ".venv" / "bin" / "python").write_text("#!/bin/bash\nexit 1\n")
    done = use(clone)
    assert done.returncode == 1
    assert f"{clone}/.venv has no working Python" in done.stderr


def test_every_table_and_figure_has_a_script():
    """Links to one file, which goes by the name that it is called by."""
    links = {path.stem for path in (ROOT / "reproduce").glob("*.sh") if path.is_symlink()}
    assert links == {table.command for table in read_tables() if table.paper} | {"all"}
    for name in links:
        assert (ROOT / "reproduce" / f"{name}.sh").readlink() == Path("table.sh")


def test_a_script_asks_for_what_it_is_called(clone):
    """Whichever folder one stands in, with the arguments as they are."""
    shutil.copy(ROOT / "reproduce" / "table.sh", clone / "reproduce")
    (clone / "reproduce" / "figure4.sh").symlink_to("table.sh")
    (clone / "reproduce" / "__init__.py").touch()
    (clone / "reproduce" / "__main__.py").write_text("import sys; print(sys.argv[1:])")
    done = subprocess.run(
        ["bash", clone / "reproduce" / "figure4.sh", "paper=sste", "tier=full"],
        cwd="/", capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "['figure4', 'paper=sste', 'tier=full']", done.stderr
