"""`python -m reproduce all`: goes on where it was stopped, and past what fails."""

import json

import pytest

from experiments.support.errors import Terminated
from reproduce import everything
from reproduce.__main__ import main, parse
from reproduce.making import Made
from reproduce.reading import read_tables
from reproduce.report import page

NAMES = ["one", "two", "three", "four"]


@pytest.fixture
def tables(small):
    """Four tables, the last of which has no such tier."""
    made = [small(name=name, paper="fst", number=str(n)) for n, name in enumerate(NAMES, 1)]
    made[3].tiers["smoke"].unavailable = "nobody has the data"
    return made


@pytest.fixture
def outcomes(monkeypatch):
    """The end of each table, by name; `.order` tells which were asked for."""

    class Outcomes(dict):
        def __init__(self, found):
            super().__init__(found)
            self.order = []

    found = Outcomes({name: Made(2, 2) for name in NAMES})

    def attempt(table, tier, runs, how):
        found.order.append(table.name)
        if isinstance(found[table.name], BaseException):
            raise found[table.name]
        return found[table.name]

    monkeypatch.setattr(everything, "attempt", attempt)
    monkeypatch.setattr(page, "main", lambda runs: print("the page"))
    return found


def summary(runs):
    content = json.loads((runs / "tables" / "all-smoke.json").read_text())
    return {line["spec"]: line for line in content["tables"]}


def test_all_tables_and_the_page(tables, outcomes, tmp_path, capsys):
    assert everything.run(tables, "smoke", tmp_path) is True
    told = capsys.readouterr().out
    assert outcomes.order == ["one", "two", "three"]
    assert told.index("[3/3] three") < told.index("the page") < told.index("3 of 3 complete")
    lines = summary(tmp_path)
    assert [line["status"] for line in lines.values()] == ["complete"] * 3 + ["not offered"]
    assert lines["four"]["reason"] == "nobody has the data"
    text = (tmp_path / "tables" / "all-smoke.md").read_text()
    assert text in told
    assert "| one   | complete | 2 of 2 |     0.0 |" in text
    assert "- four: not offered: nobody has the data" in text


def test_what_fails_holds_nothing_up(tables, outcomes, tmp_path, capsys):
    outcomes |= {"one": Made(reason="it does not fit"), "two": RuntimeError("a\nbug")}
    outcomes["three"] = Made(5, 3)
    assert everything.run(tables, "smoke", tmp_path) is False
    lines = summary(tmp_path)
    assert [line["status"] for line in lines.values()][:3] == ["failed", "failed", "incomplete"]
    assert lines["two"]["reason"] == "RuntimeError: a bug"
    assert (lines["three"]["done"], lines["three"]["jobs"]) == (3, 5)
    assert "0 of 3 complete" in capsys.readouterr().out


def test_an_interruption_keeps_what_was_written(tables, outcomes, tmp_path, monkeypatch):
    clock = iter(range(0, 6000, 60))
    monkeypatch.setattr(everything.time, "monotonic", lambda: next(clock))
    outcomes["two"] = Terminated()
    with pytest.raises(Terminated):
        everything.run(tables, "smoke", tmp_path)
    before = summary(tmp_path)
    assert [line["status"] for line in before.values()] == [
        "complete", "interrupted", "not begun", "not offered",
    ]  # fmt: skip
    outcomes["two"] = Made(2, 2)
    assert everything.run(tables, "smoke", tmp_path) is True
    for name in ("one", "two"):  # those of both calls
        assert summary(tmp_path)[name]["minutes"] == before[name]["minutes"] + 1


def test_a_call_for_some_keeps_the_lines_of_the_others(tables, outcomes, tmp_path):
    outcomes["one"] = Made(5, 3)
    everything.run(tables, "smoke", tmp_path)
    before = summary(tmp_path)
    assert everything.run(tables[1:2], "smoke", tmp_path) is True
    after = summary(tmp_path)
    assert list(after) == list(before) and after["one"] == before["one"]
    assert "2 of 3 complete" in (tmp_path / "tables" / "all-smoke.md").read_text()


def test_it_asks_for_the_papers_tables(tmp_path, capsys):
    tables = read_tables()
    assert {t.name for t in parse(["all"], tables).tables} == {t.name for t in tables if t.paper}
    assert {t.paper for t in parse(["all", "paper=ast"], tables).tables} == {"ast"}
    assert main(["all", "tier=huge"], runs=tmp_path) == 2
    assert "no tier 'huge' of all; choose of smoke, mini, full" in capsys.readouterr().err
