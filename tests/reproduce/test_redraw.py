"""Figures of measured values: drawn from a table's CSV, with intervals and on axes that compare."""

import shutil

import pytest
from matplotlib.figure import Figure as Canvas

from experiments.support.errors import UserError
from reproduce import redraw
from reproduce.figure import Value, draw_values, limits, values
from reproduce.paper_speeds import MEASURED
from reproduce.reading import read_rows, read_tables

TABLES = {table.name: table for table in read_tables()}
COMMITTED = {p.stem.removesuffix("-full"): p for p in sorted(MEASURED.glob("*-full.csv"))}


def test_every_committed_measurement_has_a_figure_with_a_value_in_each_panel():
    assert COMMITTED.keys() <= TABLES.keys()
    assert not [table.title for table in TABLES.values() if len(f"# {table.title}") > 80]
    for name, path in COMMITTED.items():
        assert path.with_suffix(".png").exists()
        text = path.with_suffix(".md").read_text(encoding="utf-8")
        assert max(map(len, text.splitlines())) <= 80, name
        table = TABLES[name]
        found = values(table, redraw.summary(path))
        wanted = table.figure.columns or [c.label for c in table.columns if c.published]
        assert {v.quantity for v in found if v.source == "ours"} == set(wanted) - {"theoretical"}


def test_a_changed_digit_of_a_committed_measurement_is_refused(tmp_path):
    paths = sorted(MEASURED.glob("*.csv"))
    assert paths and all(read_rows(path) for path in paths)
    shutil.copy(MEASURED / "SHA256SUMS", tmp_path)
    path = tmp_path / paths[0].name
    path.write_bytes(paths[0].read_bytes().replace(b"1", b"2", 1))
    with pytest.raises(UserError, match=rf"{path.name} does not fit SHA256SUMS; restore it"):
        read_rows(path)


def test_values_have_their_interval_and_second_hand_ones_say_so():
    found = values(TABLES["slope_figureB2"], redraw.summary(COMMITTED["slope_figureB2"]))
    assert {value.source for value in found} == {"paper (second-hand)", "ours"}
    for value in found:
        own = value.source == "ours"
        assert not own or value.low < value.value < value.high
        assert own or value.low is value.high is None
    primary = values(TABLES["slope_tableB1"], redraw.summary(COMMITTED["slope_tableB1"]))
    assert {value.source for value in primary} == {"paper", "ours"}


def test_panels_of_a_unit_have_one_axis_unless_all_would_lie_at_its_foot():
    data = [
        Value("dense", "a", "paper", 9.0, 8.0, 10.0),
        Value("dense", "a", "ours", 99.0, 98.0, 100.0),
        *(Value("2:4", "a", source, n) for source, n in (("paper", 20.0), ("ours", 40.0))),
        *(Value("packing", "a", source, n) for source, n in (("paper", 1.0), ("ours", 4.9))),
        Value("speed", "a", "ours", 1.5),
    ]
    units = {"dense": "ms", "2:4": "ms", "packing": "ms", "speed": "x"}
    found = limits(data, units, from_zero=True)
    assert found["dense"] == found["2:4"] == (0.0, pytest.approx(105.0))
    assert found["packing"] == (0.0, pytest.approx(1.05 * 4.9))
    assert found["speed"] == (0.0, pytest.approx(1.05 * 1.5))
    low, high = limits(data, units, from_zero=False)["2:4"]
    assert (low, high) == (pytest.approx(8 - 4.6), pytest.approx(100 + 4.6))


@pytest.mark.parametrize("lines", [False, True])
def test_a_second_hand_value_looks_other_than_a_confirmed_one(lines):
    axes = Canvas().subplots()
    data = [
        Value("x", "a", "paper", 1.0),
        Value("x", "b", "paper (second-hand)", 2.0),
        Value("x", "a", "ours", 3.0, 2.5, 3.5),
        Value("x", "b", "ours", 4.0),
    ]
    draw_values(axes, data, lines)
    handles, labels = axes.get_legend_handles_labels()
    assert labels == ["paper", "paper (second-hand)", "ours"]
    if lines:
        assert [h.get_markerfacecolor() == "white" for h in handles] == [False, True, False]
    else:
        assert [bool(h.patches[0].get_hatch()) for h in handles] == [False, True, False]
    [whisker] = [line for line in axes.lines if line not in handles]
    assert list(whisker.get_ydata()) == [2.5, 3.5]


def test_a_figure_is_drawn_from_a_csv(tmp_path):
    redraw.redraw(TABLES["slope_tableB1"], COMMITTED["slope_tableB1"], tmp_path / "b.png")
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.png"]
