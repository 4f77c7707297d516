"""Verdicts on claims, from made-up records whose differences are known."""

import json
import math
from dataclasses import replace

import pytest

from experiments.runs.stats import holm, mean, p_value
from experiments.support.errors import UserError
from reproduce import blocks, claims, published
from reproduce.blocks import read_block
from reproduce.claims import (
    Claim,
    Claims,
    Contrast,
    Margin,
    judge,
    read_claims,
    verdict,
)

BASE = [3.10, 3.14, 3.08, 3.12, 3.11]  # the dense variant's loss by seed
NOISE = [0.0, 0.004, -0.003, 0.002, -0.003]  # of a paired difference; mean 0


def records(**variants):
    """records(variant=list of losses by seed, or {seed: loss}) -> Values of block a."""
    values = {}
    for variant, losses in variants.items():
        by_seed = losses if isinstance(losses, dict) else dict(enumerate(losses))
        values["a", variant] = {s: {"metrics": {"val_loss": loss}} for s, loss in by_seed.items()}
    return values


def shifted(by, noise=NOISE):
    """Losses that differ from `BASE` by `by` in the mean."""
    return [base + by + n for base, n in zip(BASE, noise, strict=True)]


def of(*contrasts, seeds=5, diverged=(), regime="", **more):
    """Claims with one claim of these contrasts, and that claim."""
    made = [Contrast("a", *c, **more) for c in contrasts]
    claim = Claim(1, "fst", "it trains.", "1.0", made, regime=regime)
    rules = Claims(Margin(0.25, "dense", "half"), 0.05, seeds, 0.02, [claim])
    return replace(rules, diverged=dict.fromkeys(diverged, "")), claim


def judged(values, *contrasts, **more):
    return judge(*of(*contrasts, **more), values)


# ------------------------------------------------------------------------------ one contrast


@pytest.mark.parametrize(
    ("expect", "by", "expected"),
    [
        ("lower", -0.03, "confirmed"),
        ("lower", 0.02, "not reproduced"),
        ("lower", 0.001, "inconclusive"),
        ("lower", -0.001, "inconclusive"),
        ("higher", 0.03, "confirmed"),
        ("higher", -0.02, "not reproduced"),
        ("higher", -0.001, "inconclusive"),
        # half - dense is 0.08, so the margin is 0.02
        ("equal", 0.001, "confirmed"),
        ("equal", -0.001, "confirmed"),
        ("equal", 0.05, "not reproduced"),
        ("equal", -0.05, "not reproduced"),
        ("equal", 0.019, "inconclusive"),
        ("equal", 0.021, "inconclusive"),
        ("equal", -0.021, "inconclusive"),
    ],
)
def test_a_contrast_is_judged_by_its_rule(expect, by, expected):
    values = records(dense=BASE, half=shifted(0.08), it=shifted(by))
    (found,) = judged(values, ("it", "dense", expect))
    assert (found.verdict, found.n) == (expected, 5)
    assert found.effect == pytest.approx(by)
    low, high = found.interval
    assert (low + high) / 2 == pytest.approx(by)
    # A refutation shows in the interval of 95 %: it lies beyond the margin, or has the other sign.
    if expect == "equal":
        assert found.margin == pytest.approx(0.02)
        assert (low > 0.02 or high < -0.02) == (expected == "not reproduced")
    else:
        assert (low > 0 or high < 0) == (expected != "inconclusive")


@pytest.mark.parametrize(
    ("by", "paper", "own", "expected"),
    [
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
    ],
)
def test_the_size_counts_and_only_the_paper_s_own_setting_refutes(by, paper, own, expected):
    values = records(dense=BASE, half=shifted(0.08), it=shifted(by), near=shifted(-by))
    more = {"own_setting": own, "paper": [] if paper is None else [20 * math.exp(-paper), 20.0]}
    (found,) = judged(values, ("it", "dense", "lower"), **more)
    assert found.verdict == expected
    assert found.contrast.published == (paper and pytest.approx(-paper))
    more["paper"] = more["paper"][::-1]
    assert judged(values, ("near", "dense", "higher"), **more)[0].verdict == expected


def test_the_paper_s_effect_is_in_our_unit():
    points = Contrast("d", "it", "dense", "lower", "metrics.top1", paper=[82.3, 82.8])
    assert points.published == pytest.approx(-0.5)
    with pytest.raises(ValueError, match="it takes two values, of it first"):
        Contrast("d", "it", "dense", "lower", paper=[82.3])


