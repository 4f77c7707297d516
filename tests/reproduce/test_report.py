"""The page of all results: complete, well formed, traceable, nothing in it from elsewhere."""

import copy
import itertools
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments.runs.comparison import Summary
from experiments.runs.stats import mean, paired_interval
from experiments.support.checkpoint import read_sealed, write_json
from reproduce import verdicts
from reproduce.__main__ import main as reproduce
from reproduce.blocks import BLOCKS, EVIDENCE, read_block
from reproduce.claims import read_claims
from reproduce.reading import read_tables
from reproduce.records import read_evidence
from reproduce.report import blocks, claims, figures, html, page, tables
from reproduce.report.gather import Shown
from reproduce.report.html import tag
from reproduce.report.links import Links


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
        if name not in html.VOID:
            self.open.append(name)

    def handle_endtag(self, name):
        if not self.open or self.open.pop() != name:
            self.wrong.append(f"</{name}> at {self.getpos()}")

    def of(self, *names):
        return [given for name, given in self.elements if name in names]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The page as the command writes it, beside a run that said what must be escaped."""
    runs = tmp_path_factory.mktemp("work") / "runs"
    log = runs / "evidence" / "logs" / "a" / "an_arm_that_failed-seed0.txt"
    log.parent.mkdir(parents=True)
    log.write_text("step 1\n<script>alert('&')</script>\n")
    log.with_name("dense-seed0.txt").write_text("made again, for others to start from\n")
    record = read_sealed(EVIDENCE / "a" / "dense-seed0.json")
    gone = copy.deepcopy(record)
    gone["arm"] = "an_arm_that_was"
    write_json(runs / "evidence" / "a" / "an_arm_that_was-seed0.json", gone)
    assert reproduce(["report"], runs=runs) == 0
    return runs / "report" / "index.html"


@pytest.fixture(scope="module")
def text(made):
    return made.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def parsed(text):
    return Page(text)


def test_it_is_well_formed(parsed):
    assert parsed.wrong == []
    ids = [given["id"] for _, given in parsed.elements if "id" in given]
    assert len(ids) == len(set(ids))
    assert [name for name, _ in parsed.elements].count("h1") == 1
    levels = [int(name[1]) for name, _ in parsed.elements if re.fullmatch("h[1-6]", name)]
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_every_claim_table_and_block_is_there(parsed, text):
    ids = {given.get("id") for _, given in parsed.elements}
    rules = read_claims()
    assert {f"claim-{claim.id}" for claim in rules.claims} <= ids
    for name in tables.MEASURED.glob("*/*.md"):
        assert f"table-{html.slug(name.stem.rpartition('-')[0])}" in ids
    for block in {path.parent.name for path in EVIDENCE.glob("*/*.json")}:
        assert not (BLOCKS / f"{block}.yaml").is_file() or f"block-{html.slug(block)}" in ids
    for said in [*(c.says for c in rules.claims), *(r.defect for r in rules.released)]:
        assert html.text(said.strip()) in text


def test_every_number_leads_to_a_file_that_exists(made, parsed):
    sources = [given["href"] for given in parsed.of("a") if "data-source" in given]
    there = {(made.parent / href).resolve() for href in sources}
    assert {path for path in there if not path.is_file()} == set()
    assert {path.resolve() for path in EVIDENCE.glob("a/*.json")} <= there
    assert {path.resolve() for path in tables.MEASURED.glob("*/*.csv")} <= there


def test_links_within_the_page_lead_somewhere(parsed):
    ids = {given.get("id") for _, given in parsed.elements}
    within = {given["href"][1:] for given in parsed.of("a") if given["href"].startswith("#")}
    assert within - ids == set()


def test_nothing_is_loaded_from_elsewhere(parsed, text):
    loading = parsed.of("img", "link", "iframe", "script", "image", "use", "object", "source")
    assert [given for given in loading if {"src", "href", "xlink:href"} & given.keys()] == []
    assert "url(" not in text and "@import" not in text


def test_readers_of_all_kinds(parsed):
    assert parsed.of("html")[0]["lang"] == "en"
    for landmark in ("header", "nav", "main", "footer"):
        assert len(parsed.of(landmark)) == 1
    first = parsed.of("a")[0]
    assert first["class"] == "skip" and first["href"] == "#claims"
    assert len(parsed.of("caption")) == len(parsed.of("table")) > 10
    assert all("scope" in given for given in parsed.of("th"))
    pictures = parsed.of("svg")
    hidden = [given for given in pictures if given.get("aria-hidden") == "true"]
    named = [given for given in pictures if "aria-labelledby" in given]
    assert len(hidden) + len(named) == len(pictures)
    ids = {given.get("id") for _, given in parsed.elements}
    assert {name for given in named for name in given["aria-labelledby"].split()} <= ids


def test_effects_of_too_few_seeds_are_shown_as_preliminary(tmp_path):
    values = {
        key: {seed: record for seed, record in seeds.items() if seed < 2}
        for key, seeds in read_evidence(EVIDENCE, only={"a"}).values.items()
    }
    text = claims.section(verdicts.content(read_claims(), values), set(), Links(tmp_path))
    assert '<td class="number">so far ' in text
    assert "and is preliminary" in text


def test_what_runs_said_is_escaped_and_what_is_left_out_is_told(text):
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(&#x27;&amp;&#x27;)&lt;/script&gt;" in text
    assert "an_arm_that_was-seed0.json" in text
    assert "made again, for others to start from" not in text


def test_runs_of_one_s_own_and_several_blocks(tmp_path):
    """Two trainings beside a second block, which has block a's figures under its own name."""
    runs = tmp_path / "runs"
    for method, loss in (("dense", 3.0), ("<b>", 3.5)):
        config = {"seed": 0, "train": {"steps": 1}, "method": {"name": method}}
        config |= {"model": {"name": "m"}, "data": {"name": "d", "source": "d"}}
        result = {"config": config, "metrics": {"val_loss": loss}, "config_hash": method}
        result |= {"schema": 1, "converted": [], "steps": 1, "tokens": 1, "corpus_hash": "c"}
        write_json(runs / "m-d" / method.strip("<>") / "seed0" / "result.json", result)
    write_json(runs / "broken" / "x" / "seed0" / "result.json", {})
    for run in read_block("c").runs(tmp_path):
        if run.arm in ("dense", "half", "s_ste") and run.seed < 2:
            record = {
                **read_sealed(EVIDENCE / "a" / f"{run.arm}-seed{run.seed}.json"),
                "block": "c",
                "overrides": run.job.overrides,
                "config_hash": run.digest(),
            }
            record["metrics"]["val_top1"] = -record["metrics"]["val_loss"]
            write_json(run.file(runs / "evidence"), record)
    told = page.build(runs, runs / "report")
    parsed = Page(told)
    assert parsed.wrong == []
    assert "+0.5000" in told and "&lt;b&gt;" in told and "m-d/b/seed0/result.json" in told
    assert f"{runs / 'broken'}" in told.partition("that cannot be shown")[2]
    assert "The same arms in several blocks" in told


