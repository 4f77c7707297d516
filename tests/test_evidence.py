"""Tests that what docs/evidence.md and the README say of measurements is what the records say."""

import json
import math
import re
from functools import cache
from pathlib import Path
from statistics import fmean

import numpy as np

from experiments.runs.stats import holm, p_value, paired_interval
from reproduce import judge
from reproduce.execute.blocks import EVIDENCE
from reproduce.judge.claims import read_claims
from reproduce.judge.scale import gap_closed
from reproduce.judge.text import worded
from reproduce.judge.verdicts import differences
from reproduce.records import read_evidence
from reproduce.render.report import page as report_page
from reproduce.render.report.blocks import shown_blocks

ROOT = Path(__file__).parents[1]
LOSS = "metrics.val_loss"
LINEAR = "metrics.linear_top1"


@cache
def text(path):
    return (ROOT / path).read_text(encoding="utf-8")


@cache
def rules():
    return read_claims()


@cache
def values():
    return read_evidence(EVIDENCE).values


@cache
def blocks():
    shown = shown_blocks(rules(), read_evidence(EVIDENCE), {"claims": []})
    return {one.block.name: one for one in shown}


def part(heading):
    """A part of the page on evidence, in which line breaks are spaces except before a table."""
    page = text("docs/evidence.md").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.sub(r"\n *(?=[^|\n -])", " ", page)


def losses(block, variant):
    runs = values()[block, variant]
    return np.array([runs[seed]["metrics"]["val_loss"] for seed in sorted(runs)])


def lost(block, variant, against="dense", metric=LOSS):
    return differences(values(), block, variant, against, metric)


def interval(block, variant, against):
    return paired_interval(lost(block, variant, against))


def test_the_differences_and_the_figure_are_those_of_the_records(tmp_path):
    """If not: the page's table by hand, figures by `python -m reproduce report figure=FILE`."""
    told = part("Measured so far")
    added = r"^\| (?:19|[2-9]\d|\d{3,}): .*$"  # rows of claims that a reader adds do not count
    words = re.sub(added, "", text("docs/evidence.md"), flags=re.M).split()
    assert len(words) <= 1500, f"docs/evidence.md has {len(words)} words"
    main, other = blocks()[report_page.MAIN], blocks()["b"]

    def cell(row):
        return f"{row.difference:+.4f} [{row.low:+.4f}, {row.high:+.4f}]"

    def sorted_rows(shown, variants):
        return sorted((shown.rows[variant] for variant in variants), key=lambda row: row.difference)

    want = []
    for row in sorted_rows(main, set(main.leading) - {main.baseline}):
        g = gap_closed(values(), "a", row.label, main.metric, rules().margin, rules().seeds)
        share = "{value:.2f} [{low:.2f}, {high:.2f}]".format(**g) if row.label != "half" else "1"
        assert row.pairs == 5
        want.append((row.label, cell(row), share))
    assert want == re.findall(r"^\| `(\w+)` \| (\+.*?) \| (\d.*?) \| ", told, re.M)
    alike = re.search(r"retrained on 33M tokens. (.*) lie within 0.01 nats", part("Blocks"))[1]
    ends = [losses("b", name).mean() for name in re.findall(r"`(\w+)`", alike)]
    assert max(ends) - min(ends) < 0.01 and len(ends) == 4
    lost_by = f"ends {other.rows['sparsegpt'].difference:.2f} above further dense training"
    assert other.baseline == "dense_trained_on" and lost_by in part("Blocks")
    for name in ("figure", "sizes"):
        report_page.write_figure(name, tmp_path / f"{name}.svg")
        figures = f"docs/{name}.svg", tmp_path / f"{name}.svg"
        kept, drawn = (re.findall(r'aria-label="(.*?)"', text(path)) for path in figures)
        assert drawn == kept and len(kept) == 1  # coordinates may differ between matplotlibs
    told = " ".join(text("README.md").split())
    (rounded,) = re.findall(r"`one_shot` .* `ast`: they end (0\.\d\d) above further dense", told)
    for variant in ("ast", "naive"):
        assert (f"{other.rows[variant].difference:.2f}", other.rows[variant].pairs) == (rounded, 5)
    assert min(interval("a_large", name, "half")[0] for name in ("slope", "fst")) > 0
    mean = -fmean(lost("d", "sparse_090", metric=LINEAR))
    assert f"a dense end after 90 % costs {mean:.1f} points" in part("Blocks")


def test_the_variants_beside_half_the_width_are_where_their_intervals_put_them():
    main, words = blocks()[report_page.MAIN], part("Measured so far")
    where = {"better than `half`": set(), "no difference shown": set(), "worse": set()}
    for variant in set(main.leading) - {"dense", "half", "shallow", "dense_narrow"}:
        assert main.rows[variant].low > 0
        g = gap_closed(values(), "a", variant, main.metric, rules().margin, rules().seeds)
        better = "better than `half`" if g["high"] < 1 else "no difference shown"
        where["worse" if g["low"] > 1 else better].add(variant)
    told = re.findall(r"^- (.*?): (`.*)$", words, re.M)
    assert {name: set(re.findall(r"`(\w+)`", variants)) for name, variants in told} == where
    variants = sorted(set().union(*where.values()))
    adjusted = holm([p_value(lost("a", v, "half", main.metric)) for v in variants])
    left = [v for v, p in zip(variants, adjusted, strict=True) if p < rules().level]
    assert left == ["s_ste", "semi_sparse", "ste"] and len(variants) == 8
    assert "After Holm's correction for the eight only" in words


