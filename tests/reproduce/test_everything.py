"""`python -m reproduce all`: goes on where it was stopped, and past what fails."""

import pytest

from experiments.support.errors import Terminated
from reproduce import make
from reproduce.__main__ import main, parse
from reproduce.make import Made, make_all
from reproduce.render.report import page
from reproduce.specs.table import read_tables

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

    def ended(table, tier, runs, launch):
        found.order.append(table.name)
        if isinstance(found[table.name], BaseException):
            raise found[table.name]
        return found[table.name]

    monkeypatch.setattr(make, "make", ended)
    monkeypatch.setattr(page, "main", lambda runs: print("the page"))
    return found


def summary(runs):
    return (runs / "tables" / "all-smoke.md").read_text()


def test_all_tables_and_the_page(tables, outcomes, tmp_path, capsys):
    assert make_all(tables, "smoke", tmp_path) is True
    told = capsys.readouterr().out
    assert outcomes.order == ["one", "two", "three"]
    assert told.index("[3/3] three") < told.index("the page") < told.index("3 of 3 complete")
    assert summary(tmp_path) in told
    assert "| one   | complete | 2 of 2 |     0.0 |" in summary(tmp_path)


def test_what_fails_holds_nothing_up(tables, outcomes, tmp_path):
    outcomes |= {"one": Made(reason="it does not fit"), "two": RuntimeError("a\nbug")}
    outcomes["three"] = Made(5, 3)
    assert make_all(tables, "smoke", tmp_path) is False
    text = summary(tmp_path)
    found = [line.split("|")[2].strip() for line in text.splitlines() if "|" in line][2:]
    assert found == ["failed", "failed", "incomplete"]
    assert "- two: RuntimeError: a bug\n" in text and "0 of 3 complete" in text
    assert "| 3 of 5 |" in text


def test_an_interruption_keeps_what_was_written(tables, outcomes, tmp_path):
    outcomes["two"] = Terminated()
    with pytest.raises(Terminated):
        make_all(tables, "smoke", tmp_path)
    assert "1 of 3 complete" in summary(tmp_path) and "two" not in summary(tmp_path)


def test_it_asks_for_the_papers_tables(tmp_path, capsys):
    tables = read_tables()
    chosen, tier, launch = parse(["all"], tables)
    assert {t.name for t in chosen} == {t.name for t in tables if t.paper}
    assert (tier, launch) == ("smoke", None)
    assert {t.paper for t in parse(["all", "paper=ast"], tables)[0]} == {"ast"}
    assert main(["all", "tier=huge"], runs=tmp_path) == 2
    assert "no tier 'huge' of all; choose of smoke, mini, full" in capsys.readouterr().err
