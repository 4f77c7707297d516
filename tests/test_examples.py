"""The scripts of examples/ run as their docstrings say, with fewer steps."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
RUN = {
    "train_faster.py": (["--steps", "3"], "s_ste: validation loss"),
    "reproduce_table.py": ([], "Best first:\n  "),
    "compare_method.py": (["--steps", "3", "--seeds", "1"], "| mine "),
    "serve_model.py": (["--steps", "3"], "the same tokens as transformers': True"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One folder for all, so that the embedded text is prepared once."""
    return tmp_path_factory.mktemp("examples")


def test_each_example_is_run_here():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(RUN)


@pytest.mark.parametrize("name", RUN)
def test_an_example_does_what_it_says(name, folder, monkeypatch, capfd):
    options, told = RUN[name]
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    monkeypatch.setattr(sys, "argv", [name, *options])
    monkeypatch.setattr("methods._registered", {})
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert told in capfd.readouterr().out
