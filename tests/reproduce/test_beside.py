"""The README's table of the papers' statements and what was measured of them."""

from reproduce import beside
from reproduce.beside import Gain, Ranking


def test_the_readme_has_the_measured_numbers():
    found = beside.README.read_text(encoding="utf-8").partition(beside.BEGIN)[2]
    assert found.partition(beside.END)[0] == beside.table(), "run python -m reproduce.beside"


def test_a_gain_an_order_and_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(beside, "MEASURED", tmp_path)
    (tmp_path / "t-full.csv").write_text(
        "method,tier,speed: mean,speed: paper\n"
        "a,full,1.11,1.2\nb,full,1.05,1.2\nc,full,0.99,1.25\nd,full,,1.5\n"
    )

    def verdict(row, **more):
        return Gain("x", ("t", row, "speed"), **more).line()[-1]

    assert Gain("x", ("t", "a", "speed")).line() == ["x", "1.200", "1.110", "holds"]
    assert verdict("b") == "less than half of the gain"
    assert verdict("c") == "**no gain**" and verdict("c", smaller=True) == "holds"
    assert Gain("x", ("t", "d", "speed")).line() == ["x", "1.500", "-", "not measured"]
    assert verdict("nowhere") == verdict("d") == "not measured"
    assert Gain("x", ("none", "a", "speed")).line()[-1] == "not measured"

    def order(first, second):
        return Ranking("x", (("t", first, "speed"), ("t", second, "speed"))).line()

    assert order("a", "b") == ["x", "1.200 / 1.200", "1.110 / 1.050", "holds"]
    assert order("b", "a")[-1] == "**the other way round**"
    assert order("a", "a")[-1] == "**no difference**"
    assert order("a", "d")[-1] == "not measured"


def test_every_statement_names_cells_that_a_table_has():
    """Measured tables come and go; the papers' values are looked up where the specs have them."""
    from reproduce.reading import read_tables
    from reproduce.render import render

    rendered = {t.name: render(t, "full", []).summary for t in read_tables() if t.driver == "bench"}
    for statement in beside.STATEMENTS:
        cells = statement.cells if isinstance(statement, Ranking) else (statement.cell,)
        papers = cells if isinstance(statement, Ranking) else (statement.paper or statement.cell,)
        for table, method, column in papers:
            (line,) = [line for line in rendered[table] if line["method"] == method]
            assert f"{column}: paper" in line
        for table, method, _ in cells:
            assert any(line["method"] == method for line in rendered[table])
