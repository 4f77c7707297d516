"""Runs side by side, from made-up run folders, and statistics over seeds."""

import json
import math
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_1samp, ttest_rel

from experiments import compare
from experiments.runs import comparison
from experiments.runs.comparison import choose, differing, find, markdown, table, variants
from experiments.runs.stats import (
    decimals,
    difference_form,
    equivalence_p_value,
    holm,
    mean,
    p_value,
    paired_interval,
    ratio_interval,
)
from experiments.support.errors import UserError

LOSSES = {"dense": [3.10, 3.14, 3.08], "ste": [3.30, 3.36, 3.27], "s_ste": [3.20, 3.25, 3.19]}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """write(method, seed, loss, **changes of the config, as `train__steps`) -> its directory."""
    monkeypatch.chdir(tmp_path)

    def make(
        method="dense", seed=0, loss=3.0, variant=None, finished=True, log=(), tokens=None,
        vocabulary=None, **changed
    ):  # fmt: skip
        config = {
            "seed": seed, "runs": f"runs{seed}", "tier": "none", "impl": {"threads": seed},
            "model": {"name": "gpt2", "n_layer": 4, "n_inner": None},
            "data": {"name": "stdlib", "source": "stdlib", "root": f"data{seed}"},
            "method": {"name": method, "include": ["*mlp.*"], "total_steps": 20, "seed": seed},
            "train": {"steps": 20, "learning_rate": 0.002},
        }  # fmt: skip
        corpus = changed.pop("corpus", "cd" * 32)
        for key, value in changed.items():
            group, _, name = key.partition("__")
            config[group][name] = value
        directory = tmp_path / "runs" / "gpt2-stdlib" / (variant or f"{method}-0") / f"seed{seed}"
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps(config))
        if finished:
            result = {"schema": 1, "config_hash": "0", "seed": seed, "config": config}
            result |= {"converted": [], "corpus_hash": corpus, "steps": 20}
            result["metrics"] = {"val_loss": loss, "flip_rate": 0.1}
            if tokens is not None:
                result["tokens"] = tokens
                result["corpus"] = {"tokenizer": {"kind": "bpe", "vocab_size": vocabulary}}
            (directory / "result.json").write_text(json.dumps(result))
        text = "".join(json.dumps(record) + "\n" for record in log)
        (directory / "metrics.jsonl").write_text(text)
        return directory

    return make


@pytest.fixture
def three(write, tmp_path):
    """Three methods with three seeds; the folder of their model."""
    for method, losses in LOSSES.items():
        for seed, loss in enumerate(losses):
            log = [{"step": 0, "loss": 8.0}, {"step": 10, "loss": loss + 1, "val_loss": loss + 0.5}]
            log += [{"step": 20, "val_loss": loss}]  # as in the result: counted once
            write(method, seed, loss, log=log)
    return tmp_path / "runs" / "gpt2-stdlib"


def compared(*paths):
    return variants(find(paths)[0])


def test_runs_are_found_at_every_depth(three, write):
    """Seeds, folders, tiers and `impl` apart, runs of one config are a variant."""
    found = compared(three)
    assert [variant.label for variant in found] == ["dense", "s_ste", "ste"]
    assert all(sorted(variant.runs) == [0, 1, 2] for variant in found)
    assert differing(found) == []
    (three / "ste-0" / "seed1" / "finetune").mkdir()
    (three / "ste-0" / "seed1" / "finetune" / "result.json").write_text("{}")  # made of a run
    (three / "find_decay" / "x").mkdir(parents=True)
    for path, count in {"": 9, "gpt2-stdlib/ste-0": 3, "gpt2-stdlib/ste-0/seed1": 1}.items():
        runs, unfinished = find([three.parent / path])
        assert (len(runs), unfinished) == (count, [])
        assert len(find([three.parent / path, three.parent])[0]) == 9  # each once
    write("slope", 0, finished=False)
    runs, unfinished = find([three])
    assert (len(runs), unfinished) == (9, [three / "slope-0" / "seed0"])
    with pytest.raises(UserError, match=r"^no finished run at .*runs/gpt2-stdlib/slope-0/seed0"):
        find(iter(unfinished))


def test_variants_of_one_method_are_told_apart_by_what_differs(write):
    write("dense", 0)
    write("ste", 0, variant="a", train__steps=40, method__total_steps=40)
    write("ste", 0, variant="b", method__beta="none")
    write("s_ste", 0, method__gamma=0.5)
    write("dense", 0, variant="c", method__seed=7)
    found = compared(comparison.Path("runs"))
    assert {variant.label for variant in found} == {
        "dense, steps 20", "dense, method seed 7, steps 20", "s_ste, steps 20",
        "ste, steps 40", "ste, beta none, steps 20",
    }  # fmt: skip
    # An option that only one method has sets nobody apart from other methods.
    assert differing(found) == ["train.steps"]
    two = ("dense, steps 20", "s_ste, steps 20")
    assert differing([variant for variant in found if variant.label in two]) == []


