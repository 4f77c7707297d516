"""Tests that what docs/evidence.md, the README and the notes of blocks say of measurements is what
the records say."""

import json
import math
import re
from functools import cache
from pathlib import Path
from statistics import fmean, median, stdev

import numpy as np

from experiments.runs.stats import difference_form, holm, p_value, paired_interval
from reproduce import judge
from reproduce.execute.blocks import EVIDENCE, read_block
from reproduce.judge.claims import read_claims
from reproduce.judge.scale import gap_closed, half_width_gap
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


def notes(block):
    return " ".join(read_block(block).notes)


def losses(block, variant, metric="val_loss"):
    runs = values()[block, variant]
    return np.array([runs[seed]["metrics"][metric] for seed in sorted(runs)])


def lost(block, variant, against="dense", metric=LOSS):
    return differences(values(), block, variant, against, metric)


def interval(block, variant, against, metric=LOSS):
    return paired_interval(lost(block, variant, against, metric))


def compared(block, variant, against="dense", metric=LOSS):
    """The mean difference of two variants as `claims` writes it, or in points of accuracy, with its
    interval."""
    effect = fmean(lost(block, variant, against, metric))
    low, high = interval(block, variant, against, metric)
    form = "+.2f" if metric == LINEAR else difference_form(effect, low, high)
    return f"{effect:{form}} [{low:{form}}, {high:{form}}]"


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
    (slow,) = ([x for m in c["measured"] for x in m["lines"]] for c in claims if c["id"] == 4)
    less = [x["label"] for x in slow if x["verdict"] in ("not reproduced", "direction only")]
    assert {re.search(r"d=(\d+)", label)[1] for label in less} == {"768", "1024"}


def measured_range(lines):
    """(the paper's factors, ours, the ratios) of measured rows, each as `lowest to highest`."""
    found = []
    for key, form in (("published", ".3f"), ("effect", ".3f"), ("share", ".2f")):
        known = [line for line in lines if line[key] is not None]
        each = [x[key] for x in known if key != "share" or not x["why"]] or [math.nan]
        found.append(" to ".join(dict.fromkeys(f"{x:{form}}" for x in (min(each), max(each)))))
    return tuple(found)


def test_what_is_said_of_single_runs_and_fp8_is_what_the_records_say():
    told = notes("a")
    *others, unstable = losses("a", "fst")
    ends = f"{min(others):.3f} to {max(others):.3f}"
    assert f"ended at {unstable:.3f}; the other four ended at {ends}" in told
    *_, unstable = sorted(others := losses("a", "sr_ste_all_16"))
    rest = sorted(others)[:-1]
    assert f"({unstable:.3f}; the others {rest[0]:.3f} to {rest[-1]:.3f})" in told
    last = [compared("a", f"slope_rank_16{end}", "slope") for end in ("", "_05", "_20")]
    assert f"they end at {last[0]}, {last[1]} and {last[2]} of slope" in told
    in_b = {variant: runs for (block, variant), runs in values().items() if block == "b"}
    starts = {(v, seed): run["init"] for v, runs in in_b.items() for seed, run in runs.items()}
    unpaired = {key for key, init in starts.items() if init != starts["ast", key[1]]}
    assert unpaired == {("imp", 2), ("ast_as_released", 2)}
    names = [variant for block, variant in values() if block == "fp8" and "_fp8" in variant]
    pairs = [("fp8", name, name.partition("_fp8")[0]) for name in names]
    means = sorted(fmean(lost(*pair)) for pair in pairs)
    low, high = math.floor(100 * means[0]) / 100, math.ceil(100 * means[-1]) / 100
    told = notes("fp8")
    assert f"lie between {low:+.2f} and {high:+.2f} nats" in told
    assert len(pairs) == 10 and {len(lost(*pair)) for pair in pairs} == {3}
    intervals = [interval(*pair) for pair in pairs]
    assert all(low < 0 < high for low, high in intervals)
    reach = sorted((high - low) / 2 for low, high in intervals)
    assert f"reach {reach[0]:.2f} to {reach[-1]:.2f} to either side" in told


def test_what_is_said_of_the_noise_of_block_a_is_what_the_records_say():
    """A two-way model: what is left of a loss after the means of its variant and of its seed."""
    variants = [runs for (block, variant), runs in values().items()
                if block == "a" and not variant.endswith(("as_released", "_all_16"))]  # fmt: skip

    def left(of):
        found = np.array([[of(runs[seed]) for seed in range(5)] for runs in variants])
        return found - found.mean(1, keepdims=True) - found.mean(0) + found.mean()

    end = left(lambda run: run["metrics"]["val_loss"])
    early = left(lambda run: dict(map(tuple, run["curves"]["val_loss"]))[1750])
    shared = math.sqrt((end**2).sum() / (4 * (len(variants) - 1)))
    told, count = notes("a"), len(variants)
    correlation = np.corrcoef(end.ravel(), early.ravel())[0, 1]
    assert f"correlates by {correlation:.2f} with that at the end ({count} variants;" in told
    assert f"one two-way model over the block ({shared:.4f} nats)" in told
    names = ("bi_mask", "s_ste", "sr_ste", "slope", "fst", "ste", "step", "semi_sparse")
    means = [fmean(lost("a", name, "half")) for name in names]
    ps = [math.erfc(abs(mean) / shared / math.sqrt(2 * 2 / 5)) for mean in means]  # 128 degrees
    assert [p < 0.05 for p in ps[:5]] == [True] * 3 + [False] * 2
    assert [p < 0.05 for p in holm(ps)[:5]] == [True] * 2 + [False] * 3


