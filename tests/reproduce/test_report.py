"""The page of all results: complete, well formed, traceable, nothing in it from elsewhere."""

import itertools
import math
import re
from html.parser import HTMLParser
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from markupsafe import escape

from experiments.runs.comparison import Summary
from experiments.runs.stats import mean, paired_interval
from experiments.support.checkpoint import write_json
from reproduce.__main__ import main as reproduce
from reproduce.execute.blocks import BLOCKS, EVIDENCE, read_block
from reproduce.execute.packed import read_packed
from reproduce.judge.claims import Margin, read_claims
from reproduce.render.report import blocks, figures, html, page, tables
from reproduce.render.report.gather import Shown
from reproduce.specs.table import read_tables

MINUS = figures.MINUS


class Page(HTMLParser):
    """Elements with their attributes, and what is wrong with their nesting."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.wrong = [], [], []
        self.feed(text)
        self.close()
        self.wrong += [f"<{name}> stays open" for name in self.open]

    def handle_starttag(self, name, attributes):
        self.elements.append((name, dict(attributes)))
        if name not in ("meta", "wbr"):
            self.open.append(name)

    def handle_startendtag(self, name, attributes):
        self.elements.append((name, dict(attributes)))

    def handle_endtag(self, name):
        if not self.open or self.open.pop() != name:
            self.wrong.append(f"</{name}> at {self.getpos()}")

    def of(self, *names):
        return [given for name, given in self.elements if name in names]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The page as the command writes it, with runs of one's own beside the committed ones: one that
    said what must be escaped, and an outdated one."""
    runs = tmp_path_factory.mktemp("work") / "runs"
    log = runs / "gpt2-stdlib" / "a_variant_that_failed" / "seed0" / "output.txt"
    log.parent.mkdir(parents=True)
    log.write_text("step 1\n<script>alert('&')</script>\n")
    gone = read_packed(EVIDENCE, "a")["dense", 0][1] | {"variant": "a_variant_that_was"}
    write_json(runs / "evidence" / "a" / "a_variant_that_was-seed0.json", gone)
    assert reproduce(["report"], runs=runs) == 0
    return runs / "report" / "index.html"


@pytest.fixture(scope="module")
def text(made):
    return made.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def parsed(text):
    return Page(text)


def between(text, start, end):
    """The part of the page between two ids."""
    return text.partition(f'id="{start}"')[2].partition(f'id="{end}"')[0]


def test_it_is_well_formed_and_readers_of_all_kinds_find_their_way(parsed, text):
    assert parsed.wrong == []
    ids = [given["id"] for _, given in parsed.elements if "id" in given]
    assert len(ids) == len(set(ids))
    levels = [int(name[1]) for name, _ in parsed.elements if re.fullmatch("h[1-6]", name)]
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    for landmark in ("header", "nav", "main", "footer"):
        assert len(parsed.of(landmark)) == 1
    assert parsed.of("html")[0]["lang"] == "en"
    assert parsed.of("a")[0] == {"class": "skip", "href": "#claims"}
    assert len(parsed.of("caption")) == len(parsed.of("table")) > 10
    assert all("scope" in given for given in parsed.of("th"))
    pictures = parsed.of("svg")
    assert all(given.get("aria-hidden") == "true" or given["aria-label"] for given in pictures)
    loading = parsed.of("img", "link", "iframe", "script", "image", "use", "object", "source")
    sources = [given.get(key, "#") for given in loading for key in ("src", "href", "xlink:href")]
    assert all(source.startswith("#") for source in sources)  # nothing comes from elsewhere
    assert "url(" not in text.replace("url(#", "") and "@import" not in text


def test_every_claim_table_and_block_is_there_with_links_that_lead_somewhere(made, parsed, text):
    ids, rules = {given.get("id") for _, given in parsed.elements}, read_claims()
    assert {f"claim-{claim.id}" for claim in rules.claims} <= ids
    assert {f"table-{html.slug(table.name)}" for table in read_tables()} <= ids
    for block in {path.stem for path in EVIDENCE.glob("*.jsonl")}:
        assert not (BLOCKS / f"{block}.yaml").is_file() or f"block-{html.slug(block)}" in ids
    for said in [*(c.says for c in rules.claims), *(r.defect for r in rules.released)]:
        assert escape(said.strip()) in text
    links = parsed.of("a")
    assert {a["href"][1:] for a in links if a["href"].startswith("#")} - ids == set()
    files = {(made.parent / a["href"]).resolve() for a in links if "data-source" in a}
    assert {path for path in files if not path.is_file()} == set()
    assert (EVIDENCE / "a.jsonl").resolve() in files
    assert {path.resolve() for path in tables.MEASURED.glob("*/*.csv")} <= files