def test_what_is_said_of_the_claims_is_what_the_records_say():
    claims, told = judge.content(rules(), values())["claims"], text("docs/evidence.md")
    comparison = re.compile(r"(?:(\w+):\s)?`(\w+)`\s-\s`(\w+)`\s([+-][\d.]+\s\[[^]]*\])")
    rows = re.findall(r"^\| (\d+): " + r"(.*?) \| " * 5 + r"(.*?) \|$", told, re.M)
    assert [(int(row[0]), row[5]) for row in rows] == [(c["id"], worded(c)) for c in claims]
    for c, row in zip(claims, rows, strict=True):
        other = c["without"].rpartition(": ")[2]  # the verdict without runs that diverged
        assert c["verdict"].startswith(other) or other in row[6]
    for claim, (_, words, paper, ours, ratio, _, objection) in zip(claims, rows, strict=True):
        assert not re.search(r"\d\.\d", words + objection)
        if claim["measured"]:
            if not any(m["lines"] for m in claim["measured"]):
                assert ours == "not measured"
                continue
            cells = (paper, ours, ratio)
            named = [re.findall(r"(\w+) (-?[\d.]+(?: to -?[\d.]+)?)(?:; |$)", x) for x in cells]
            (labels,) = {tuple(label for label, _ in one) for one in named}
            assert 1 <= len(labels) <= 3
            ranges = set(zip(*([found for _, found in one] for one in named), strict=True))
            assert ranges <= {measured_range(m["lines"]) for m in claim["measured"]}
            continue
        judged = {(c["block"], c["variant"], c["against"]): c for c in claim["contrasts"]}
        found = [
            judged[mark or claim["contrasts"][0]["block"], variant, against]
            for mark, variant, against, _ in comparison.findall(ours)
        ]
        assert len(found) == len(ours.split("; ")) > 0
        effects = "+.2f" if claim["id"] == 13 else "+.4f"
        for cell, key, form in ((paper, "published", effects), (ratio, "share", ".2f")):
            known = [f"{c[key]:{form}}" for c in found if c[key] is not None]
            assert cell == ("; ".join(known) or "-")


def measured_range(lines):
    """(the paper's factors, ours, the ratios) of measured rows, each as `lowest to highest`."""
    found = []
    for key, form in (("published", ".3f"), ("effect", ".3f"), ("share", ".2f")):
        known = [line for line in lines if line[key] is not None]
        each = [x[key] for x in known if key != "share" or not x["why"]] or [math.nan]
        found.append(" to ".join(dict.fromkeys(f"{x:{form}}" for x in (min(each), max(each)))))
    return tuple(found)


def test_what_a_loss_is_worth_is_what_the_records_say():
    """By the rule in e1.yaml, anew from the records."""
    widths = {0.25: "width_025", 0.5: "half", 0.75: "width_075", 1.0: "dense"}
    lengths = {0.5: "tokens_050", 0.71: "tokens_071", 1.0: "dense", 1.41: "tokens_141"}
    fixed, share = 4 * 4 * 256**2 + 9 * 256, 4 * 8 * 256**2  # attention and norms; feed-forward
    by = [
        {x: losses("e1" if "_" in variant else "a", variant) for x, variant in variants.items()}
        for variants in ({(fixed + share * w) / share: v for w, v in widths.items()}, lengths)
    ]

    def read(known, loss, seeds):
        points = sorted((float(x[seeds].mean()), -math.log(k)) for k, x in known.items())
        return math.exp(-np.interp(loss, *zip(*points, strict=True)))

    row = r"^\| `(\w+)` \| [^|]* \| [^|]* \| (\d[^|]*) \| ([^|]*) \|$"
    draws = np.random.default_rng(0).integers(0, 5, (2000, 5))
    for variant, *cells in re.findall(row, part("Measured so far"), re.M):
        own = losses("a", variant)
        for known, less, cell in zip(by, (fixed / share, 0), cells, strict=True):
            value, *many = (read(known, own[s].mean(), s) - less for s in (slice(5), *draws))
            low, high = np.quantile(many, [0.025, 0.975])
            assert cell == f"{value:.2f} [{low:.2f}, {high:.2f}]"


def test_how_much_two_runs_of_one_seed_differ():
    again = json.loads((EVIDENCE / "repeated_a.json").read_text())["val_loss"]
    for name, (first, _) in again.items():
        variant, seed = name.split("-seed")
        assert first == values()["a", variant][int(seed)]["metrics"]["val_loss"]
    of_methods = [pair for name, pair in again.items() if "as_released" not in name]
    spread = math.sqrt(fmean((second - first) ** 2 for first, second in of_methods))
    page = " ".join(text("docs/evidence.md").split())
    assert f"{len(again)} runs were made twice" in page
    assert f"by {spread:.4f} nats (root mean square)" in page