def test_the_baseline(three, write):
    def chosen(name, part=slice(None)):
        return [variant.label for variant in choose(compared(three)[part], name)]

    assert chosen(None) == chosen(None, slice(None, None, -1)) == ["dense"]
    assert (chosen("ste"), chosen(None, slice(1, None))) == (["ste"], ["s_ste"])
    write("ste", 0, variant="ste-x", train__steps=40, method__total_steps=40)
    assert chosen("ste") == ["ste, steps 20", "ste, steps 40"]
    assert chosen("ste, steps 40") == chosen("ste-x") == ["ste, steps 40"]


def test_runs_that_hardly_compare_are_said(write, capsys):
    """In one line before the table, whose differences leave them out."""
    for method in ("dense", "ste"):
        write(method, 0, tokens=20480, vocabulary=512)
    write("s_ste", 0, tokens=40960, vocabulary=512, train__steps=40, method__total_steps=40)
    write("slope", 0, tokens=20480, vocabulary=2048, corpus="ef" * 32)
    compare.main(["runs"])
    line = capsys.readouterr().out.splitlines()[0]
    assert "20 steps, 20,480 tokens; 40 steps" in line
    found = compared(comparison.Path("runs"))
    pairs = {row.label.partition(",")[0]: row.pairs for row in table(found, found[:1])}
    assert pairs == {"dense": 0, "ste": 1, "s_ste": 0, "slope": 0}


def test_a_sweep_s_rows_are_compared_at_equal_rates_or_with_the_best(write, tmp_path):
    """STE is worse than dense at either rate; at 0.004 it is better than dense at 0.002."""
    for method, rate, loss in (
        ("dense", 0.002, 3.0), ("dense", 0.004, 2.0), ("ste", 0.002, 3.5), ("ste", 0.004, 2.5),
        ("slope", 0.008, 2.25),
    ):  # fmt: skip
        write(method, 0, loss, variant=f"{method}-{rate}", train__learning_rate=rate)
    found = compared(comparison.Path("runs"))
    baselines = choose(found, None)
    head, _, *lines = comparison.text(found, baselines).splitlines()
    assert head.startswith("| run | val_loss | seeds | compared with | difference |")
    rows = [line.replace("learning rate 0.00", "") for line in lines]
    assert rows == [
        "| dense, 2 | 3.0000 | 1 | dense, 4 | +1.0000 | - | 1 |",
        "| dense, 4 | 2.0000 | 1 | - | - | - | - |",
        "| slope, 8 | 2.2500 | 1 | dense, 4 | +0.2500 | - | 1 |",
        "| ste, 2 | 3.5000 | 1 | dense, 2 | +0.5000 | - | 1 |",
        "| ste, 4 | 2.5000 | 1 | dense, 4 | +0.5000 | - | 1 |",
        "| best dense, 4 | 2.0000 | 1 | - | - | - | - |",
        "| best slope, 8 | 2.2500 | 1 | dense, 4 | +0.2500 | - | 1 |",
        "| best ste, 4 | 2.5000 | 1 | dense, 4 | +0.5000 | - | 1 |",
    ]
    # A named baseline is the only one, and the highest accuracy is the best.
    first = found[0].label
    for variant in found:
        variant.runs[0].result["metrics"]["top1"] = variant.runs[0].result["metrics"]["val_loss"]
    assert comparison.bests(found, baselines, "metrics.top1")[0].label == f"best {first}"


def test_a_diverged_run_is_not_left_out_and_another_metric(three, write):
    write("slope", 0, None)
    write("slope", 1, 3.0)
    found = compared(three)
    text = markdown(found, table(found, found[:1]))
    assert "| slope | not finite | 2 | +nan | - | 2 |\n" in text
    assert table(found, found[:1], "metrics.flip_rate")[1].difference == 0.0
    del found[-1].runs[1].result["metrics"]["flip_rate"]  # a run may lack it
    assert math.isnan(table(found, found[:1], "metrics.flip_rate")[-1].mean)


def test_what_is_written(three, write, tmp_path, capsys):
    compare.main(["runs/gpt2-stdlib", "baseline=ste", "out=there"])
    out = tmp_path / "there"
    assert {path.name for path in out.iterdir()} == {"compare.csv", "compare.md", "compare.png"}
    text = (out / "compare.md").read_text(encoding="utf-8")
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert said.startswith(text) and "| dense | 3.1067 ± 0.0306 | 3 | -0.2033 |" in text
    single = (out / "compare.csv").read_text(encoding="utf-8").splitlines()[1:]
    assert len(single) == 9 and single[4] == "s_ste,1,3.25,runs/gpt2-stdlib/s_ste-0/seed1"
    points = comparison.curves(compared(tmp_path / "runs"), [])
    assert [(p.quantity, p.step, p.mean, p.n) for p in points if p.method == "ste"] == [
        ("val_loss", 10, pytest.approx(3.81), 3),
        ("val_loss", 20, pytest.approx(3.31), 3),
        ("loss", 10, pytest.approx(4.31), 3),
    ]
    # Some of them, into the folder of the runs.
    write("slope", 0, finished=False)
    compare.main([*map(str, Path("runs").glob("*/s*")), "runs/gpt2-stdlib/dense-0"])
    said = capsys.readouterr().out
    assert "left out, not finished: runs/gpt2-stdlib/slope-0/seed0" in said
    assert (tmp_path / "runs" / "compare" / "compare.png").is_file()