def test_elements():
    assert tag("p", "a < b", ["&", tag("b", 1)], None, class_="x", hidden=True, id=None) == (
        '<p class="x" hidden>a &lt; b&amp;<b>1</b></p>'
    )
    assert tag("meta", name='"') == '<meta name="&quot;">'
    assert figures.badge("refuted").endswith("refuted</span>")
    shapes = {str(figures.SHAPES[verdict]()) for verdict in figures.SHAPES}
    assert len(shapes) == 6  # told apart without colour


def test_scale_and_ticks():
    assert figures.Scale(0, 2, 10, 30)(1) == 20
    assert figures.Scale(0.01, 1, 0, 100, log=True)(0.1) == 50
    assert figures.Scale(-0.02, 0.11, 0, 1).ticks() == [0.0, 0.05, 0.1]
    assert figures.Scale(0.0005, 0.2, 0, 1, log=True).ticks() == [0.001, 0.01, 0.1]


def test_the_main_figure_as_a_file(tmp_path):
    """SVG is XML: a browser shows nothing of one that is not well formed."""
    from xml.etree import ElementTree

    path = tmp_path / "figure.svg"
    assert reproduce(["report", f"figure={path}"]) == 0
    root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    assert root.tag.endswith("svg") and "dense" in "".join(root.itertext())
    ElementTree.fromstring((Path(page.HERE) / "figure.svg").read_text(encoding="utf-8"))


def test_the_arms_of_tables_are_those_of_blocks():
    for table in read_tables():
        known = {
            block: read_block(block) for block in {a.split("/")[0] for a in table.arms.values()}
        }
        assert len(known) <= 1
        assert table.arms.keys() <= {row.label for row in table.rows}, table.name
        for place in table.arms.values():
            block, arm = place.split("/")
            assert arm in known[block].arms, f"{table.name}: {place}"


