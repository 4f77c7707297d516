"""The README's table of the papers' statements and what was measured of them."""

from reproduce import paper_speeds
from reproduce.paper_speeds import Gain, Ranking


def test_the_readme_has_the_measured_numbers():
    text = paper_speeds.README.read_text(encoding="utf-8").partition(paper_speeds.BEGIN)[2]
    written = text.partition(paper_speeds.END)[0]
    assert written == paper_speeds.table(), "run python -m reproduce.paper_speeds"


def test_only_the_table_of_the_readme_is_written(monkeypatch, tmp_path):
    readme, begin, end = tmp_path / "README.md", paper_speeds.BEGIN, paper_speeds.END
    monkeypatch.setattr(paper_speeds, "README", readme)
    readme.write_text(f"before\n{begin}old\n{end}after\n", encoding="utf-8")
    assert paper_speeds.main() == 0
    written = readme.read_text(encoding="utf-8")
    assert written == f"before\n{begin}{paper_speeds.table()}{end}after\n"


def test_a_gain_an_order_and_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(paper_speeds, "MEASURED", tmp_path)
    paper = {"a": 1.2, "b": 1.2, "c": 1.25, "d": 1.5, "half": 1.5, "nowhere": 1.5}
    monkeypatch.setattr(paper_speeds, "published", lambda cell: paper.get(cell[1]))
    (tmp_path / "t-full.csv").write_text(
        "method,tier,speed: mean\na,full,1.11\nb,full,1.05\nc,full,0.99\nd,full,\nhalf,full,1.25\n"
        "ours alone,full,1.1\n"
    )

    def gain(*rows, **more):
        return Gain("x", tuple(("t", row, "speed") for row in rows), **more).line()

    assert gain("a") == ["x", "1.200", "1.110", "holds"]
    assert gain("half")[-1] == "holds"
    assert gain("b")[-1] == "less than half of the gain"
    assert gain("c")[-1] == "**no gain**" and gain("c", smaller=True)[-1] == "holds"
    assert gain("d") == gain("nowhere") == ["x", "1.500", "-", "not measured"]
    assert gain("unknown") == ["x", "-", "-", "not measured"]
    assert gain("ours alone") == ["x", "-", "1.100", "not measured"]
    assert gain("c", "c", paper=(("t", "d", "speed"),))[1:] == ["1.500", "1.000", "**no gain**"]
    assert gain("c", "a") == ["x", "1.042", "0.892", "**no gain**"]
    assert gain("b", "a") == ["x", "1.000", "0.946", "a loss in both"]
    assert gain("c", "d", smaller=True) == ["x", "0.833", "-", "not measured"]
    assert gain("a", paper=(("t", "d", "speed"),))[1] == "1.500"
    assert Gain("x", (("none", "a", "speed"),)).line()[-1] == "not measured"

    def order(first, second):
        return Ranking("x", (("t", first, "speed"), ("t", second, "speed"))).line()

    assert order("a", "b") == ["x", "1.200 / 1.200", "1.110 / 1.050", "holds"]
    assert order("b", "a")[-1] == "**the other way round**"
    assert order("a", "a")[-1] == "**no difference**"
    assert order("a", "d") == ["x", "1.200 / 1.500", "1.110 / -", "not measured"]
    assert order("d", "a")[-1] == "not measured"


def test_every_statement_is_of_a_published_value():
    for statement in paper_speeds.STATEMENTS:
        told, paper, *_ = statement.line()
        assert "-" not in paper, told
    assert paper_speeds.published(("torchao_table5", "2:4, MLP", "speed-up")) is None