def test_a_value_has_the_decimals_that_its_interval_asks_for():
    for value, low, high, places in (
        (-0.0350, -0.0463, -0.0238, 4),
        (2.86e-5, 8.0e-6, 4.92e-5, 6),  # four would be +0.0000 [+0.0000, +0.0000]
        (0.00271, 0.0000294, 0.0054, 5),  # four would not tell the lower end from zero
        (math.nan, math.nan, math.nan, 4),
    ):
        assert decimals(value, low, high) == places
        assert difference_form(value, low, high) == f"+.{places}f"


PAIRS = [
    [0.031, 0.012, 0.027, -0.004, 0.019],
    [-1.5, -0.25, -2.0],
    [0.01, -0.01, 0.02, -0.03, 0.005, 0.0125],
    [1e-3, 1.1e-3, 1.05e-3, 0.98e-3, 1.02e-3],  # p of 1e-8: the tail itself, not 1 - the rest
]


def test_paired_t_tests_intervals_and_equivalence_are_scipys():
    for differences in PAIRS:
        for center in [0.0, 0.015, -1.0]:
            ours = [1.0 + 0.5 * i + d for i, d in enumerate(differences)]
            theirs = [1.0 + 0.5 * i + center for i, _ in enumerate(differences)]
            sides = {"both": "two-sided", "above": "greater", "below": "less"}
            for side, alternative in sides.items():
                p = p_value(differences, center, side)
                # Rounding leaves 1e-16 in a difference of 1e-3, and t has five digits more.
                paired = ttest_rel(ours, theirs, alternative=alternative).pvalue
                assert p == pytest.approx(paired, rel=1e-7)
                exact = ttest_1samp(differences, center, alternative=alternative).pvalue
                assert p == pytest.approx(exact, rel=1e-11)
        for confidence in (0.9, 0.95):
            expected = ttest_1samp(differences, 0.0).confidence_interval(confidence)
            found = paired_interval(differences, confidence)
            assert found == pytest.approx((expected.low, expected.high), rel=1e-11)
        for margin in [0.005, 0.04, 3.0]:
            above = ttest_1samp(differences, -margin, alternative="greater").pvalue
            below = ttest_1samp(differences, margin, alternative="less").pvalue
            p = equivalence_p_value(differences, [margin] * len(differences))
            assert p == pytest.approx(max(above, below), rel=1e-11)
    assert p_value([0.5, 0.5, 0.5]) == 0.0
    assert p_value([0.5, 0.5, 0.5], side="below") == 1.0
    assert p_value([0.5, 0.5, 0.5], center=0.5) == 1.0
    assert p_value([0.0, 0.0]) == 1.0
    assert equivalence_p_value([0.2, 0.2], [0.1, 0.1]) == 1.0
    assert paired_interval([0.5, 0.5, 0.5]) == (0.5, 0.5)


GAPS = [0.081, 0.084, 0.077, 0.082, 0.078]


def test_ends_of_the_interval_of_a_quotient_are_just_refused():
    """Fieller's: the quotient g is refused where the mean of numerator - g denominator is not 0."""
    for above in [[0.03, 0.011, 0.027, -0.004, 0.019], [0.08, 0.09, 0.07, 0.1, 0.06]]:
        for confidence in [0.5, 0.95]:

            def p(g, above=above):
                return p_value([a - g * b for a, b in zip(above, GAPS, strict=True)])

            low, high = ratio_interval(above, GAPS, confidence)
            g = mean(above) / mean(GAPS)
            assert low < g < high
            # The ends are roots of a quadratic: half of its discriminant's digits at the worst.
            assert [p(low), p(high)] == pytest.approx([1 - confidence] * 2, rel=1e-6)
            assert p((low + g) / 2) > 1 - confidence and p(high + 0.1) < 1 - confidence


def test_holm_is_bonferroni_on_every_subset():
    """Its closed form: an adjusted value is the largest of Bonferroni's over all sets of hypotheses
    that hold this one, each n times the least of its p-values."""
    for p in np.random.default_rng(1).uniform(0, 0.3, (20, 5)):
        subsets = [s for n in range(1, 6) for s in combinations(range(5), n)]
        closed = [
            max(min(1.0, len(s) * min(p[list(s)])) for s in subsets if i in s) for i in range(5)
        ]
        assert holm(list(p)) == pytest.approx(closed)
