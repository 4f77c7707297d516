"""Computes once more what docs/evidence.md says of claims, from the committed records and tables.
A few lines of scipy do it, which share no code with reproduce/."""

import csv
import json
import math
import re
from pathlib import Path

import numpy as np
import yaml
from scipy import stats

ROOT = Path(__file__).parents[1]
RULES = yaml.safe_load((ROOT / "reproduce/specs/claims.yaml").read_text())
ORDER = ("not reproduced", "not tested", "inconclusive", "direction only", "confirmed")


def runs(block):
    """The runs of a block by variant and seed."""
    found = {}
    path = ROOT / f"reproduce/evidence/{block}.jsonl"
    for line in path.read_text().splitlines() if path.is_file() else ():
        run = json.loads(line)
        found.setdefault(run["variant"], {})[run["seed"]] = run
    return found


def paired(block, first, second, metric):
    """The differences of two variants by seed, where they began with the same weights."""
    of, key = runs(block), metric.removeprefix("metrics.")
    one, other = of.get(first, {}), of.get(second, {})
    return {
        seed: run["metrics"][key] - other[seed]["metrics"][key]
        for seed, run in sorted(one.items())
        if seed in other and run.get("init") == other[seed].get("init")
    }


def differences(c):
    return paired(c["block"], c["variant"], c["against"], c.get("metric", "val_loss"))


def interval(x):
    half = stats.t.ppf(0.975, len(x) - 1) * stats.sem(x)
    return np.mean(x) - half, np.mean(x) + half


def holm(ps):
    order, worst, found = np.argsort(ps), 0.0, [0.0] * len(ps)
    for rank, place in enumerate(order):
        worst = found[place] = max(worst, min(1.0, (len(ps) - rank) * ps[place]))
    return found


def t_test(x, side):
    return stats.ttest_1samp(x, 0.0, alternative=side).pvalue


def with_p(c):
    """(differences, p of what is expected, p of the contrary, whether they are equal) of a
    contrast; None if there are too few seeds or there is no margin."""
    of = differences(c)
    if len(of) < RULES["seeds"]:
        return None
    own = "val_loss" if "margin_of" in c else c.get("metric", "val_loss")
    gaps = paired(c.get("margin_of", c["block"]), "half", "dense", own)
    x = np.array(list(of.values()))
    both = [seed for seed in of if seed in gaps]
    ends, inner = np.array([gaps[s] for s in both]), np.array([of[s] for s in both])
    low, high = interval(ends)
    if margin := low > 0 or high < 0:
        ends = RULES["margin"]["share"] * ends * np.sign(ends.mean())
        p = max(t_test(inner + ends, "greater"), t_test(inner - ends, "less"))
    if c["expect"] == "equal":
        beyond = [t_test(inner - ends, "greater"), t_test(inner + ends, "less")]
        return (inner, p, min(1.0, 2 * min(beyond)), True) if margin else None
    two_sided = t_test(x, "two-sided")
    agrees = (x.mean() < 0) == (c["expect"] == "lower")
    equal = margin and p < RULES["level"]
    return x, *((two_sided, 1.0) if agrees else (1.0, two_sided)), equal


def by_size(low, high, certain, half):
    """The verdict on an effect that is positive in the paper's direction."""
    if certain < 0 or (half is not None and high < half and not certain):
        return "not reproduced"
    if half is not None and high < half:
        return "direction only"
    return "confirmed" if certain and (half is None or low >= half) else "inconclusive"


def certain(ps, contrary):
    return [
        int(p < RULES["level"]) - int(q < RULES["level"])
        for p, q in zip(holm(ps), holm(contrary), strict=True)
    ]


def judged(claim):
    """The verdicts on a claim's contrasts."""
    complete = [c for c in claim.get("planned", []) if len(differences(c)) >= RULES["seeds"]]
    contrasts = [*claim.get("contrasts", []), *complete]
    found = [with_p(c) for c in contrasts]
    tested = [one for one in found if one is not None]
    signs = iter(certain([one[1] for one in tested], [one[2] for one in tested]))
    verdicts = []
    for c, one in zip(contrasts, found, strict=True):
        if one is None or claim.get("regime"):
            verdicts.append("not tested")
            continue
        sign, half = -1 if c["expect"] == "lower" else 1, None
        if c.get("paper") and c["expect"] != "equal":
            first, second = c["paper"]
            loss = c.get("metric", "val_loss").endswith("val_loss")
            half = sign * (math.log(first / second) if loss else first - second) / 2
        low, high = sorted(sign * end for end in interval(one[0]))
        verdict = by_size(low, high, next(signs), half)
        is_equal = verdict == "confirmed" and one[3] and c["expect"] != "equal"
        verdicts.append("direction only" if is_equal else verdict)
    return verdicts


