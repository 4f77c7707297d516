"""Tests of what is told of the claims: text, JSON and CSV, from made-up records."""

import csv
import json
import math
from dataclasses import replace

import pytest

from experiments.runs.stats import paired_interval, ratio_interval
from experiments.support.checkpoint import write_json
from reproduce import decay_curve, scale, verdict_text, verdicts
from reproduce.blocks import EVIDENCE
from reproduce.claims import Claim, Claims, Contrast, Margin, Speed
from reproduce.records import Evidence, StoredRecord

BASE = [3.10, 3.14, 3.08, 3.12, 3.11]  # the dense variant's loss by seed
NOISE = [0.0, 0.004, -0.003, 0.002, -0.003]  # of a paired difference; mean 0
SPEED = (4, 12, 14)  # claims that are judged by measurements
MARGIN, LOSS = Margin(0.25, "dense", "half"), "metrics.val_loss"
AT = "at this scale: gpt2_toy, 2M tokens, 2,000 tokens a step, data=words (abcdef012345), seeds "


def record(variant, seed, loss, model="gpt2_toy", **changed):
    return {
        "block": "a",
        "variant": variant,
        "seed": seed,
        "overrides": [f"model={model}", "data=words", "method=ste"],
        "corpus_hash": "abcdef0123456789",
        "steps": 1000,
        "tokens": 2_000_000,
        "metrics": {"val_loss": loss},
        "curves": {},
    } | changed


def values(**variants):
    """values(variant=losses by seed) -> Values of block a."""
    return {
        ("a", variant): {seed: record(variant, seed, loss) for seed, loss in enumerate(losses)}
        for variant, losses in variants.items()
    }


def shifted(by, noise=NOISE):
    return [base + by + n for base, n in zip(BASE, noise, strict=True)]


def of(*contrasts, **changed):
    claim = Claim(1, "fst", "it trains.", "1.0", [Contrast("a", *c) for c in contrasts])
    return Claims(MARGIN, 0.05, 5, 0.02, [replace(claim, settles="More of it.", **changed)])


def shown_of(judged):
    """Everything about all claims, as `claims all` prints it, before lines are broken."""
    of_claims = [line for claim in judged["claims"] for line in verdict_text.details(claim)]
    return of_claims + verdict_text.released_lines(judged)


def test_the_gap_that_a_method_closes():
    """A quarter of the way from dense to half, with Fieller's interval of the pairs."""
    gap = [0.081, 0.084, 0.077, 0.082, 0.076]
    own = [0.021, 0.018, 0.024, 0.019, 0.018]
    variants = values(dense=BASE, half=[b + g for b, g in zip(BASE, gap, strict=True)],
                  it=[b + o for b, o in zip(BASE, own, strict=True)])  # fmt: skip
    found = scale.gap_closed(variants, "a", "it", LOSS, MARGIN, 5)
    assert (found.value, found.n) == (pytest.approx(0.25), 5)
    assert (found.low, found.high) == pytest.approx(ratio_interval(own, gap))
    assert scale.gap_closed(variants, "a", "half", LOSS, MARGIN, 5).value == pytest.approx(1.0)
    assert scale.gap_closed(variants, "a", "dense", LOSS, MARGIN, 5) is None
    assert scale.gap_closed(variants, "a", "it", LOSS, MARGIN, 6) is None
    # Seeds that all three have, and no others.
    del variants["a", "half"][2]
    assert scale.gap_closed(variants, "a", "it", LOSS, MARGIN, 4).n == 4
    del variants["a", "dense"][3]
    assert scale.gap_closed(variants, "a", "it", LOSS, MARGIN, 3).n == 3
    variants["a", "it"][0]["metrics"]["val_loss"] = None
    assert scale.gap_closed(variants, "a", "it", LOSS, MARGIN, 3) is None
    # A share of a gap that may be zero means nothing.
    unknown = values(dense=BASE, half=shifted(0.0), it=shifted(0.02))
    assert scale.gap_closed(unknown, "a", "it", LOSS, MARGIN, 5) is None


