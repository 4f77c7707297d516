"""The shell scripts: they parse, and they install once per pyproject.toml and extra."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from reproduce.__main__ import UsageError, parse
from reproduce.reading import read_tables
from reproduce.spec import TIERS

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
    """The packages that pip was asked to install since the last call."""
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


@pytest.mark.parametrize("refused", ["", "1"])
@pytest.mark.parametrize("own", ["", "elsewhere"])
def test_compiled_modules_are_kept_where_the_checkout_stays_as_it_is(clone, refused, own):
    """They are beside their sources, as usual, unless Python is told to keep none."""
    (clone / "module.py").touch()
    script = f"source {clone}/reproduce/setup.sh; use_environment; $python -c 'import module'"
    refusal = {"PYTHONDONTWRITEBYTECODE": refused, "PYTHONPYCACHEPREFIX": own and str(clone / own)}
    environment = {"PATH": "/usr/bin:/bin"} | {key: text for key, text in refusal.items() if text}
    subprocess.run(["bash", "-c", script], cwd="/", env=environment, check=True)
    (kept,) = clone.rglob("module.*.pyc")
    place = own or (".venv/pycache" if refused else "__pycache__")
    assert kept.is_relative_to(clone / place)


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
    """It does so from any folder, and passes the arguments on as they are."""
    shutil.copy(ROOT / "reproduce" / "table.sh", clone / "reproduce")
    (clone / "reproduce" / "figure4.sh").symlink_to("table.sh")
    shutil.copytree(ROOT / "reproduce" / "tables", clone / "reproduce" / "tables")
    (clone / "reproduce" / "__init__.py").touch()
    (clone / "reproduce" / "__main__.py").write_text("import sys; print(sys.argv[1:])")
    done = subprocess.run(
        ["bash", clone / "reproduce" / "figure4.sh", "paper=sste", "tier=full"],
        cwd="/", capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "['figure4', 'paper=sste', 'tier=full']", done.stderr


@pytest.fixture
def scripts(clone):
    """`call(script, *arguments)` in a clone with all scripts and specs, and no `.venv`; no Python
    is on the PATH, so nothing could be made or installed."""
    shutil.rmtree(clone / ".venv")
    for path in SCRIPTS[:-1]:
        shutil.copy(path, clone / "reproduce", follow_symlinks=False)
    shutil.copytree(ROOT / "reproduce" / "tables", clone / "reproduce" / "tables")
    programs = clone / "bin"
    programs.mkdir()
    for name in ("bash", "basename", "cat", "dirname", "grep", "sed"):
        (programs / name).symlink_to(shutil.which(name))

    def call(script, *arguments, **environment):
        done = subprocess.run(
            ["bash", clone / "reproduce" / f"{script}.sh", *arguments],
            cwd="/", env={"PATH": str(programs), **environment}, capture_output=True, text=True,
        )  # fmt: skip
        assert not (clone / ".venv").exists() and not (clone / "installed").exists()
        return done

    return call


@pytest.mark.parametrize("script", ["table2", "figure7", "all", "quickstart"])
def test_help_and_list_install_nothing(scripts, script):
    shown = scripts(script, "--help")
    assert shown.returncode == 0 and f"bash reproduce/{script}.sh [paper=NAME]" in shown.stdout
    listed = scripts(script, "--list")
    assert listed.returncode == 0 and listed.stderr == ""
    *lines, last = listed.stdout.splitlines()
    assert last.endswith("once installed, python -m reproduce --list")
    assert sorted(line.split("  ")[0] for line in lines) == sorted(
        f"{table.command} paper={table.paper}" if table.paper else table.name
        for table in read_tables()
        if script == table.command or (script == "all" and table.paper)
    )
    if script in ("table2", "all"):
        assert f"{'table2 paper=sste':22} S-STE, Table 2: " in listed.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["table2", "tier=huge"], "no tier 'huge' of table2"),
        (["quickstart", "tier=full"], "no tier 'full' of quickstart"),
        (["table2", "paper=nobody"], "no table2 of paper 'nobody'"),
        (["table13", "paper=*"], "no table13 of paper '*'"),
        (["all", "paper=f"], "no all of paper 'f'"),
        (["quickstart", "paper=fst"], "no quickstart of paper 'fst'"),
        (["figure7", "tier=full", "tier=full"], "cannot use 'tier=full'; use paper=NAME"),
        (["figure7", "tier="], "cannot use 'tier='"),
        (["figure7", "full"], "cannot use 'full'"),
        (["table"], "no table 'table'"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_installed(scripts, arguments, says):
    done = scripts(*arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"error: {says}") and done.stderr.count("\n") == 1


def test_what_can_be_made_is_not_refused():
    """Everything that `python -m reproduce` takes, by one shell."""
    tables, taken = read_tables(), []
    for name in sorted({table.command for table in tables} | {"all"}):
        for paper in sorted({f"paper={table.paper}" for table in tables if table.paper} | {""}):
            for tier in [f"tier={tier}" for tier in TIERS] + [""]:
                given = [option for option in (paper, tier) if option]
                try:
                    parse([name, *given], tables)
                except UsageError:
                    continue
                taken.append(" ".join([name, *given]))
    assert len(taken) > 100
    script = f"set -euo pipefail; source {ROOT}/reproduce/setup.sh\n" + "\n".join(
        f"check_arguments {one}" for one in taken
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_active_environment_that_is_passed_by_is_told(clone, tmp_path):
    script = f"source {clone}/reproduce/setup.sh; use_environment '' 'python -m reproduce table2'"
    for active, told in ((tmp_path / "mine", True), (clone / ".venv", False)):
        done = subprocess.run(
            ["bash", "-c", script], env={"PATH": "/usr/bin:/bin", "VIRTUAL_ENV": str(active)},
            capture_output=True, text=True,
        )  # fmt: skip
        said = "using .venv; to use your own: python -m reproduce table2\n"
        assert (said in done.stdout) == told, done.stderr