@pytest.mark.parametrize("lost", [3.3, float("nan")])
def test_a_run_that_diverged_counts_and_the_verdict_is_given_without_it(lost):
    """With a number it counts like any other, without one nothing can be tested."""
    values = records(dense=BASE, half=shifted(0.08), it=[*shifted(-0.05)[:4], lost])
    listed = () if math.isnan(lost) else ("a it 4",)
    (found,) = judged(values, ("it", "dense", "lower"), diverged=listed)
    assert found.verdict == ("not tested" if math.isnan(lost) else "inconclusive")
    assert (found.without.verdict, found.without.n, found.lost) == ("confirmed", 4, (4,))
    assert judged(values, ("half", "dense", "higher"), diverged=listed)[0].without is None


def test_what_is_not_in_the_paper_s_regime_is_shown_and_not_tested():
    values = records(dense=BASE, half=shifted(0.08), it=shifted(-0.05))
    (found,) = judged(values, ("it", "dense", "lower"), regime="another teacher")
    assert (found.verdict, found.why) == ("not tested", "not in the paper's regime")
    assert found.effect == pytest.approx(-0.05)


def test_equal_without_any_difference():
    values = records(dense=BASE, half=shifted(0.08), it=BASE)
    assert judged(values, ("it", "dense", "equal"))[0].verdict == "confirmed"
    assert judged(values, ("it", "dense", "lower"))[0].verdict == "inconclusive"
    assert judged(values, ("it", "dense", "higher"))[0].verdict == "inconclusive"


def test_a_margin_may_be_that_of_another_block():
    """Models that are retrained take the margin of the block that has one of half the width."""
    values = records(dense=BASE, half=shifted(0.08))
    values |= {("b", variant): values["a", "dense"] for variant in ("it", "that")}
    contrast = Contrast("b", "it", "that", "equal", margin_of="a")
    claim = Claim(1, "ast", "it trains.", "1.0", [contrast])
    every = Claims(Margin(0.25, "dense", "half"), 0.05, 5, 0.02, [claim])
    (found,) = judge(every, claim, values)
    assert found.margin == pytest.approx(0.02) and found.verdict == "confirmed"
    # The records of these blocks are read, and of those that show a defect.
    assert of(("it", "that", "equal"))[0].blocks == {"a"}
    assert every.blocks == {"a", "b"}
    defects = [Contrast("c", "it", "that", defect="bad")]
    assert replace(every, released=defects).blocks == {"a", "b", "c"}


def test_a_margin_is_a_distance_whatever_the_sign_of_the_gap():
    """An accuracy is smaller for the half-width model, and the margin is positive all the same."""
    values = records(dense=BASE, half=shifted(-0.08), it=shifted(0.001))
    (found,) = judged(values, ("it", "dense", "equal"))
    assert (found.margin, found.verdict) == (pytest.approx(0.02), "confirmed")


def test_equality_is_refuted_at_the_level_of_both_ends_together():
    """The gap is 0.08 at every seed, so the upper end of the margin is 0.02. That the difference is
    above it has a p-value of 3.5 %; that it is beyond either end has twice that."""
    from scipy.stats import ttest_1samp

    values = records(dense=BASE, half=shifted(0.08, [0.0] * 5), it=shifted(0.0234))
    (found,) = judged(values, ("it", "dense", "equal"))
    two_sided = ttest_1samp([0.0234 + n for n in NOISE], 0.02).pvalue
    assert 0.05 < two_sided < 0.1
    assert found.p_contrary == pytest.approx(two_sided, rel=1e-6)
    assert found.verdict == "inconclusive"


