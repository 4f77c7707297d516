"""Texts, JSON and CSV of the claims, from made-up records."""

import json
import math
from dataclasses import replace

import pytest

from experiments.runs.stats import paired_interval, ratio_interval, std
from experiments.support.checkpoint import write_json
from reproduce import judge
from reproduce.__main__ import main
from reproduce.judge import content, scale, text
from reproduce.judge.claims import Claim, Claims, Contrast, Margin, Speed, read_claims
from reproduce.records import setting
from tests.reproduce.conftest import BASE, NOISE, shifted

SPEED = (4, 12, 14)  # claims that are judged by measurements
MARGIN, LOSS = Margin(0.25, "dense", "half"), "metrics.val_loss"
AT = "at this scale: gpt2_toy, 2M tokens, 2,000 tokens a step, data=words (abcdef012345), seeds "
GAIN = Speed("slope_table1", "training", "kernel")


def record(variant, seed, loss, model="gpt2_toy", **changed):
    return {
        "block": "a", "variant": variant, "seed": seed, "corpus_hash": "abcdef0123456789",
        "overrides": [f"model={model}", "data=words", "method=ste"], "steps": 1000,
        "tokens": 2_000_000, "metrics": {"val_loss": loss}, "curves": {},
    } | changed  # fmt: skip


def values(**variants):
    """values(variant=losses by seed) -> Values of block a."""
    return {
        ("a", variant): {seed: record(variant, seed, loss) for seed, loss in enumerate(losses)}
        for variant, losses in variants.items()
    }


def of(*contrasts, **changed):
    claim = Claim(1, "fst", "it trains.", "1.0", [Contrast("a", *c) for c in contrasts])
    claim = replace(claim, settles="More of it.", **changed)
    return Claims(MARGIN, 0.05, 5, 0.02, [claim], papers={"fst": "FST"}, legend="Legend.")


def measurements(folder, ours):
    lines = [f"r{n},full,{v},1,1.5" for n, v in enumerate(ours)]
    head = "method,tier,training: mean,training: n,training: paper"
    (folder / "slope_table1-full.csv").write_text("\n".join([head, *lines]) + "\n")
    facts = {"facts": {"Device": "NVIDIA Toy", "Code": "revision c0"}}
    (folder / "slope_table1-full.json").write_text(json.dumps(facts))


def test_the_gap_that_a_method_closes():
    """A quarter of the way from dense to half, with Fieller's interval of the pairs, at the seeds
    that all three have; a share of a gap that may be zero means nothing."""
    gap, own = [0.081, 0.084, 0.077, 0.082, 0.076], [0.021, 0.018, 0.024, 0.019, 0.018]
    variants = values(dense=BASE, half=[b + g for b, g in zip(BASE, gap, strict=True)],
                      it=[b + o for b, o in zip(BASE, own, strict=True)])  # fmt: skip

    def closed(variant, seeds, of=variants):
        return scale.gap_closed(of, "a", variant, LOSS, MARGIN, seeds)

    found = closed("it", 5)
    assert (found["value"], found["n"]) == (pytest.approx(0.25), 5)
    assert (found["low"], found["high"]) == pytest.approx(ratio_interval(own, gap))
    assert closed("half", 5)["value"] == pytest.approx(1.0)
    assert closed("dense", 5) is None and closed("it", 6) is None
    del variants["a", "half"][2], variants["a", "dense"][3]
    assert closed("it", 3)["n"] == 3
    variants["a", "it"][0]["metrics"]["val_loss"] = None
    assert closed("it", 3) is None
    assert closed("it", 5, values(dense=BASE, half=shifted(0.0), it=shifted(0.02))) is None
    # Beside a contrast it is shown of its main metric, on the same data.
    elsewhere = values(dense=BASE, half=shifted(0.08), it=shifted(-0.02))
    asked = of(("it", "dense", "lower"), ("it", "dense", "lower", "metrics.val_loss2"))
    for corpus, expected in (("abcdef0123456789", [["it"], []]), ("0" * 16, [[], []])):
        elsewhere["a", "it"][0]["corpus_hash"] = corpus
        (claim,) = content(asked, elsewhere)["claims"]
        assert [[*c["gap_closed"]] for c in claim["contrasts"]] == expected


def test_whether_a_block_can_tell_variants_apart():
    variants = values(dense=BASE, half=shifted(0.08), one=shifted(0.01, [2 * n for n in NOISE]),
                      two=shifted(0.02), three=[*shifted(0.0)[:4], math.nan])  # fmt: skip
    variants["b", "one"] = variants["a", "one"]  # of another block
    found, spread = scale.half_width_gap(variants, "a", LOSS, MARGIN), std(NOISE)
    low, high = paired_interval([0.08 + noise for noise in NOISE])
    # Of two variants with a number at every seed the median is between them.
    expected = {"gap": 0.08, "n": 5, "std": spread, "ratio": 0.08 / spread, "low": low,
                "high": high, "other_variants": 2, "other_std": 1.5 * spread,
                "other_ratio": 0.08 / (1.5 * spread)}  # fmt: skip
    assert {key: found[key] for key in expected} == pytest.approx(expected)
    for few in (values(dense=BASE), values(dense=BASE, half=[3.2]),
                values(dense=BASE, half=[*BASE[:4], math.nan])):  # fmt: skip
        assert scale.half_width_gap(few, "a", LOSS, MARGIN) is None
    # Of an accuracy the gap is negative. Differences that are all equal can be told apart.
    exact = values(dense=[2.0, 3.0], half=[1.5, 2.5], one=[2.25, 3.25])
    found = scale.half_width_gap(exact, "a", LOSS, MARGIN)
    assert (found["n"], found["gap"], found["ratio"]) == (2, -0.5, math.inf)