def judged_speed(m):
    """The verdicts on the rows of a measured table."""
    path = ROOT / f"reproduce/measured/h200/{m['table']}-full"
    if not path.with_name(f"{path.name}.csv").is_file():
        return ["not tested"]
    with path.with_name(f"{path.name}.csv").open() as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    paper = {
        name: float(row[key])
        for name, row in rows.items()
        if row.get(key := f"{m['column']}: paper")
    }
    spec = yaml.safe_load((ROOT / f"reproduce/specs/tables/{m['table']}.yaml").read_text())
    (value,) = (c["value"] for c in spec["columns"] if c["label"] == m["column"])
    repeats = {}
    if (file := path.with_name(f"{path.name}-runs.csv")).is_file():
        for row in csv.DictReader(file.open()):
            repeats.setdefault(row["method"], []).append(float(row[value]))
    names = [n for n in rows if n.endswith(m.get("rows", "")) and n not in m.get("left_out", {})]
    if "than" in m:
        pairs = [(n, n.removesuffix(m["rows"]) + m["than"]) for n in names]
        logs = [np.log(repeats[n]) - np.log(repeats[other]) for n, other in pairs]
        ps = [t_test(x, "two-sided") for x in logs]
        up = [x.mean() > 0 for x in logs]
        signs = certain(np.where(up, ps, 1.0), np.where(up, 1.0, ps))
        halves = [math.log(paper[n] / paper[other]) / 2 for n, other in pairs]
        return [
            by_size(*interval(x), sign, half)
            for x, sign, half in zip(logs, signs, halves, strict=True)
        ]
    verdicts = []
    for n in (n for n in names if n in paper):
        mean = float(rows[n][f"{m['column']}: mean"])
        low, high = mean * (1 - RULES["noise"]), mean * (1 + RULES["noise"])
        if m["kind"] == "counted":
            low = high = mean
        elif len(repeats.get(n, ())) > 1:
            low, high = interval(repeats[n])
        gains = sorted((1 - end if m.get("less") else end - 1) for end in (low, high))
        half = (1 - paper[n] if m.get("less") else paper[n] - 1) / 2
        verdicts.append(by_size(*gains, int(gains[0] > 0) - int(gains[1] < 0), half))
    return verdicts


def test_the_verdicts_are_those_of_an_independent_computation():
    page = (ROOT / "docs/evidence.md").read_text()
    told = {
        int(n): word for n, word in re.findall(r"^\| (\d+): .*\| ([^|]+) \| [^|]* \|$", page, re.M)
    }
    assert len(told) == len(RULES["claims"]) > 17
    for claim in RULES["claims"]:
        verdicts = judged(claim) + [v for m in claim.get("measured", []) for v in judged_speed(m)]
        worst = next((word for word in ORDER if word in verdicts), "not tested")
        assert told[claim["id"]].startswith(worst), (claim["id"], verdicts)


def test_so_are_the_differences_with_their_intervals():
    page = " ".join((ROOT / "docs/evidence.md").read_text().split())
    told = re.findall(r"(?:(c|d|e\d\w*): )?`(\w+)` - `(\w+)` (\S+) \[(\S+), (\S+)\]", page)
    assert len(told) > 15
    for mark, first, second, *numbers in told:
        block = mark or ("a" if first in runs("a") else "b")
        metric = {"d": "linear_top1", "e3": "other_val_loss"}.get(block, "val_loss")
        x = list(paired(block, first, second, metric).values())
        for number, found in zip(numbers, (np.mean(x), *interval(x)), strict=True):
            digits = len(number.partition(".")[2])
            assert abs(float(number) - found) <= 0.5001 * 10**-digits, (first, second)


def share_of_width(of, variant, *between):
    """phi by the rule in e6.yaml and e7.yaml, with its interval, as it is told. between: variants
    of other widths between half and all."""
    widths = {"half": 0.5, **dict.fromkeys(between, 0.75), "dense": 1.0}
    rows = [of[v] for v in (*widths, variant)]
    seeds = sorted(set.intersection(*map(set, rows)))
    losses = np.array([[row[seed]["metrics"]["val_loss"] for seed in seeds] for row in rows])

    def share(chosen):
        *line, loss = losses[:, chosen].mean(1)
        slope, end = np.polyfit(np.log([*widths.values()]), line, 1)
        return math.exp((loss - end) / slope)

    draws = np.random.default_rng(0).integers(len(seeds), size=(2000, len(seeds)))
    ends = np.quantile([share(draw) for draw in draws], (0.025, 0.975))
    phi = share(slice(None))
    if phi < 0.5:  # above the loss of half the width the rule gives no number
        return "below 0.5", "below 0.5"
    return "{:.2f} [{:.2f}, {:.2f}]".format(phi, *ends), f"{phi:.2f}"


def told_of(block):
    """Return the texts of the block's file and of the page from what they say of it on."""
    files = (f"reproduce/specs/blocks/{block}.yaml", "Found"), ("docs/evidence.md", f"**{block}**")
    return (" ".join((ROOT / f).read_text().partition(mark)[2].split()) for f, mark in files)


# Of a block: its methods, the blocks whose shares stand in parentheses, a third width.
SHARES = {
    "e6": (("s_ste", "bi_mask", "sr_ste", "fst"), ("a",), ("three_quarters",)),
    "e7": (("s_ste", "sr_ste", "fst"), ("e6", "a"), ()),
    "e8": (("sr_ste", "fst", "slope", "bi_mask", "s_ste", "ste"), ("a",), ()),
}


def test_the_shares_of_the_width_at_three_sizes_and_on_english():
    of = {block: runs(block) for block in ("a", *SHARES)}
    of["a"]["three_quarters"] = runs("e1")["width_075"]
    for block, (names, others, between) in SHARES.items():
        told, page = told_of(block)
        for name in names:
            (own, short), *rest = (share_of_width(of[b], name, *between) for b in (block, *others))
            assert f"{name} {own} ({', '.join(long for long, _ in rest)})" in told
            assert block == "e8" or f"{short} (`{name}`)" in page
    assert "phi is 0.77 for `sr_ste` and below 0.5 for `s_ste`" in page