def test_whether_a_block_can_tell_variants_apart():
    variants = values(dense=BASE, half=shifted(0.08), one=shifted(0.01, [2 * n for n in NOISE]),
                  two=shifted(0.02), three=[*shifted(0.0)[:4], float("nan")])  # fmt: skip
    variants["b", "one"] = variants["a", "one"]  # of another block
    found = scale.half_width_gap(variants, "a", LOSS, MARGIN)
    spread = scale.std(NOISE)
    assert (found.gap, found.n) == (pytest.approx(0.08), 5)
    assert (found.std, found.ratio) == (pytest.approx(spread), pytest.approx(0.08 / spread))
    # Of two variants with a number at every seed the median is between them.
    assert (found.other_variants, found.other_std) == (2, pytest.approx(1.5 * spread))
    assert found.other_ratio == pytest.approx(0.08 / (1.5 * spread))
    asked = of(("one", "dense", "lower"))
    text = shown_of(verdicts.content(asked, variants))[-1]
    low, high = paired_interval([0.08 + noise for noise in NOISE])
    assert (found.low, found.high) == pytest.approx((low, high))
    assert text.startswith(
        "Can block a tell methods apart? Half the width changes val_loss by +0.0800 "
        f"[{low:+.4f}, {high:+.4f}], "
    )
    assert "(n = 5 seeds); at least 5 are needed: met. It is " in text
    wide = values(dense=BASE, half=shifted(0.012))
    assert shown_of(verdicts.content(asked, wide))[-1].endswith("needed: missed.")
    lower = values(dense=BASE, half=shifted(-0.08), one=shifted(0.01))
    assert scale.half_width_gap(lower, "a", LOSS, MARGIN).other_ratio == pytest.approx(
        0.08 / spread
    )
    assert scale.half_width_gap(values(dense=BASE), "a", LOSS, MARGIN) is None
    assert scale.half_width_gap(values(dense=BASE, half=[3.2]), "a", LOSS, MARGIN) is None
    diverged = values(dense=BASE, half=[*BASE[:4], math.nan])
    assert scale.half_width_gap(diverged, "a", LOSS, MARGIN) is None
    # Differences that are all equal: nothing is in the way of telling variants apart.
    exact = values(dense=[2.0, 3.0], half=[2.5, 3.5], one=[2.25, 3.25])
    found = scale.half_width_gap(exact, "a", LOSS, MARGIN)
    assert (found.n, found.gap, found.ratio, found.other_ratio) == (2, 0.5, math.inf, math.inf)


def test_the_scale_of_runs():
    records = [record("it", 1, 3.0), record("it", 0, 3.0)]
    assert f"at this scale: {scale.of_records(records)}" == AT + "0, 1"
    other = record("half", 2, 3.0, model="deit_toy")
    assert scale.of_records([*records, other]).startswith(
        "gpt2_toy or deit_toy, 2M tokens or 2M image tokens, 2,000 "
    )
    assert scale.of_records([]) == ""
    short = [record("it", seed, 3.0, tokens=999_000) for seed in (8, 1)]
    told = scale.of_records(short)
    assert told.startswith("gpt2_toy, 999,000 tokens, 999 tokens a step")
    assert told.endswith("seeds 1, 8")
    assert scale.of_records([record("it", 0, 3.0, tokens=1_000_000)]).startswith("gpt2_toy, 1M ")
    unsaid = {**other, "overrides": [o for o in other["overrides"] if not o.startswith("data=")]}
    assert f"the default data ({other['corpus_hash'][:12]})" in scale.of_records([unsaid])
    # Retrained from a model of another block, which was itself trained again between the two.
    retrained = [{**one, "source": {"block": "b"}, "init": {"weights": "aa"}} for one in records]
    assert scale.of_records(retrained) == scale.of_records(records)
    again = {**retrained[0], "variant": "other", "init": {"weights": "bb"}}
    assert scale.of_records([*retrained, again]).endswith(
        "seeds 0, 1, from different trainings of the first model at seeds 1"
    )


