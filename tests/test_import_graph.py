import importlib.util
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