def test_equality_is_tested_at_the_seeds_that_have_a_margin():
    """The half-width variant has no run of the sixth seed, where the difference is far off."""
    values = records(
        dense=[*BASE, 3.0], half=shifted(0.08), it=[*shifted(0.001), 9.0], that=shifted(0.001)
    )
    (found,) = judged(values, ("it", "dense", "equal"))
    (without,) = judged(values, ("that", "dense", "equal"))
    assert replace(found, contrast=without.contrast) == without
    assert (found.n, found.verdict) == (5, "confirmed")


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ({"070": 0.1, "080": -0.1, "100": -2.0}, "confirmed"),
        ({"070": 0.1, "080": -0.1, "100": 2.0}, "not reproduced"),  # sparse to the end is better
        ({"070": 0.1, "080": -3.0, "100": -2.0}, "not reproduced"),  # more than a quarter of 8
        ({"070": 0.1, "080": 3.0, "100": -2.0}, "not reproduced"),  # as much of a difference
        ({"070": 0.1, "080": -0.1, "100": 0.0}, "not reproduced"),  # nothing, where it loses 0.5
    ],
)
def test_torchao_s_claim_is_about_an_accuracy(by, expected):
    """More is better there: a model that loses points is `lower`, as the half-width model is."""
    values = {
        ("d", variant): {
            seed: {"metrics": {"linear_top1": 50 + 10 * score, "val_loss": -score}}
            for seed, score in enumerate(scores)
        }
        for variant, scores in {
            "dense": BASE,
            "half": shifted(-0.8),
            **{f"sparse_{share}": shifted(points / 10) for share, points in by.items()},
        }.items()
    }
    rules = read_claims()
    claim = next(claim for claim in rules.claims if claim.id == 13)
    found = judge(rules, claim, values)
    assert verdict([j.verdict for j in found]) == expected
    assert [j.effect for j in found] == pytest.approx([*by.values()])
    assert [j.margin for j in found] == [pytest.approx(2.0)] * 3


def test_seeds_of_one_variant_alone_are_left_out():
    """Each variant has six seeds, five in common; the other two would turn the sign of the mean."""
    values = records(
        dense={**dict(enumerate(BASE)), 7: 100.0}, it={**dict(enumerate(shifted(-0.02))), 8: 900.0}
    )
    (found,) = judged(values, ("it", "dense", "lower"))
    assert (found.n, found.verdict) == (5, "confirmed")
    assert found.effect == pytest.approx(-0.02)


@pytest.mark.parametrize(
    ("variants", "n", "why"),
    [
        ({"dense": BASE, "it": shifted(0.0)[:4], "half": BASE}, 4, "4 of 5 seeds of it and dense"),
        ({"dense": BASE, "it": shifted(0.0)[:2], "half": BASE}, 2, "2 of 5 seeds of it and dense"),
        ({"dense": BASE, "half": BASE}, 0, "0 of 5 seeds of it and dense"),
        ({}, 0, "0 of 5 seeds of it and dense"),
        (
            {"dense": BASE, "it": BASE, "half": BASE[:3]},
            5,
            "no margin: 3 of 5 seeds of half and dense",
        ),
        ({"dense": BASE, "it": BASE}, 5, "no margin: 0 of 5 seeds of half and dense"),
        (
            {"dense": BASE, "it": shifted(0.05), "half": shifted(0.001)},
            5,
            "no margin: half does not differ significantly from dense",
        ),
        (
            {"dense": BASE, "it": shifted(0.05), "half": BASE},
            5,
            "no margin: half does not differ significantly from dense",
        ),
        (
            {"dense": BASE, "it": [*BASE[:4], None], "half": BASE},
            5,
            "it or dense has no finite metrics.val_loss at one of the seeds",
        ),
    ],
)
def test_what_is_not_tested_says_why(variants, n, why):
    set_up, claim = of(("it", "dense", "equal"))
    (found,) = judge(set_up, claim, records(**variants))
    assert (found.verdict, found.n, found.why) == ("not tested", n, why)
    # What was measured is told all the same, unless a run diverged.
    pairs = claims.differences(records(**variants), "a", "it", "dense", "metrics.val_loss")
    preliminary = n > 1 and all(map(math.isfinite, pairs))
    assert math.isfinite(found.effect) == math.isfinite(found.interval[0]) == preliminary
    assert not preliminary or found.effect == mean(pairs)
    assert bool(found.by_seed) == preliminary
    assert verdict([found.verdict]) == "not tested"


def test_a_margin_has_an_error_of_its_own():
    """A difference of 0.018 would be within a quarter of the gap 0.08, were that known exactly."""
    spread = [0.0, 0.03, -0.03, 0.02, -0.02]
    values = records(
        dense=BASE, half=shifted(0.08, spread), it=shifted(0.018, [n / 9 for n in NOISE])
    )
    (found,) = judged(values, ("it", "dense", "equal"))
    assert found.margin == pytest.approx(0.02)
    paired = claims.differences(values, "a", "it", "dense", "metrics.val_loss")
    known = p_value(paired, found.margin, "below")
    assert known < 0.05 < found.p_expected and found.verdict == "inconclusive"


def test_runs_from_unequal_trainings_of_their_first_model_are_not_compared():
    values = records(it=shifted(-0.02), dense=BASE)
    for (_, variant), seeds in values.items():
        for seed, one in seeds.items():
            again = variant == "it" and seed == 0
            one["init"] = {"model.safetensors": "second" if again else "first"}
    (found,) = judged(values, ("it", "dense", "lower"))
    assert (found.n, found.why) == (4, "4 of 5 seeds of it and dense")