def test_what_a_terminal_shows():
    variants = values(dense=BASE, half=shifted(0.08), it=shifted(-0.025), so_so=shifted(0.001))
    shown = shown_of(verdicts.content(of(("it", "dense", "lower")), variants))
    assert shown[:5] == ["1. FST: it trains.", "  verdict: confirmed", "  the paper: 1.0",
                         "  " + AT + "0, 1, 2, 3, 4",
                         "  it - dense (val_loss, block a): confirmed"]  # fmt: skip
    assert shown[5].startswith("    -0.0250 [-0.0288, -0.0212], n = 5, expected lower, p = ")
    assert shown[6] == "    by seed: 0: -0.0250, 1: -0.0210, 2: -0.0280, 3: -0.0230, 4: -0.0280"
    assert shown[7].startswith("    g: it -0.31 [-0.")
    assert not any("would decide it" in line for line in shown)
    for variant in ("so_so", "half"):  # inconclusive and refuted
        shown = shown_of(verdicts.content(of((variant, "dense", "lower")), variants))
        assert "  what would decide it: More of it." in shown
    # In part: one contrast is open, the claim is refuted by the other; and if one is not tested.
    for other in ("half", "not_run"):
        asked = of(("so_so", "dense", "lower"), (other, "dense", "lower"))
        shown = shown_of(verdicts.content(asked, variants))
        assert "  what would decide it: More of it." in shown
    shown = shown_of(verdicts.content(of(("none", "dense", "lower")), variants))
    why = "0 of 5 seeds of none and dense"  # and no scale
    assert shown[1] == "  verdict: not tested"
    assert shown[4] == f"  none - dense (val_loss, block a): not tested; {why}"


def test_what_there_is_of_an_untested_contrast_is_shown_as_preliminary():
    variants = values(dense=BASE, half=shifted(0.08), it=shifted(-0.02)[:3], near=shifted(0.0)[:1])
    found = verdicts.content(of(("it", "dense", "lower"), ("near", "dense", "lower")), variants)
    shown = shown_of(found)
    assert shown[5] == "  it - dense (val_loss, block a): not tested; 3 of 5 seeds of it and dense"
    assert shown[6].startswith("    -0.0") and shown[6].endswith("], n = 3, expected lower")
    assert shown[7] == "    by seed: 0: -0.0200, 1: -0.0160, 2: -0.0230"
    assert shown[8].startswith("    g: it -0.2")
    assert shown[9].endswith("not tested; 1 of 5 seeds of near and dense")
    first, second = verdicts.table(found)
    two = verdicts.content(of(("two", "dense", "lower")), variants | values(two=shifted(-0.02)[:2]))
    assert [*two["claims"][0]["contrasts"][0]["gap_closed"]] == ["two"]
    assert (first["verdict"], second["verdict"]) == ("not tested", "not tested")
    assert first["effect"] == pytest.approx(-0.02 + 0.001 / 3) and first["n"] == 3


def test_a_refutation_is_told_with_the_p_value_that_it_rests_on():
    variants = values(dense=BASE, half=shifted(0.08), it=shifted(0.05), near=shifted(0.001))
    contrasts = [("it", "dense", expect) for expect in ("equal", "lower", "higher")]
    claims = verdicts.content(of(*contrasts), variants)["claims"]
    told = [(c["verdict"], verdict_text.p_value(c)) for c in claims[0]["contrasts"]]
    assert [(verdict, p.partition(" ")[2]) for verdict, p in told] == [
        ("not reproduced", "(contrary)"),
        ("not reproduced", "(contrary)"),
        ("confirmed", ""),
    ]
    assert all(float(p.split()[0]) < 0.05 for _, p in told)