def test_each_fp8_arm_is_compared_with_its_method_in_bf16(text):
    part = text.partition('id="block-fp8"')[2].partition('id="arm-fp8-ste-fp8-delayed"')[0]
    values = {
        run.seed: [json.loads(run.file(EVIDENCE).read_text())["metrics"]["val_loss"]]
        for run in read_block("fp8").runs(EVIDENCE)
        if run.arm == "ste"
    }
    for run in read_block("fp8").runs(EVIDENCE):
        if run.arm == "ste_fp8":
            record = json.loads(run.file(EVIDENCE).read_text())
            values[run.seed] += [record["metrics"]["val_loss"]]
    differences = [fp8 - bf16 for bf16, fp8 in values.values()]
    low, high = paired_interval(differences)
    told = f"{mean(differences):+.4f} [{low:+.4f}, {high:+.4f}] (n=3)</td><td>ste</td>"
    assert told.replace("-", "\N{MINUS SIGN}") in part
    assert "share of the gap, g" not in part  # a column that would be empty
    assert "ste_fp8 \N{MINUS SIGN} ste</text>" in text


def test_an_interval_beyond_the_axis_has_no_end_on_it():
    of = {"a": (0.1, 0.05, 0.15), "b": (0.1, 0.04, 0.16), "c": (0.2, -9.0, 9.4)}
    rows = [Summary(name, 3, 1.0, 0.1, 3, *effect) for name, effect in of.items()]
    drawn = figures.forest(rows, {}, "", "", math.nan, 0.25, "val_loss")
    assert drawn.count('class="interval"') == 3 + 2 + 2
    assert "difference at equal seeds" in drawn


@pytest.mark.parametrize("half", [0.0, 2.0])
def test_the_best_arm_is_on_top_and_a_gap_that_may_be_zero_is_no_yardstick(half):
    """An accuracy, in points, at four seeds; `half` is what half the width costs."""
    noise = [0.3, -0.3, 0.2, -0.2]
    cost = {"dense": 0.0, "half": half, "worst": 3.0, "best": -1.0}

    def stored(top1):
        return SimpleNamespace(record={"metrics": {"top1": top1}})

    arms = {
        arm: {seed: stored(80 - lost - n * (arm != "dense")) for seed, n in enumerate(noise)}
        for arm, lost in cost.items()
    }
    block = SimpleNamespace(name="x", against={})
    shown = Shown(block, "metrics.top1", "dense", "half", arms)
    drawn = blocks.difference_figure(shown, ["half", "worst", "best"], 0.25)
    assert re.findall(r">(best|half|worst)</text>", drawn) == ["best", "half", "worst"]
    if half:
        assert shown.gap == pytest.approx(-2.0) and 'class="yardstick"' in drawn
    else:
        assert math.isnan(shown.gap) and 'class="yardstick"' not in drawn


def test_tables_of_arms_say_once_what_is_the_same_for_all(text):
    assert "<span>Arms of block a (tier mini, on NVIDIA H200)</span>" in text
    part = text.partition('id="block-a"')[2].partition('id="block-a-large"')[0]
    heads = re.findall(r"<th scope=\"col\"[^>]*>([^<]*)</th>", part)[:6]
    assert [head.partition(" ")[0] for head in heads] == [
        "arm", "ours", "minus", "share", "verdict", "source",
    ]  # fmt: skip
    assert "missing runs:" not in part  # block a is complete


def test_measured_speeds_are_named_in_words(text):
    part = text.partition('id="speed"')[2].partition('id="own"')[0]
    assert "FST, Figure 7: FFN speedup" in part
    labels = re.findall(r"<svg.*?</svg>", part)
    for figure in labels:
        names = re.findall(r'text-anchor="end">([^<]*[a-z][^<]*)</text>', figure)
        assert len(names) == len(set(names)), names


def test_figures_of_curves(text):
    """Letters are as large in all figures, long names break at underscores, and an arm that is off
    the scale or has no curve is named instead of drawn."""
    sizes = re.findall(r'viewBox="0 0 ([\d.]+) [\d.]+" style="[^"]* max-width: (\d+)px"', text)
    assert len(sizes) > 50
    assert all(abs(int(shown) / float(own) - figures.ENLARGED) < 0.01 for own, shown in sizes)
    assert "<strong>ast_<wbr>boosted</strong>" in text
    assert "Without a curve on this scale: sparsegpt, wanda, ast_as_released." in text
    assert "<strong>wanda</strong>" not in text
    assert figures.Scale(1e-6, 1, 0, 1, log=True).ticks() == [1e-6, 1e-4, 1e-2, 1.0]


def test_a_paper_s_table_made_of_small_models(text):
    """SLoPe's Table 4: the paper's scores of BERT beside the losses of block a's arms."""
    part = text.partition('id="table-slope-table4"')[2].partition('id="table-slope-table5"')[0]
    assert "by block a" in part and "paper: SQuAD F1" in part and "90.44" in part
    assert "#files-a-slope-rank-16" in part