def test_runs_on_other_data_are_not_compared():
    values = records(dense=BASE, it=shifted(-0.02))
    for variant, seed, corpus in (("dense", 1, "aa"), ("it", 1, "aa"), ("it", 3, "bb")):
        values["a", variant][seed]["corpus_hash"] = corpus
    (found,) = judged(values, ("it", "dense", "lower"))
    assert (found.verdict, found.why) == (
        "not tested",
        "it and dense had different data at seeds 3",
    )
    assert math.isnan(found.effect)


def test_a_diverged_run_decides_nothing():
    """NaN is null in JSON; left out, it would make its variant look better than it is."""
    values = records(dense=BASE, it=[*shifted(-0.02)[:4], float("nan")])
    for expect in ("lower", "higher"):
        assert judged(values, ("it", "dense", expect))[0].verdict == "not tested"
    (found,) = judged(values, ("it", "dense", "lower", "metrics.no_such"))
    assert "no finite metrics.no_such" in found.why


# ------------------------------------------------------------------------------ a claim


@pytest.mark.parametrize(
    ("expect", "alone_is", "p_of"),
    [("lower", "confirmed", "p_expected"), ("higher", "not reproduced", "p_contrary")],
)
def test_p_values_of_a_claim_are_adjusted_together(expect, alone_is, p_of):
    """Two contrasts, each decided alone, are not decided together: the smaller p doubles."""
    noise = [0.01, -0.01, 0.012, -0.004, -0.008]
    values = records(dense=BASE, one=shifted(-0.0138, noise), two=shifted(-0.0130, noise))
    contrasts = [("one", "dense", expect), ("two", "dense", expect)]
    alone = [judged(values, c)[0] for c in contrasts]
    both = judged(values, *contrasts)
    ps = [p_value(claims.differences(values, "a", c[0], "dense", "metrics.val_loss"))
          for c in contrasts]  # fmt: skip
    assert 0.025 < ps[0] < ps[1] < 0.05
    assert [getattr(j, p_of) for j in alone] == ps
    assert [j.verdict for j in alone] == [alone_is, alone_is]
    assert [getattr(j, p_of) for j in both] == holm(ps)
    assert [j.verdict for j in both] == ["inconclusive", "inconclusive"]


def of_claim(values, *contrasts):
    return verdict([j.verdict for j in judged(values, *contrasts)])


def test_one_contrast_refutes_a_claim():
    values = records(dense=BASE, good=shifted(-0.05), bad=shifted(0.05), so_so=shifted(0.001))
    good, bad, so_so, gone = (
        (variant, "dense", "lower") for variant in ("good", "bad", "so_so", "not_run")
    )
    assert of_claim(values, good) == "confirmed"
    assert of_claim(values, good, so_so) == "inconclusive"
    assert of_claim(values, good, bad) == "not reproduced"
    assert of_claim(values, so_so, bad) == "not reproduced"
    assert of_claim(values, good, gone) == "not tested"
    assert of_claim(values, so_so, gone) == "not tested"
    assert of_claim(values, bad, gone) == "not reproduced"
    assert verdict([]) == "not tested"


def test_what_is_not_tested_costs_the_others_nothing():
    values = records(dense=BASE, it=shifted(-0.02))
    alone, (beside, _) = (
        judged(values, ("it", "dense", "lower")),
        judged(values, ("it", "dense", "lower"), ("gone", "dense", "lower")),
    )
    assert beside.p_expected == alone[0].p_expected


# ------------------------------------------------------------------------------ claims.yaml


def test_the_claims_are_those_of_the_papers():
    found = read_claims()
    assert [claim.id for claim in found.claims] == list(range(1, 15))
    assert (found.level, found.seeds, found.margin.share) == (0.05, 5, 0.25)
    for claim in found.claims:
        assert bool(claim.measured) != bool(claim.contrasts), f"claim {claim.id}: one of the two"
        assert claim.settles and claim.short
    # SLoPe's Table B.4 has accuracies: 19.43 is better than 18.33.
    assert "accuracy 19.43 against 18.33 %" in found.claims[10].number


def test_the_paper_s_values_of_a_contrast_are_published():
    content = json.loads(published.FILE.read_text(encoding="utf-8"))
    for claim in read_claims().claims:
        known = {c["value"] for c in content["cells"] if c["work"] == claim.paper}
        assert known >= {v for c in claim.contrasts for v in c.paper}


