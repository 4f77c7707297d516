"""`python -m reproduce all`: goes on where it was stopped, and past what fails."""

from contextlib import suppress

import pytest

from experiments.support.errors import Terminated
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
def make(tables, monkeypatch, tmp_path):
    """make(**the end of each table by name, if it is not complete) -> (whether all are, the names
    of those that were asked for, the summary)."""
    monkeypatch.setattr(page, "main", lambda runs: print("the page"))

    def made(**ends):
        order = []

        def ended(table, *_):
            order.append(table.name)
            found = ends.get(table.name, Made(2, 2))
            if isinstance(found, BaseException):
                raise found
            return found

        monkeypatch.setattr("reproduce.make.make", ended)
        path, done = tmp_path / "tables" / "all-smoke.md", None
        with suppress(Terminated):
            done = make_all(tables, "smoke", tmp_path)
        return done, order, path.read_text()

    return made


def test_all_tables_and_the_page(make, capsys):
    done, order, summary = make()
    told = capsys.readouterr().out
    assert done is True and order == ["one", "two", "three"]
    assert told.index("[3/3] three") < told.index("the page") < told.index("3 of 3 complete")
    assert summary in told and "| one   | complete | 2 of 2 |     0.0 |" in summary


def test_what_fails_holds_nothing_up_and_what_is_interrupted_is_kept(make):
    failed, bug = Made(reason="it does not fit"), RuntimeError("a\nbug")
    done, _, text = make(one=failed, two=bug, three=Made(5, 3))
    found = [line.split("|")[2].strip() for line in text.splitlines() if "|" in line][2:]
    assert not done and found == ["failed", "failed", "incomplete"]
    assert "- two: RuntimeError: a bug\n" in text and "0 of 3 complete" in text
    assert "| 3 of 5 |" in text
    done, _, text = make(two=Terminated())
    assert done is None and "1 of 3 complete" in text and "two" not in text


def test_it_asks_for_the_papers_tables(tmp_path, capsys):
    tables = read_tables()
    chosen, tier, launch = parse(["all"], tables)
    assert {t.name for t in chosen} == {t.name for t in tables if t.paper}
    assert (tier, launch) == ("smoke", None)
    assert {t.paper for t in parse(["all", "paper=ast"], tables)[0]} == {"ast"}
    assert main(["all", "tier=huge"], runs=tmp_path) == 2
    assert "no tier 'huge' of all; choose of smoke, mini, full" in capsys.readouterr().err
