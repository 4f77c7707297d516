"""The page of all results: complete, well formed, traceable, nothing in it from elsewhere."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from markupsafe import escape

from experiments.support.checkpoint import write_json
from reproduce.__main__ import main as reproduce
from reproduce.execute.blocks import BLOCKS, EVIDENCE
from reproduce.execute.packed import PLACE, read_packed
from reproduce.judge.claims import read_claims
from reproduce.judge.verdicts import judge_speed
from reproduce.render.report import html, page
from reproduce.specs.table import read_tables


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
    """The page as the command writes it, with a record of one's own beside the committed ones: it
    is outdated, and its name must be escaped."""
    runs = tmp_path_factory.mktemp("work") / "runs"
    own = read_packed(EVIDENCE, "a")["dense", 0] | {"variant": "<b>was"}
    gone = {key: value for key, value in own.items() if key not in PLACE}
    write_json(runs / "evidence" / "a" / "was-seed0.json", gone)
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
    assert len(parsed.of("caption")) == len(parsed.of("table")) > 10
    assert all("scope" in given for given in parsed.of("th"))
    pictures = parsed.of("svg")
    assert all(given.get("aria-hidden") == "true" or given["aria-label"] for given in pictures)
    loading = parsed.of("img", "link", "iframe", "script", "image", "use", "object", "source")
    sources = [given.get(key, "#") for given in loading for key in ("src", "href", "xlink:href")]
    assert all(source.startswith("#") for source in sources)  # nothing comes from elsewhere
    assert "url(" not in text.replace("url(#", "") and "@import" not in text
    assert "left out: block a, &lt;b&gt;was, seeds 0: no block has such a run" in text


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
    assert {path.resolve() for path in page.MEASURED.glob("*/*.csv")} <= files


def test_the_main_figure_as_a_file(tmp_path):
    """SVG is XML, of which a browser shows nothing unless it is well formed; two are the same."""
    paths = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for path in paths:
        assert reproduce(["report", f"figure={path}"]) == 0
    drawn = [path.read_text(encoding="utf-8") for path in paths]
    assert drawn[0] == drawn[1]
    root = ElementTree.fromstring(drawn[0])
    assert root.tag.endswith("svg") and "dense" in "".join(root.itertext())


def test_the_page_opens_with_verdicts_a_range_of_speed_and_the_claims_and_folds_the_rest(text):
    opening, _, rest = text.partition("</header>")
    verdicts = re.findall(r'class="verdict ([\w-]+)"', opening)
    assert len(verdicts) - len(set(verdicts)) == len(read_claims().claims)  # after their counts
    claims = read_claims()
    speeds = [judge_speed(claims, s) for claim in claims.claims for s in claim.measured]
    of_dense = [m for m in speeds if m.lines and not (m.rule.than or m.rule.less)]
    effects = [line.effect for m in of_dense for line in m.lines if not line.why]
    (device,) = {m.device.partition(",")[0] for m in of_dense}
    told = f"{device}: their rows run {min(effects):.2f} to {max(effects):.2f} times as fast as"
    assert told in " ".join(opening.split())
    assert re.search("<table|<h3", rest.partition("<details")[0]) is None


def test_the_shape_of_tables(text):
    """No column is empty, and every run is there."""
    part = between(text, "block-a", "block-a-large")
    head = r"<th scope=\"col\"[^>]*>([^<]*)</th>"
    heads = [one.partition(" ")[0] for one in re.findall(head, part)[:5]]
    assert heads == ["variant", "val_loss", "minus", "share", "verdict"]
    kept = read_packed(EVIDENCE, "a")
    losses = [record["metrics"]["val_loss"] for record in kept.values()]
    assert all(f">{loss:.6f}<" in part for loss in losses) and "evidence/a.jsonl" in part
    assert "share of the gap, g" not in between(text, "block-d", "block-e1")  # it may be zero


def test_a_page_without_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "EVIDENCE", tmp_path / "none")
    told = page.build(tmp_path / "runs", tmp_path)
    assert Page(told).wrong == [] and "no runs yet" in told