def test_more_seeds_are_asked_for_where_the_interval_is_wide():
    """Wider than half of the effect; than half of the margin where the effect should be nothing."""
    variants = values(dense=BASE, half=shifted(0.08), small=shifted(-0.01), large=shifted(-0.02),
                  near=shifted(0.001), three=shifted(-0.01)[:3])  # fmt: skip
    asked = of(*((variant, "dense", "lower") for variant in ("small", "large", "near", "three")),
               ("near", "dense", "equal"))  # fmt: skip
    found = verdicts.content(asked, variants)
    assert [c["more_seeds"] for c in found["claims"][0]["contrasts"]] == [
        True, False, True, False, False
    ]  # fmt: skip
    told = [line for line in shown_of(found) if line.startswith("    by seed: ")]
    assert told[0].endswith("-0.0130; more seeds are needed") and told[1].endswith("-0.0230")


def test_the_scale_names_the_seeds_that_are_compared():
    variants = values(dense=BASE, half=shifted(0.08), it=shifted(-0.02)[:3])
    found = verdicts.content(of(("it", "dense", "lower"), ("half", "it", "lower")), variants)
    assert found["claims"][0]["at"].endswith("seeds 0, 1, 2")
    # Their parts of the gap have the seeds of each, and say so where these are others.
    assert "n = 3" in verdict_text._gap_closed({"value": 0.5, "low": 0.4, "high": 0.6, "n": 3}, 2)
    assert all("half" not in c["gap_closed"] for c in found["claims"][0]["contrasts"])


def test_defects_are_told_without_a_verdict():
    variants = values(it=BASE, bad=shifted(0.02), blown=[*BASE[:4], float("nan")], new=BASE[:1])
    names = ("bad", "blown", "new", "none")
    asked = [Contrast("a", variant, "it", defect=f"what is {variant}") for variant in names]
    found = verdicts.content(replace(of(), claims=[], released=asked), variants)
    shown = shown_of(found)
    assert shown[1].startswith("  bad - it (val_loss, block a): +0.0200 [+0.0162, +0.0238], n = 5")
    assert shown[2] == "    what is bad"
    assert [line.partition("): ")[2] for line in shown[3::2]] == [
        f"blown or it has no finite {LOSS} at one of the seeds",
        *(f"{n} of 2 seeds of {variant} and it" for n, variant in ((1, "new"), (0, "none"))),
    ]
    rows = verdicts.table(found)
    assert [(r["what"], r["verdict"]) for r in rows][:2] == [
        ("bad", "as released"),
        ("blown", "as released"),
    ]
    assert rows[0]["effect"] == pytest.approx(0.02)


def test_two_seeds_are_enough_to_show_the_effect_of_a_defect():
    asked = replace(of(), claims=[], released=[Contrast("a", "bad", "it", defect="bad")])
    (found,) = verdicts.content(asked, values(it=BASE, bad=shifted(0.02)[:2]))["released"]
    assert (found["n"], found["why"], found["effect"]) == (2, "", pytest.approx(0.022))


def test_no_gap_is_closed_at_fewer_seeds_than_a_test_needs_or_on_other_data():
    fewer = values(dense=BASE, half=shifted(0.08)[:3], it=shifted(-0.02))
    elsewhere = values(dense=BASE, half=shifted(0.08), it=shifted(-0.02))
    elsewhere["a", "it"][0]["corpus_hash"] = "0" * 16
    for variants, verdict in ((fewer, "confirmed"), (elsewhere, "not tested")):
        (claim,) = verdicts.content(of(("it", "dense", "lower")), variants)["claims"]
        (contrast,) = claim["contrasts"]
        assert (contrast["verdict"], contrast["gap_closed"]) == (verdict, {})


