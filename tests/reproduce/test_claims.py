"""Verdicts on contrasts of runs, from made-up records whose differences are known, and what
claims.yaml says."""

import json
import math
from dataclasses import replace

import pytest
from scipy.stats import ttest_1samp

from experiments.runs.stats import holm, mean, p_value
from experiments.support.errors import UserError
from reproduce.execute import blocks
from reproduce.execute.blocks import read_block
from reproduce.judge import check_names
from reproduce.judge.claims import Claim, Claims, Contrast, Margin, read_claims
from reproduce.judge.verdicts import differences, judge, verdict
from reproduce.specs import published
from tests.reproduce.conftest import BASE, NOISE, shifted


def records(**variants):
    """records(variant=list of losses by seed, or {seed: loss}) -> Values of block a."""
    return {
        ("a", variant): {
            s: {"metrics": {"val_loss": loss}}
            for s, loss in (losses if isinstance(losses, dict) else dict(enumerate(losses))).items()
        }
        for variant, losses in variants.items()
    }


def judged(values, *contrasts, diverged=(), **more):
    made = [Contrast("a", *c, **more) for c in contrasts]
    claim = Claim(1, "fst", "it trains.", "1.0", made)
    rules = Claims(Margin(0.25, "dense", "half"), 0.05, 5, 0.02, [claim])
    return judge(replace(rules, diverged=dict.fromkeys(diverged, "")), claim, values)


def test_a_contrast_is_judged_by_its_rule():
    cases = [
        ("lower", -0.03, "confirmed"), ("lower", 0.02, "not reproduced"),
        ("lower", 0.001, "inconclusive"), ("lower", -0.001, "inconclusive"),
        ("higher", 0.03, "confirmed"), ("higher", -0.02, "not reproduced"),
        # half - dense is 0.08, so the margin is 0.02
        ("equal", 0.001, "confirmed"), ("equal", -0.001, "confirmed"),
        ("equal", 0.05, "not reproduced"), ("equal", -0.05, "not reproduced"),
        ("equal", 0.019, "inconclusive"), ("equal", -0.021, "inconclusive"),
    ]  # fmt: skip
    for expect, by, expected in cases:
        values = records(dense=BASE, half=shifted(0.08), it=shifted(by))
        (found,) = judged(values, ("it", "dense", expect))
        assert (found.verdict, found.n) == (expected, 5), (expect, by)
        assert found.effect == pytest.approx(by) == (found.low + found.high) / 2
        # A refutation shows in the interval: it lies beyond the margin, or has the other sign.
        ends = 0.02 if expect == "equal" else 0.0
        beyond = found.low > ends or found.high < -ends
        assert beyond == (expected == "not reproduced" if ends else expected != "inconclusive")
        assert found.margin == pytest.approx(0.02)
    # An accuracy is smaller for the half-width model, and the margin is positive all the same.
    (found,) = judged(records(dense=BASE, half=shifted(-0.08), it=BASE), ("it", "dense", "equal"))
    assert (found.margin, found.verdict) == (pytest.approx(0.02), "confirmed")


def test_the_size_counts_and_only_the_paper_s_own_setting_refutes():
    for by, paper, own, expected in [
        # The half-width model costs 0.08, so that the margin is 0.02.
        (-0.06, 0.1, False, "confirmed"),
        (-0.06, None, False, "confirmed"),
        (-0.03, 0.1, False, "direction only"),  # less than half
        (-0.05, 0.1, False, "inconclusive"),  # half is within the interval
        (-0.01, None, False, "direction only"),  # better, but equal by the margin
        (-0.012, 0.008, False, "direction only"),  # as much as the paper, which is as little
        (-0.001, 0.1, False, "not reproduced"),  # nothing, and not as much as half
        (-0.001, 0.004, False, "inconclusive"),
        (0.03, 0.1, False, "not reproduced"),
        (0.03, 0.1, True, "refuted"),
        (-0.001, 0.1, True, "refuted"),
        (-0.001, None, True, "inconclusive"),
    ]:
        values = records(dense=BASE, half=shifted(0.08), it=shifted(by), near=shifted(-by))
        more = {"own_setting": own, "paper": [20 * math.exp(-paper), 20.0] if paper else []}
        (found,) = judged(values, ("it", "dense", "lower"), **more)
        assert found.verdict == expected, (by, paper, own)
        assert found.published == (paper and pytest.approx(-paper))
        more["paper"] = more["paper"][::-1]
        assert judged(values, ("near", "dense", "higher"), **more)[0].verdict == expected
    points = Contrast("d", "it", "dense", "lower", "metrics.top1", paper=[82.3, 82.8])
    assert points.published == pytest.approx(-0.5)