def test_the_scale_of_runs():
    records = [record("it", 1, 3.0), record("it", 0, 3.0)]
    assert f"at this scale: {setting(records)}" == AT + "0, 1" and setting([]) == ""
    other = record("half", 2, 3.0, model="deit_toy", tokens=999_000)
    words = "gpt2_toy or deit_toy, 2M tokens or 999,000 image tokens, 2,000 "
    assert setting([*records, other]).startswith(words)


def test_more_seeds_are_asked_for_and_complete_runs_count():
    """Wider than half of the effect; than half of the margin where the effect should be nothing."""
    names = ("small", "large", "near")
    asked = [*((name, "dense", "lower") for name in names), ("near", "dense", "equal")]
    runs = values(dense=BASE, half=shifted(0.08), small=shifted(-0.01), large=shifted(-0.02),
                  near=shifted(0.001))  # fmt: skip
    found = content(of(*asked), runs)["claims"][0]["contrasts"]
    assert [c["more_seeds"] for c in found] == [True, False, True, False]
    rules = of(planned=[Contrast("a", "it", "dense", "lower")])
    for seeds, found in ((4, "not tested"), (5, "confirmed")):
        (claim,) = content(rules, values(dense=BASE, it=shifted(-0.03)[:seeds]))["claims"]
        assert (claim["verdict"], len(claim["contrasts"])) == (found, seeds - 4)


def test_defects_are_told_without_a_verdict():
    """Two seeds are enough for it."""
    asked = [Contrast("a", name, "it", defect=f"what is {name}") for name in ("bad", "two", "new")]
    runs = values(it=BASE, bad=shifted(0.02), two=shifted(0.02)[:2], new=BASE[:1])
    found = content(replace(of(), claims=[], released=asked), runs)
    assert text.lines(found)[2] == "    what is bad"
    assert {r["verdict"] for r in found["released"]} == {"as released"}


def test_measurements_are_of_a_device(tmp_path):
    measurements(tmp_path, [1.5, 0.9, 1.1, 1.25])
    asked = of(measured=[GAIN, replace(GAIN, kind="step", rows="r0")])
    shown = text.lines(content(asked, {}, tmp_path))
    assert shown[1] == "  verdict: not reproduced on NVIDIA Toy (1 not reproduced, 1 confirmed)"
    assert shown[3] == "  measured on NVIDIA Toy"
    assert shown[5] == "  training (SLoPe, Table 1, kernel): not reproduced on NVIDIA Toy"
    assert shown[7] == "    not reproduced: r1: 0.900, the paper 1.500"
    lines = text.wrapped(shown)
    assert max(map(len, lines)) <= 80 and " ".join(lines).split() == " ".join(shown).split()
    # Without a published value nothing is decided; one that is not tested is not forgotten.
    with (tmp_path / "slope_table1-full.csv").open("a", encoding="utf-8") as file:
        file.write("ours alone,full,0.9,1,\n")
    gain = replace(GAIN, rows="r0")
    for one, each, whole in (
        (replace(GAIN, rows="ours alone"), "shown, not judged", "confirmed"),
        (replace(gain, than="r1"), "not tested", "not tested"),
        (replace(gain, less=True), "not reproduced", "not reproduced"),
    ):
        (claim,) = content(of(measured=[gain, one]), {}, tmp_path)["claims"]
        assert [m["verdict"] for m in claim["measured"]] == ["confirmed", each]
        assert claim["verdict"] == whole


def test_the_command_prints_and_writes_a_verdict_for_each(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(judge, "EVIDENCE", tmp_path / "none")
    gone = record("gone", 0, 3.0)
    write_json(tmp_path / "evidence" / "a" / "gone-seed0.json", gone | {"config_hash": "0"})
    assert main(["claims"], runs=tmp_path) == 0
    out = capsys.readouterr().out
    # Those of speed have measurements.
    for number, line in enumerate(out.splitlines()[:14], 1):
        assert line.startswith(f"{number:2} ") and ("not tested" in line) == (number not in SPEED)
    for which, expected in (("8", "8. AST: "), ("all", "14. torchao: ")):
        assert main(["claims", which], runs=tmp_path) == 0
        told = capsys.readouterr().out
        assert f"\n{expected}" in f"\n{told}" and (which == "all") == ("\n9. AST" in told)
        assert max(len(line) for line in told.splitlines() if str(tmp_path) not in line) <= 80
    assert main(["claims", "99"], runs=tmp_path) == 1
    last = len(read_claims().claims)
    assert capsys.readouterr().err == f"error: no claim '99'; there are 1 to {last}, and all\n"
    assert "left out: block a, gone, seeds 0: no block has such a run (" in " ".join(out.split())
    found = json.loads((tmp_path / "report" / "claims.json").read_text(encoding="utf-8"))
    assert found["claims"][0]["contrasts"][0]["effect"] is None  # NaN is no JSON
