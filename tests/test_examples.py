"""The scripts of examples/ run as their docstrings say, with fewer steps."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("name", [path.name for path in EXAMPLES.glob("*.py")])
def test_an_example_ends_sparse(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, "--steps", "3"])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    last = capsys.readouterr().out.splitlines()[-1]
    assert "50% of the f" in last
    assert ", 0 groups of four have more than two" in last