@pytest.mark.parametrize("lost", [3.3, float("nan")])
def test_a_run_that_diverged_counts_and_the_verdict_is_given_without_it(lost):
    """With a number it counts like any other, without one nothing can be tested."""
    values = records(dense=BASE, half=shifted(0.08), it=[*shifted(-0.05)[:4], lost])
    listed = () if math.isnan(lost) else ("a it 4",)
    (found,) = judged(values, ("it", "dense", "lower"), diverged=listed)
    assert found.verdict == ("not tested" if math.isnan(lost) else "inconclusive")
    assert (found.without.verdict, found.without.n, found.lost) == ("confirmed", 4, (4,))
    assert judged(values, ("half", "dense", "higher"), diverged=listed)[0].without is None


def test_equality_is_judged_with_the_error_of_its_margin_and_at_both_ends_together():
    """A difference of 0.018 would be within a quarter of the gap 0.08, were that known exactly."""
    spread = [0.0, 0.03, -0.03, 0.02, -0.02]
    values = records(
        dense=BASE, half=shifted(0.08, spread), it=shifted(0.018, [n / 9 for n in NOISE])
    )
    (found,) = judged(values, ("it", "dense", "equal"))
    paired = differences(values, "a", "it", "dense", "metrics.val_loss")
    assert p_value(paired, found.margin, "below") < 0.05 < found.p_expected
    assert found.verdict == "inconclusive"
    # The gap is 0.08 at every seed, so the upper end of the margin is 0.02. That the difference
    # is above it has a p-value of 3.5 %; that it is beyond either end has twice that.
    values = records(dense=BASE, half=shifted(0.08, [0.0] * 5), it=shifted(0.0234))
    (found,) = judged(values, ("it", "dense", "equal"))
    two_sided = ttest_1samp([0.0234 + n for n in NOISE], 0.02).pvalue
    assert 0.05 < two_sided < 0.1
    assert found.p_contrary == pytest.approx(two_sided, rel=1e-6)
    assert found.verdict == "inconclusive"


def test_only_seeds_that_can_be_compared_count():
    """Seeds of both variants count, with the same first model; for equality also a margin."""
    values = records(dense={**dict(enumerate(BASE)), 7: 100.0, 8: 3.0}, half=shifted(0.08),
                     it={**dict(enumerate(shifted(-0.02))), 9: 900.0},
                     near={**dict(enumerate(shifted(0.001))), 8: 9.0})  # fmt: skip
    (found,) = judged(values, ("it", "dense", "lower"))
    assert (found.n, found.verdict, found.effect) == (5, "confirmed", pytest.approx(-0.02))
    (found,) = judged(values, ("near", "dense", "equal"))
    assert (found.n, found.verdict, found.effect) == (5, "confirmed", pytest.approx(0.001))
    values["a", "it"][0]["init"] = {"model.safetensors": "trained a second time"}
    (found,) = judged(values, ("it", "dense", "lower"))
    assert (found.n, found.why) == (4, "4 of 5 seeds of it and dense")


def test_what_is_not_tested_says_why():
    no_gap = "no margin: half does not differ significantly from dense"
    lost, run = [*BASE[:4], None], " (python -m reproduce run a)"
    for variants, n, why in [
        ({"dense": BASE, "it": shifted(0.0)[:4], "half": BASE}, 4, "4 of 5 seeds of it and dense"),
        ({"dense": BASE, "half": BASE}, 0, f"0 of 5 seeds of it and dense{run}"),
        ({"dense": BASE, "it": BASE}, 5, f"no margin: 0 of 5 seeds of half and dense{run}"),
        ({"dense": BASE, "it": shifted(0.05), "half": BASE}, 5, no_gap),
        ({"dense": BASE, "it": lost, "half": BASE}, 5,
         "it or dense has no finite metrics.val_loss at one of the seeds"),
    ]:  # fmt: skip
        values = records(**variants)
        (found,) = judged(values, ("it", "dense", "equal"))
        assert (found.verdict, found.n, found.why) == ("not tested", n, why)
        # What was measured is shown all the same, unless a run diverged.
        pairs = differences(values, "a", "it", "dense", "metrics.val_loss")
        preliminary = n > 1 and all(map(math.isfinite, pairs))
        assert math.isfinite(found.effect) == math.isfinite(found.low) == preliminary
        assert not preliminary or found.effect == mean(pairs)
    (found,) = judged(records(dense=BASE, it=lost), ("it", "dense", "lower"))
    assert found.verdict == "not tested"
    values = records(dense=BASE, it=shifted(-0.05))
    for variant, seed, corpus in (("dense", 1, "aa"), ("it", 1, "aa"), ("it", 3, "bb")):
        values["a", variant][seed]["corpus_hash"] = corpus
    (found,) = judged(values, ("it", "dense", "lower"))
    why = "it and dense had different data at seeds 3"
    assert (found.verdict, found.why) == ("not tested", why) and math.isnan(found.effect)