def test_what_one_s_own_runs_said_is_escaped_and_what_is_left_out_is_told(text):
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(&#39;&amp;&#39;)&lt;/script&gt;" in text
    assert "a_variant_that_was-seed0.json" in text


def test_the_main_figure_as_a_file(tmp_path):
    """SVG is XML, of which a browser shows nothing unless it is well formed; two are the same."""
    paths = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for path in paths:
        assert reproduce(["report", f"figure={path}"]) == 0
    drawn = [path.read_text(encoding="utf-8") for path in paths]
    assert drawn[0] == drawn[1]
    root = ElementTree.fromstring(drawn[0])
    assert root.tag.endswith("svg") and "dense" in "".join(root.itertext())


def test_the_variants_of_tables_are_those_of_blocks():
    for table in read_tables():
        places = {place.split("/")[0]: place for place in table.block_variants.values()}
        assert len(places) <= 1
        assert table.block_variants.keys() <= {row.label for row in table.rows}, table.name
        for block, variant in (place.split("/") for place in table.block_variants.values()):
            assert variant in read_block(block).variants, f"{table.name}: {block}/{variant}"


def test_each_fp8_variant_is_compared_with_its_method_in_bf16(text):
    losses = {key: r["metrics"]["val_loss"] for key, (_, r) in read_packed(EVIDENCE, "fp8").items()}
    seeds = [seed for variant, seed in losses if variant == "ste"]
    differences = [losses["ste_fp8", seed] - losses["ste", seed] for seed in seeds]
    low, high = paired_interval(differences)
    told = f"{mean(differences):+.4f} [{low:+.4f}, {high:+.4f}] (n=3)</td><td>ste</td>"
    part = between(text, "block-fp8", "variant-fp8-ste-fp8-delayed")
    assert told.replace("-", MINUS) in part
    assert "share of the gap, g" not in part  # a column that would be empty


def test_an_interval_beyond_the_axis_ends_there_and_a_value_beyond_it_is_an_arrow():
    of = {"a": (0.1, 0.05, 0.15), "b": (0.1, 0.04, 0.16), "c": (0.2, -9.0, 9.4), "d": (9, 8, 10)}
    rows = [Summary(name, 3, 1.0, 0.1, 3, *effect) for name, effect in of.items()]
    low, high = figures._reach(rows, {}, 0.1)
    assert -0.1 < low < 0 < 0.2 < high < 0.3
    drawn = figures.forest(rows, {}, "dense", "a", 0.1, 0.25, "val_loss")
    assert "c +0.2000 [-9.0000, +9.4000] (n=3)" in drawn and "share of the gap" in drawn
    flat = figures.forest(rows, {}, "dense", "a", math.nan, 0.25, "val_loss")
    assert "share of the gap" not in flat


@pytest.mark.parametrize("half", [0.0, 2.0])
def test_the_best_variant_is_on_top_and_a_gap_that_may_be_zero_has_no_half_width_baseline(half):
    """An accuracy, in points, at four seeds; `half` is what half the width costs."""
    noise = [0.3, -0.3, 0.2, -0.2]
    cost = {"dense": 0.0, "half": half, "worst": 3.0, "best": -1.0}
    variants = {
        variant: {
            seed: SimpleNamespace(
                record={"metrics": {"top1": 80 - lost - n * (variant != "dense")}}
            )
            for seed, n in enumerate(noise)
        }
        for variant, lost in cost.items()
    }
    methods = {variant: [f"method={variant}"] for variant in ("dense", "half", "worst", "best")}
    block = SimpleNamespace(name="x", against={}, variants=methods)
    shown = Shown(block, "metrics.top1", Margin(0.25, "dense", "half"), variants)
    drawn = blocks.difference_figure(shown)
    assert re.findall(r">(best|half|worst)</text>", drawn) == ["best", "half", "worst"]
    assert (shown.gap == pytest.approx(-2.0)) if half else math.isnan(shown.gap)
    assert ("is the half-width baseline" in drawn) is bool(half)


def test_the_shape_of_tables(text):
    """What is the same for all variants is said once; a paper's table has the paper's row above
    ours, whose cells have the verdicts; and no column is empty."""
    part = between(text, "block-a", "block-a-large")
    cards = "NVIDIA H200, NVIDIA H100 80GB HBM3"
    assert f"<span>Variants of block a (tier mini, on {cards})</span>" in part
    head = r"<th scope=\"col\"[^>]*>([^<]*)</th>"
    assert [one.partition(" ")[0] for one in re.findall(head, part)[:6]] == [
        "variant", "ours", "minus", "share", "verdict", "source",
    ]  # fmt: skip
    main = read_block("a")
    left = len(main.variants) * len(main.seeds) - len(read_packed(EVIDENCE, "a"))
    assert re.findall(r"make the (\d+) missing runs:", part) == [str(left)] * bool(left)
    part = between(text, "table-slope-table1", "table-slope-table2")
    heads = ["method", "source", "training", "inference", "inference, r=1.56%"]
    assert re.findall(head, part)[:5] == heads
    theirs, ours = re.findall(r"<tr><th scope=\"row\">OPT-66B / SLoPe</th>.*?</tr>", part)
    assert "paper" in theirs and "1.20x" in theirs and "verdict" not in theirs
    assert "1.26 [1.26, 1.27]x" in ours and "confirmed" in ours
    part = between(text, "table-slope-table4", "table-slope-table5")  # by the records of a block
    assert "made: tier mini" in part and "evidence/a.jsonl" in part


def test_tables_that_were_made_here_are_shown_from_their_runs(tmp_path):
    """One from the records of a block, one without a finished run yet."""
    specs = {table.name: table for table in read_tables()}
    (tmp_path / "tables").mkdir()
    write_json(tmp_path / "tables" / "sste_table4-smoke.json", {"jobs": 1, "done": 0})
    smoke, mini = tables.found(specs["sste_table4"], tmp_path)
    assert (smoke.tier, smoke.device, smoke.revisions, smoke.where) == (
        "smoke",
        "",
        "-",
        "tier smoke",
    )
    assert mini.where == "tier mini on NVIDIA H200" and len(mini.revisions) >= 7
    assert mini.has_values and "Nothing is trained for this tier" in "".join(mini.rendered.header)


def test_arguments_that_mean_nothing_and_a_page_without_runs(capsys, tmp_path, monkeypatch):
    for options in (["picture=x"], ["figure="], ["figure=a", "figure=b"]):
        assert reproduce(["report", *options], runs=tmp_path) == 2
        assert "figure=FILE" in capsys.readouterr().err
    monkeypatch.setattr(page, "EVIDENCE", tmp_path / "none")
    told = page.build(tmp_path / "runs", tmp_path)
    assert Page(told).wrong == [] and "no runs yet" in told