def test_what_a_loss_is_worth_is_what_the_records_say():
    """By the rule in e1.yaml, anew from the records."""
    from scipy.optimize import curve_fit

    widths = {0.25: "width_025", 0.5: "half", 0.75: "width_075", 1.0: "dense"}
    lengths = {0.5: "tokens_050", 0.71: "tokens_071", 1.0: "dense", 1.41: "tokens_141"}
    by = [
        {x: losses("e1" if "_" in variant else "a", variant) for x, variant in variants.items()}
        for variants in (widths, lengths)
    ]
    fixed, share = 4 * 4 * 256**2 + 9 * 256, 4 * 8 * 256**2  # attention and norms; feed-forward
    sizes = [fixed + share * w for w in widths] + [fixed + share] * 3
    tokens = [1.0] * 4 + [0.5, 0.71, 1.41]
    runs = [*by[0].values(), *(by[1][x] for x in tokens[4:])]
    means = np.array([x.mean() for x in runs])
    n, d = np.array(sizes) / (fixed + share), np.array(tokens)

    def law(_, e, a, k, b, m):
        return e + a * n**-k + b * d**-m

    found, _ = curve_fit(law, n, means, (2.2, 0.1, 1, 0.2, 1.3))
    errors = np.array([x.std(ddof=1) / math.sqrt(5) for x in runs])
    far = np.abs(law(n, *found) - means) > 2 * errors
    assert [d[i] for i in np.flatnonzero(far)] == [0.71]
    told = notes("e1")
    assert f"exponents ({found[2]:.1f} and {found[4]:.1f})" in told
    for one in by:
        *first, last = (f"{x.mean():.3f}" for x in one.values())
        assert f"{', '.join(first)} and {last}" in told

    def read(known, loss, seeds):
        points = sorted((float(x[seeds].mean()), -math.log(k)) for k, x in known.items())
        return math.exp(-np.interp(loss, *zip(*points, strict=True)))

    row = r"^\| `(\w+)` \| [^|]* \| [^|]* \| (\d[^|]*) \| ([^|]*) \|$"
    draws = np.random.default_rng(0).integers(0, 5, (2000, 5))
    by[0] = {(fixed + share * w) / share: x for w, x in by[0].items()}
    for variant, *cells in re.findall(row, part("Measured so far"), re.M):
        own = losses("a", variant)
        for known, less, cell in zip(by, (fixed / share, 0), cells, strict=True):
            value, *many = (read(known, own[s].mean(), s) - less for s in (slice(5), *draws))
            low, high = np.quantile(many, [0.025, 0.975])
            assert cell == f"{value:.2f} [{low:.2f}, {high:.2f}]"

    kinds = [("", "val_loss"), ("", "ema_val_loss"), ("_zero", "val_loss")]
    kinds += [("_deterministic", "val_loss")]
    spreads, pairs = [], []
    for kind, metric in kinds:
        dense, half = (losses("e2", f"{name}{kind}", metric) for name in ("dense", "half"))
        again = [losses("e2_again", f"{name}{kind}", metric) for name in ("dense", "half")]
        spreads.append((half - dense).std(ddof=1))
        pairs.append(np.array([again[0] - dense, again[1] - half]))
    spreads += [np.sqrt(np.mean(np.square(pair))) for pair in pairs[:-1]]
    assert all(f"{spread:.4f}" in notes("e2") for spread in spreads)
    assert not np.any(pairs[-1])  # with deterministic kernels