def test_values_of_a_paper_that_nobody_confirmed_fill_no_table(text):
    """FST's Table 10: no column and no table of nothing but "not available"."""
    part = text.partition('id="table-fst-table10"')[2].partition('id="table-fst-table11"')[0]
    assert "by block a" in part and "<td>not available" not in part.replace(' class="number"', "")
    assert "The paper&#x27;s values are not available." in part
    assert "the values of the paper are unknown" in part


def test_a_measured_table_has_the_paper_s_shape(text):
    """SLoPe's Table 1: the paper's row above ours, whose cells have the verdicts."""
    part = text.partition('id="table-slope-table1"')[2].partition('id="table-slope-table2"')[0]
    heads = re.findall(r"<th scope=\"col\"[^>]*>([^<]*)</th>", part)
    assert heads == ["method", "source", "training", "inference", "inference, r=1.56%",
                     "inference, r=6.25%"]  # fmt: skip
    theirs, ours = re.findall(r"<tr><th scope=\"row\">OPT-66B / SLoPe</th>.*?</tr>", part)
    assert "paper" in theirs and "1.20x" in theirs and "badge" not in theirs
    assert "1.26 [1.26, 1.27]x" in ours and "confirmed" in ours


def test_arguments_that_mean_nothing(capsys, tmp_path):
    for options in (["picture=x"], ["figure="], ["figure=a", "figure=b"]):
        assert reproduce(["report", *options], runs=tmp_path) == 2
        assert "figure=FILE" in capsys.readouterr().err


def test_without_any_run_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "EVIDENCE", tmp_path / "none")
    told = page.build(tmp_path / "runs", tmp_path)
    assert Page(told).wrong == []
    assert "no runs yet" in told


def test_a_made_table_is_read_back(tmp_path):
    path = tmp_path / "slope_table1-smoke.md"
    lines = [
        *("# T", "", "- Device: a CPU, 2 threads.", "- Code: revision 0123456789ab.", ""),
        "| method | source | x |",
        "| --- | --- | --: |",
        "| a, b | paper | 2.0 |",
        "|      | ours | 1.0 |",
    ]
    path.write_text("\n".join(lines))
    made = tables.read(path)
    assert (made.tier, made.fact("Device"), tables.revisions(made.fact("Code"))) == (
        "smoke",
        "a CPU, 2 threads",
        "0123456",
    )
    assert [(line.names, line.values) for line in made.grid.lines] == [
        (["a, b", "paper"], ["2.0"]), (["a, b", "ours"], ["1.0"]),
    ]  # fmt: skip
    path.write_text("nothing\n")
    with pytest.raises(Exception, match="has no table in it"):
        tables.read(path)


# ------------------------------------------------------------------------------ in a browser

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
WATCH = """<script>
const trouble = [];
addEventListener("error", event => trouble.push(event.message));
for (const kind of ["error", "warn"]) console[kind] = (...said) => trouble.push(said.join(" "));
addEventListener("load", () => {
  for (const folded of document.querySelectorAll("details")) folded.open = true;
  const { scrollWidth, clientWidth } = document.documentElement;
  parent.postMessage({ scrollWidth, clientWidth, trouble }, "*");
});
</script>"""
# A window cannot be as narrow as a phone, a frame in it can.
FRAMES = """<!doctype html><script>
addEventListener("message", event => {
  const heard = document.body.appendChild(document.createElement("data"));
  heard.value = JSON.stringify(event.data);
});
</script><body style="margin: 0">"""
WIDTHS = (1280, 390)


@pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")
def test_in_a_browser_without_errors_or_sideways_scrolling(text, tmp_path):
    """With everything unfolded. The picture is there to be looked at: pytest --basetemp=DIR."""
    (tmp_path / "page.html").write_text(text.replace("<head>", f"<head>{WATCH}", 1))
    style = "border: 0; height: 1600px; width:"
    frames = [tag("iframe", src="page.html", style=f"{style} {width}px") for width in WIDTHS]
    (tmp_path / "frames.html").write_text(FRAMES + "".join(frames))
    done = subprocess.run(
        [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"),
            *(f"--user-data-dir={tmp_path / 'profile'}", "--hide-scrollbars"),
            *(
                "--window-size=1700,1600",
                "--virtual-time-budget=2000",
                f"--screenshot={tmp_path / 'page.png'}",
                "--dump-dom",
            ),
            (tmp_path / "frames.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    told = [json.loads(given["value"]) for given in Page(done.stdout).of("data")]
    expected = [{"scrollWidth": w, "clientWidth": w, "trouble": []} for w in WIDTHS]
    assert sorted(told, key=lambda found: -found["clientWidth"]) == expected
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    assert (tmp_path / "page.png").is_file()