def test_other_metrics_have_no_gap_to_close():
    variants = values(dense=BASE, half=shifted(0.08), it=shifted(-0.02))
    for by_seed in variants.values():
        for each in by_seed.values():
            each["metrics"]["flip_rate"] = each["metrics"]["val_loss"]
    asked = of(("it", "dense", "lower"), ("it", "dense", "lower", "metrics.flip_rate"))
    (claim,) = verdicts.content(asked, variants)["claims"]
    assert [list(c["gap_closed"]) for c in claim["contrasts"]] == [["it"], []]


def test_a_block_that_is_judged_by_an_accuracy_has_its_gap_in_points():
    """The gap is negative, because the half-width model is less accurate."""
    variants = values(dense=BASE, half=shifted(0.08), it=shifted(0.02))
    for by_seed in variants.values():
        for each in by_seed.values():
            each["metrics"] = {"top1": 50 - 100 * each["metrics"]["val_loss"]}
    found = verdicts.content(of(("it", "dense", "lower", "metrics.top1")), variants)
    assert found["blocks"][0]["gap"] == pytest.approx(-8)
    assert found["blocks"][0]["ratio"] == pytest.approx(0.08 / scale.std(NOISE))
    g = found["claims"][0]["contrasts"][0]["gap_closed"]["it"]
    assert g["value"] == pytest.approx(0.25) and g["low"] < 0.25 < g["high"]


def measurements(folder, ours):
    lines = [f"r{n},full,{v},1,1.5" for n, v in enumerate(ours)]
    head = "method,tier,training: mean,training: n,training: paper"
    (folder / "slope_table1-full.csv").write_text("\n".join([head, *lines]) + "\n")
    (folder / "slope_table1-full.md").write_text("- Device: NVIDIA Toy.\n- Code: revision c0.\n")


def test_measurements_are_of_a_device(tmp_path):
    measurements(tmp_path, [1.5, 0.9, 0.95, 1.0, 1.1, 1.25])
    asked = of(measured=[Speed("slope_table1", "training", "kernel"),
                         Speed("slope_table1", "training", "step", rows="r0")])  # fmt: skip
    shown = shown_of(verdicts.content(asked, {}, tmp_path))
    assert shown[:-1] == [
        "1. FST: it trains.",
        "  verdict: not reproduced on NVIDIA Toy (1 not reproduced, 1 confirmed)",
        "  the paper: 1.0",
        "  measured on NVIDIA Toy",
        "  what would decide it: More of it.",
        "  training (SLoPe, Table 1, kernel): not reproduced on NVIDIA Toy",
        "    at least half of the paper's gain in 1 of 6 rows; 0.900 to 1.500, n = 1; the paper "
        "1.500; ours is -0.20 to 1.00 times its gain",
        "    not reproduced: r1: 0.900, the paper 1.500",
        "    not reproduced: r2: 0.950, the paper 1.500",
        "    not reproduced: r3: 1.000, the paper 1.500",
        "    inconclusive: r5: 1.250, the paper 1.500",
        "    direction only: r4: 1.100, the paper 1.500",
        "  training (SLoPe, Table 1, step): confirmed",
        "    at least half of the paper's gain in 1 of 1 rows; 1.500, n = 1; the paper 1.500; ours "
        "is 1.00 times its gain",
    ]
    lines = verdict_text.wrapped(shown)
    assert max(map(len, lines)) <= 80 and " ".join(lines).split() == " ".join(shown).split()
    other = shown_of(verdicts.content(asked, {}, tmp_path / "none"))
    assert other[4].endswith("not measured (python -m reproduce table1 paper=slope tier=full)")


def test_a_statement_without_a_published_value_decides_nothing(tmp_path):
    measurements(tmp_path, [1.5])
    with (tmp_path / "slope_table1-full.csv").open("a", encoding="utf-8") as file:
        file.write("ours alone,full,0.9,1,\n")
    asked = of(measured=[Speed("slope_table1", "training", "kernel", rows=row)
                         for row in ("r0", "ours alone")])  # fmt: skip
    (claim,) = verdicts.content(asked, {}, tmp_path)["claims"]
    assert [m["verdict"] for m in claim["measured"]] == ["confirmed", "shown, not judged"]
    assert claim["verdict"] == "confirmed"


