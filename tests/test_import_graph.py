import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import import_graph


def test_no_module_imports_itself_by_way_of_others():
    graph = import_graph.imports()
    assert len(graph) > 100 and import_graph.circles(graph) == []
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": {"b"}, "d": set()}
    assert import_graph.circles(graph) == [["b", "c"]]
    assert import_graph.floors(graph | {"c": set()}) == {"a": 3, "b": 2, "c": 1, "d": 1}


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
