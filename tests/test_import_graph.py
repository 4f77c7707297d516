import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def tool():
    path = Path(__file__).with_name("import_graph.py")
    spec = importlib.util.spec_from_file_location("import_graph", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_module_imports_itself_by_way_of_others(tool):
    graph = tool.imports()
    assert len(graph) > 100
    assert tool.circles(graph) == []


def test_a_circle_is_found(tool):
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}
    assert tool.circles(graph) == [["b", "c"]]


def test_floors_by_hand(tool):
    assert tool.floors({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {"a": 3, "b": 2, "c": 1}


@pytest.mark.parametrize(
    ("hidden", "imported"),
    [("models", "experiments.plan"), ("methods", "experiments"), ("experiments", "reproduce")],
)
def test_a_package_of_the_user_that_hides_one_of_ours_is_named(hidden, imported, tmp_path):
    (tmp_path / hidden).mkdir()
    (tmp_path / hidden / "__init__.py").touch()
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", f"import {imported}"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"},
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    told = f"ImportError: import {hidden} finds {tmp_path / hidden}, which hides sparse24's"
    assert done.returncode and told in done.stderr