def test_a_claim_that_is_tested_in_part_says_so(tmp_path):
    measurements(tmp_path, [1.5, 0.9])
    gain = Speed("slope_table1", "training", "kernel", rows="r0")
    asked = of(measured=[gain, replace(gain, than="r1")])
    shown = shown_of(verdicts.content(asked, {}, tmp_path))
    assert shown[1] == "  verdict: not tested (1 confirmed, 1 not tested)"
    assert shown[7].startswith("  training, times as fast as r1 (SLoPe, Table 1, kernel): not tes")
    assert shown[8] == "    1.667, n = 1; the paper 1.000"
    memory = verdicts.content(of(measured=[replace(gain, less=True)]), {}, tmp_path)
    assert "  memory of training (SLoPe, Table 1, kernel): not " in shown_of(memory)[5]


def test_the_rows_of_the_csv_file(tmp_path):
    from scipy.stats import ttest_1samp

    measurements(tmp_path, [1.5])
    exact = shifted(0.02, [0.0] * 5)
    variants = values(dense=BASE, half=shifted(0.08, [0.0] * 5), it=shifted(-0.02), that=exact)
    asked = of(("it", "that", "lower"), ("it", "that", "equal"),
               measured=[Speed("slope_table1", "training", "kernel", rows="r0")])  # fmt: skip
    asked = replace(asked, released=[Contrast("a", "it", "that", defect="bad")])
    lower, equal, speed, defect = verdicts.table(verdicts.content(asked, variants, tmp_path))
    t_test = ttest_1samp([n - 0.04 for n in NOISE], 0.0)
    low, high = t_test.confidence_interval(0.95)
    ends = {"low": pytest.approx(low), "high": pytest.approx(high)}
    claim = {"claim": 1, "paper": "fst", "claim_verdict": "not reproduced"}
    runs = {"judged_by": "block a", "what": "it", "against": "that", "metric": LOSS, "n": 5,
            "effect": pytest.approx(-0.04), "why": "", **ends}  # fmt: skip
    # `that` is 0.02 above dense, and the gap 0.08, at every seed.
    g = {f"g{end}": pytest.approx((own + 0.02) / 0.08)
         for end, own in (("", -0.04), ("_low", low), ("_high", high))}  # fmt: skip
    g_against = {f"g_against{end}": pytest.approx(0.25) for end in ("", "_low", "_high")}
    assert lower == {
        **claim, **runs, **g, **g_against, "expect": "lower", "p_contrary": 1.0, "share": None,
        "margin": pytest.approx(0.02), "published": None,
        "p_expected": pytest.approx(2 * t_test.pvalue), "verdict": "confirmed",
    }  # fmt: skip
    beyond = ttest_1samp([n - 0.04 for n in NOISE], -0.02)
    assert equal["margin"] == pytest.approx(0.02) and equal["verdict"] == "not reproduced"
    assert equal["p_contrary"] == pytest.approx(2 * beyond.pvalue)  # two contrasts: Holm
    none = pytest.approx(math.nan, nan_ok=True)
    assert speed == {
        **claim, "judged_by": "slope_table1", "metric": "training", "kind": "kernel", "what": "r0",
        "against": "", "n": 1, "effect": 1.5, "published": 1.5, "share": 1.0, "low": none,
        "high": none, "device": "NVIDIA Toy", "verdict": "confirmed", "why": "",
    }  # fmt: skip
    assert defect == {**runs, "verdict": "as released"}