def test_what_is_said_of_blocks_a_large_c_and_d_is_what_the_records_say():
    flat, alike = notes("a_large"), ("ste", "s_ste", "sr_ste")
    for low, high in (interval("a_large", variant, "half") for variant in alike):
        assert low < 0 < high
    most = max(abs(fmean(lost("a_large", variant, "half"))) for variant in alike)
    assert f"by at most {most:.4f}, with intervals that include zero" in flat
    assert f"fst is worse by {compared('a_large', 'fst', 'half')}" in flat
    others = [*alike, "fst"]
    assert all(interval("a_large", "slope", variant)[0] > 0 for variant in others)
    behind = [fmean(lost("a_large", "slope", variant)) for variant in others]
    range_lost = f"{min(behind):+.4f} to {max(behind):+.4f}"
    assert f"it loses {range_lost} to each of the four other methods" in flat
    gap, a = (half_width_gap(values(), b, LOSS, rules().margin) for b in ("a_large", "a"))
    assert f"is {gap['ratio']:.1f} standard deviations of a paired difference" in flat
    assert 0.3 < gap["gap"] / a["gap"] < 0.37
    told = notes("c")
    assert f"dense reaches {losses('c', 'dense', 'val_top1').mean():.2f} %" in told
    gap = half_width_gap(values(), "c", LOSS, rules().margin)
    words = f"{gap['gap']:.3f} nats, {gap['ratio']:.1f} standard deviations"
    assert f"half the width costs {words}" in told
    scale = compared("c", "s_ste_soft", "s_ste_no_mvue")
    assert f"s_ste_soft ends {scale} above s_ste_no_mvue" in told
    names = ("s_ste", "sr_ste", "fst", "bi_mask", "ste", "step")
    to_half = {name: interval("c", name, "half") for name in names}
    assert {name for name, (low, _) in to_half.items() if low > 0} == {"ste"}
    assert all(high > 0 for _, high in to_half.values())
    to_s_ste = {name: interval("c", name, "s_ste") for name in ("sr_ste", "fst", "bi_mask", "ste")}
    assert [name for name, (low, high) in to_s_ste.items() if low < 0 < high] == ["sr_ste", "fst"]
    told = notes("d")
    variants = [variant for variant in read_block("d").variants if variant != "dense"]
    linear, knn = (losses("d", "dense", f"{name}_top1").mean() for name in ("linear", "knn"))
    assert f"dense reaches {linear:.2f} % and {knn:.2f} %" in told
    adjusted = holm([p_value(lost("d", variant, metric=LINEAR)) for variant in variants])
    left = [variant for variant, p in zip(variants, adjusted, strict=True) if p < 0.05]
    assert left == ["sparse_090"] and len(variants) == 7
    mean = fmean(lost("d", "sparse_090", metric=LINEAR))
    assert f"sparse_090 loses {-mean:.1f} points" in told
    assert f"a dense end after 90 % costs {-mean:.1f} points" in part("Blocks")
    shown = [interval("d", variant, "dense", LINEAR) for variant in ("half", "sparse_100")]
    assert all(low < 0 < high for low, high in shown)
    theirs = {
        cell["row"][:3]: f"{cell['value']:.1f} %"
        for cell in json.loads(text("reproduce/specs/published.json"))["cells"]
        if cell["table"] == "DINOv2 ViT-L ImageNet-1k accuracy"
    }
    assert f"has the same order: {theirs['90%']} against {theirs['100']}, one run each" in told
    assert theirs["70%"] == theirs["80%"] == "82.7 %" and "those of 70 and 80 % (82.7 %)" in told
    by_sparse = lost("d", "sparse_090", "sparse_100", LINEAR)
    assert round(fmean(by_sparse), 1) == round(mean, 1) and p_value(by_sparse) < 0.05
    widths = [f"{width} width 32 slow teacher" for width in ("half", "dense")]
    small = lost("pilot_d_small", *widths, LINEAR)
    ratio, found = -fmean(small) / stdev(small), compared("pilot_d_small", *widths, LINEAR)
    assert f"of half the width is {found} points, {ratio:.1f} standard deviations" in told
    dense_run = next(run for run in read_block("d").runs(ROOT) if run.variant == "dense")
    assert (dense_run.config.model.width, len(small)) == (128, 3)


def test_how_much_two_runs_of_one_seed_differ():
    again = json.loads((EVIDENCE / "repeated_a.json").read_text())["val_loss"]
    for name, (first, _) in again.items():
        variant, seed = name.split("-seed")
        assert first == values()["a", variant][int(seed)]["metrics"]["val_loss"]
    of_methods = [pair for name, pair in again.items() if "as_released" not in name]
    spread = math.sqrt(fmean((second - first) ** 2 for first, second in of_methods))
    variants = {v for b, v in values() if b == "a" and "as_released" not in v} - {"dense"}
    middle = median(stdev(lost("a", variant)) for variant in variants)
    told, page = notes("a"), " ".join(text("docs/evidence.md").split())
    for said in (told, page):
        assert f"{len(again)} runs were made twice" in said
        assert f"by {spread:.4f} nats (root mean square)" in said
    assert f'the {len(of_methods)} that are not "as released" the two losses differ by' in told
    assert f"the same standard deviation, a median of {middle:.4f} over the variants" in told
    launched = json.loads((EVIDENCE / "launched_a.json").read_text())["val_loss"]
    assert len(launched) == 4 and "lowest and the highest of four that were launched" in told
    assert all(min(launched) < loss < max(launched) for loss in again["dense-seed3"])