def test_p_values_of_a_claim_are_adjusted_together():
    """Two contrasts, each decided alone, are not decided together: the smaller p doubles. What is
    not tested costs the others nothing."""
    noise = [0.01, -0.01, 0.012, -0.004, -0.008]
    values = records(dense=BASE, one=shifted(-0.0138, noise), two=shifted(-0.0130, noise))
    ps = [p_value(differences(values, "a", one, "dense", "metrics.val_loss"))
          for one in ("one", "two")]  # fmt: skip
    assert 0.025 < ps[0] < ps[1] < 0.05
    for expect, alone_is, p_of in (("lower", "confirmed", "p_expected"),
                                   ("higher", "not reproduced", "p_contrary")):  # fmt: skip
        contrasts = [("one", "dense", expect), ("two", "dense", expect)]
        gone = ("gone", "dense", expect)
        alone = [judged(values, c, gone)[0] for c in contrasts]
        both = judged(values, *contrasts)
        assert [getattr(j, p_of) for j in alone] == ps
        assert [j.verdict for j in alone] == [alone_is, alone_is]
        assert [getattr(j, p_of) for j in both] == holm(ps)
        assert [j.verdict for j in both] == ["inconclusive", "inconclusive"]


def test_one_contrast_refutes_a_claim():
    values = records(dense=BASE, good=shifted(-0.05), bad=shifted(0.05), so_so=shifted(0.001))
    expected = {
        ("good",): "confirmed", ("good", "so_so"): "inconclusive",
        ("good", "bad"): "not reproduced", ("so_so", "bad"): "not reproduced",
        ("good", "gone"): "not tested",
        ("so_so", "gone"): "not tested", ("bad", "gone"): "not reproduced", (): "not tested",
    }  # fmt: skip
    for names, found in expected.items():
        contrasts = judged(values, *((name, "dense", "lower") for name in names))
        assert verdict([j.verdict for j in contrasts]) == found


def test_the_claims_are_those_of_the_papers():
    found, content = read_claims(), json.loads(published.FILE.read_text(encoding="utf-8"))
    assert [claim.id for claim in found.claims] == [i + 1 for i in range(len(found.claims))]
    assert (found.level, found.seeds, found.margin.share) == (0.05, 5, 0.25)
    for claim in found.claims:
        assert bool(claim.measured) != bool(claim.contrasts), f"claim {claim.id}: one of the two"
        assert claim.settles and claim.short
        known = {c["value"] for c in content["cells"] if c["work"] == claim.paper}
        assert known >= {v for c in claim.contrasts for v in c.paper}


def test_contrasts_name_variants_that_are_run_and_defects_are_all_listed():
    """claims.yaml lists every variant `*_as_released` of the blocks."""
    found = read_claims()
    assert all(c.expect for c in found.contrasts) and all(c.defect for c in found.released)
    check_names(found)
    wrong = replace(found.contrasts[0], against="densest")
    one = replace(found.claims[0], contrasts=[wrong])
    for changed in (replace(found, released=[wrong]), replace(found, claims=[one])):
        with pytest.raises(UserError, match=f"block {wrong.block} has no 'densest'"):
            check_names(changed)
    every = [(path.stem, read_block(path.stem).variants) for path in blocks.BLOCKS.glob("*.yaml")]
    there = {
        (block, v) for block, variants in every for v in variants if v.endswith("_as_released")
    }
    assert {(r.block, r.variant) for r in found.released} == there


def test_a_file_of_claims_that_means_nothing(tmp_path):
    path, text = tmp_path / "claims.yaml", blocks.BLOCKS.with_name("claims.yaml").read_text()
    for old, new, message in [
        ("expect: lower", "expect: less", "expect=less; choose of lower, higher, equal"),
        ("level: 0.05", "level: often", "level: 'often' is not of type float"),
        ("id: 2\n", "id: 1\n", "two claims have the id 1; give one of them"),
        ("paper: sste\n", "paper: who\n", "paper who has no name; add `who: NAME` to `papers:`"),
    ]:
        path.write_text(text.replace(old, new), encoding="utf-8")
        with pytest.raises(UserError) as error:
            read_claims(path)
        assert message in str(error.value) and "\n" not in str(error.value)