def test_the_command_writes_files(tmp_path, capsys, monkeypatch):
    from reproduce.__main__ import main

    variants = values(dense=BASE, half=shifted(0.08), it=shifted(-0.02))
    kept = {
        key: {s: StoredRecord(tmp_path, r) for s, r in seeds.items()}
        for key, seeds in variants.items()
    }
    read = []
    monkeypatch.setattr(
        verdicts, "read_evidence", lambda *where, only: read.append(where) or Evidence(kept, [])
    )
    asked = of(("it", "dense", "lower"), ("none", "dense", "equal"),
               measured=[Speed("torchao_table3", "speedup", "kernel")])  # fmt: skip
    monkeypatch.setattr(verdicts, "read_claims", lambda: asked)
    drawn = []
    monkeypatch.setattr(decay_curve, "write", lambda values, stem: drawn.append(stem) or True)
    assert main(["claims", "1"], runs=tmp_path) == 0
    assert drawn == [tmp_path / "report" / "claim2_mu"]
    files = "claims.json, claims.csv, claim2_mu.csv, claim2_mu.png"
    assert capsys.readouterr().out.endswith(f"written: {tmp_path / 'report'}/{files}\n")
    assert read == [(EVIDENCE, tmp_path / "evidence")]  # the committed records count first
    folder = tmp_path / "report"
    assert {path.name for path in folder.iterdir()} == {"claims.json", "claims.csv"}
    found = json.loads((folder / "claims.json").read_text(encoding="utf-8"))
    assert found["rules"] == {
        "level": 0.05, "seeds": 5, "noise": 0.02,
        "margin": {"share": 0.25, "lower": "dense", "upper": "half"},
    }  # fmt: skip
    (claim,) = found["claims"]
    first, second = claim["contrasts"]
    assert first["effect"] == pytest.approx(-0.02)
    interval = paired_interval([a - b for a, b in zip(shifted(-0.02), BASE, strict=True)])
    assert (first["low"], first["high"]) == pytest.approx(interval)
    assert first["gap_closed"]["it"]["value"] == pytest.approx(-0.25)
    assert (second["verdict"], second["effect"]) == ("not tested", None)  # NaN is no JSON
    with (folder / "claims.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(r["what"], r["verdict"]) for r in rows[:2]] == [("it", "confirmed"),
                                                             ("none", "not tested")]  # fmt: skip
    assert [(r["judged_by"], r["kind"]) for r in rows[2:]] == [("torchao_table3", "kernel")] * 2
    assert float(rows[0]["g"]) == pytest.approx(-0.25)


def test_the_command_prints_a_verdict_for_each(tmp_path, capsys, monkeypatch):
    from reproduce.__main__ import main

    monkeypatch.setattr(verdicts, "EVIDENCE", tmp_path / "none")
    gone = record("gone", 0, 3.0)
    write_json(tmp_path / "evidence" / "a" / "gone-seed0.json", gone | {"config_hash": "0"})
    assert main(["claims"], runs=tmp_path) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines()[:14])) <= 80
    # Those of speed have measurements.
    for number, line in enumerate(out.splitlines()[:14], 1):
        assert line.startswith(f"{number:2} ") and ("not tested" in line) == (number not in SPEED)
    for which, expected in (("8", "8. AST: "), ("all", "14. torchao: ")):
        assert main(["claims", which], runs=tmp_path) == 0
        told = capsys.readouterr().out
        assert f"\n{expected}" in f"\n{told}" and (which == "all") == ("\n9. AST" in told)
        assert max(len(line) for line in told.splitlines() if str(tmp_path) not in line) <= 80
        assert told.find("Student's t") > told.find("what would decide it") > 0
    assert main(["claims", "15"], runs=tmp_path) == 1
    assert capsys.readouterr().err == "error: no claim '15'; there are 1 to 14, and all\n"
    assert "left out: block a, gone, seeds 0: no block has such a run (" in " ".join(out.split())


# ------------------------------------------------------------------------------ loss against mu