@pytest.mark.parametrize(
    ("block", "pilots"),
    [("a", ["pilot_method_rates"]), ("c", ["pilot_c_rates", "pilot_c_rates_again"])],
)
def test_the_rates_that_are_not_bracketed_are_named(block, pilots):
    """The best rate of a grid at its edge is not a tuned rate."""
    tried, edges, rule = {}, set(), read_block(block)
    for variant, _, rate in (
        variant.partition(" ") for p in pilots for variant in read_block(p).variants
    ):
        tried.setdefault(variant, []).append(float(rate))
    shared = [o for o in rule.overrides if o.startswith("train.learning_rate=")]
    for variant, rates in tried.items():
        own = [o for o in rule.variants[variant] if o.startswith("train.learning_rate=")]
        used = float((own or shared)[0].partition("=")[2])
        edges |= {variant} if used in (min(rates), max(rates)) else set()
    said = read_claims().rates[block]
    assert edges == {variant for variant, what in said.items() if "largest" in what}
    assert not {variant for variant, what in said.items() if "not searched" in what} & tried.keys()


NEED_A_FACTOR = ("fst", "sr_ste", "bi_mask")  # methods with a decay factor, which pilots find


def test_contrasts_name_variants_that_are_run():
    """Every variant that a contrast names is in its block, if the block has a file. A block whose
    pilot is not done has no variant with a decay factor yet; once it has one it must have all."""
    found, missing = read_claims(), set()
    for contrast in [c for claim in found.claims for c in claim.contrasts]:
        if not (blocks.BLOCKS / f"{contrast.block}.yaml").is_file():
            continue
        known = read_block(contrast.block).variants
        wanted = {contrast.variant, contrast.against}
        if not any(variant.startswith(NEED_A_FACTOR) for variant in known):
            wanted = {variant for variant in wanted if not variant.startswith(NEED_A_FACTOR)}
        missing |= {f"{contrast.block}: {variant}" for variant in wanted - known.keys()}
        if contrast.expect == "equal":
            other = contrast.margin_of or contrast.block
            ends = {found.margin.lower, found.margin.upper}
            missing |= {
                f"{other}: {variant}" for variant in ends - read_block(other).variants.keys()
            }
    assert missing == set()


def test_defects_are_those_of_the_variants_as_released():
    """claims.yaml lists every variant `*_as_released` of the blocks, beside a variant that differs
    from it in nothing but the method."""
    listed = {(r.block, r.variant): r for r in read_claims().released}
    there = {
        (path.stem, variant)
        for path in blocks.BLOCKS.glob("*.yaml")
        for variant in read_block(path.stem).variants
        if variant.endswith("_as_released")
    }
    assert listed.keys() == there
    for (block, variant), released in listed.items():
        variants = read_block(block).variants
        defective, right = variants[variant], variants[released.against]
        assert {
            x for x in defective if not x.startswith(("method=", "method.n=", "method.m="))
        } == {x for x in right if not x.startswith("method=")}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("expect: lower", "expect: less"), "expect=less; choose one of lower, higher, equal"),
        (("level: 0.05", "level: often"), "level: 'often' is not of type float"),
        (("says:", "tells:"), "has no key tells"),
        (("kind: step", "kind: guess"), "kind=guess; choose one of kernel, step, projected"),
        (("seeds: 5", "seeds: 1"), "seeds=1; one pair has no spread"),
        (("claims:", "claims: ["), "while parsing"),
    ],
)
def test_a_file_of_claims_that_means_nothing(changed, message, tmp_path):
    path = tmp_path / "claims.yaml"
    text = (
        "margin: {share: 0.25, lower: dense, upper: half}\nlevel: 0.05\nseeds: 5\nnoise: 0.02\n"
        "claims:\n"
        "  - {id: 1, paper: fst, says: it trains, number: '1',\n"
        "     contrasts: [{block: a, variant: it, against: dense, expect: lower}],\n"
        "     measured: [{table: t, column: c, kind: step}]}\n"
    )
    path.write_text(text, encoding="utf-8")
    assert read_claims(path).claims[0].contrasts[0].metric == "metrics.val_loss"
    path.write_text(text.replace("seeds: 5", "seeds: 2"), encoding="utf-8")
    assert read_claims(path).seeds == 2
    assert changed[0] in text
    path.write_text(text.replace(*changed), encoding="utf-8")
    with pytest.raises(UserError) as error:
        read_claims(path)
    assert message in str(error.value) and "\n" not in str(error.value)