def decayed(variant, alpha, flips, losses):
    overrides = [f"method.alpha={alpha}", "train.learning_rate=0.004"]
    curve = [[70, 9.0], [150, flips], [190, 9.0]]  # the warm-up's last quarter: 113 to 150
    return {
        s: record(variant, s, loss, overrides=overrides, curves={"flip_rate": curve})
        for s, loss in enumerate(losses)
    }


def test_loss_against_mu(tmp_path):
    """For factors that the pilot did not try, mu is computed from the flip rates beside FST's."""
    search = {"method": "fst", "decay_on": "gradients", "learning_rate": 0.004,
              "window": [113, 150], "feasible_mu": [0.6, 0.95],
              "candidates": [{"alpha": 3e-4, "mu": 0.8}, {"alpha": 1e-4, "mu": 0.9}]}  # fmt: skip
    other = search | {"learning_rate": 0.008, "candidates": []}
    pilot = tmp_path / "pilot.json"
    write_json(pilot, {"searches": {"other": other, "it": search}})
    variants = {
        ("a", "fst"): decayed("fst", 3e-4, 0.004, [2.0, 2.2]),
        ("a", "fst_alpha_third"): decayed("fst_alpha_third", 1e-4, 0.0044, [2.5]),
        ("a", "fst_alpha_10"): decayed("fst_alpha_10", 3e-3, 0.001, [3.0, 3.0]),
        ("a", "fst_no_end"): decayed("fst_no_end", 3e-4, 0.004, [9.0]),
    }
    found = decay_curve.factors(variants, pilot)
    assert [(f.variant, f.mu_from, f.feasible, f.n) for f in found] == [
        ("fst_alpha_10", "records", False, 2),
        ("fst", "pilot", True, 2),
        ("fst_alpha_third", "pilot", True, 1),
    ]
    assert [f.mu for f in found] == pytest.approx([0.2, 0.8, 0.9])
    assert [f.mu_records for f in found] == pytest.approx([0.2, 0.8, 0.88])
    assert [f.val_loss for f in found] == pytest.approx([3.0, 2.1, 2.5])
    assert (found[1].low, found[1].high) == pytest.approx(paired_interval([2.0, 2.2]))
    assert decay_curve.write(variants, tmp_path / "mu", pilot)
    assert (tmp_path / "mu.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "mu.csv").open(encoding="utf-8") as file:
        rows = [*csv.DictReader(file)]
    assert [row["variant"] for row in rows] == [f.variant for f in found]
    assert [row["seed 1"] for row in rows] == ["3.0", "2.2", ""]
    assert not decay_curve.write({}, tmp_path / "none", pilot)


def test_the_figure_of_loss_against_mu_shows_every_seed_and_the_interval():
    from matplotlib.figure import Figure

    two = decay_curve.Factor("fst", 3e-4, 0.8, "pilot", 0.8, True, 2, 2.1, 0.1, 1.2, 3.0,
                             {0: 2.0, 1: 2.2})  # fmt: skip
    one = replace(two, mu=0.9, n=1, low=math.nan, high=math.nan, by_seed={0: 2.1})
    axes = Figure().subplots()
    decay_curve.draw(axes, [two, one], {"dense": 2.0})
    drawn = {line.get_label(): line for line in axes.get_lines()}
    assert sorted(drawn["one seed"].get_ydata()) == [2.0, 2.1, 2.2]
    (whiskers,) = [c for c in axes.collections if len(c.get_segments()) == 2]
    assert whiskers.get_segments()[0][:, 1].tolist() == pytest.approx([1.2, 3.0])


def test_the_pilot_knows_the_factor_of_block_a():
    from reproduce.blocks import read_block

    (run,) = [
        r for r in read_block("a").runs(decay_curve.PILOT) if (r.variant, r.seed) == ("fst", 0)
    ]
    own = record("fst", 0, 2.0, overrides=run.job.overrides, curves={"flip_rate": [[150, 0.004]]})
    (found,) = decay_curve.factors({("a", "fst"): {0: own}})
    assert found.mu_from == "pilot" and found.feasible
