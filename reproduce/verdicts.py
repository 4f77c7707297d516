"""Prints and writes the claims with their verdicts: `python -m reproduce claims`.

Writes `runs/report/claims.json`, all of it, and `claims.csv`, a line for each contrast, each
measured row and each defect of released code; beside them the loss against mu of claim 2
(decay_curve.py).
"""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from experiments.runs.stats import difference_form, mean, paired_interval
from experiments.support.checkpoint import csv_text, write_json, write_text
from reproduce import decay_curve, scale
from reproduce.blocks import EVIDENCE
from reproduce.claims import (
    CONFIRMED,
    INCONCLUSIVE,
    NOT_TESTED,
    REFUTED,
    Claim,
    Claims,
    Judged,
    Released,
    differences,
    judge,
    read_claims,
    verdict,
)
from reproduce.paper_speeds import MEASURED
from reproduce.records import Values, read_evidence
from reproduce.speed_claims import SHOWN, Measured, judge_speed

Found = dict[str, Any]
PRELIMINARY = 2  # seeds from which on g is shown beside an effect that is not tested
LEGEND = (
    "n is the number of seeds that both arms have, or of repeats of a measurement. [ ] is the "
    "95 % interval of the mean paired difference (Student's t). p belongs to the expected result "
    "or, where marked, to the contrary, and is adjusted for the number of contrasts in a claim "
    "(Holm); so a single interval can exclude 0 although the verdict is inconclusive. More seeds "
    "are asked for where an interval is wider than half of the effect (or of the margin, if that "
    "is larger). Losses are in nats, flip rates are fractions of the mask per step, accuracies in "
    "percentage points."
)


def content(claims: Claims, values: Values, measured: Path = MEASURED) -> Found:
    """All claims with their verdicts and evidence, and what the blocks can tell, as plain
    values."""
    metrics = _metrics(claims)
    return {
        "rules": {
            "level": claims.level,
            "seeds": claims.seeds,
            "noise": claims.noise,
            "margin": dataclasses.asdict(claims.margin),
        },
        "blocks": [
            dataclasses.asdict(gap)
            for block, metric in metrics.items()
            if (gap := scale.half_width_gap(values, block, metric, claims.margin)) is not None
        ],
        "claims": [_claim(claims, claim, values, measured) for claim in claims.claims],
        "released": [_released(released, values) for released in claims.released],
    }


def _metrics(claims: Claims) -> dict[str, str]:
    """The metric that the arms of each block are chiefly compared by, a loss or an accuracy."""
    found: dict[str, str] = {}
    for contrast in (contrast for claim in claims.claims for contrast in claim.contrasts):
        found.setdefault(contrast.block, contrast.metric)
    return found


def _claim(claims: Claims, claim: Claim, values: Values, measured: Path) -> Found:
    contrasts = [_contrast(claims, j, values) for j in judge(claims, claim, values)]
    speeds = [_speed(judge_speed(claims, speed, measured)) for speed in claim.measured]
    parts = [part["verdict"] for part in [*contrasts, *speeds] if part["verdict"] != SHOWN]
    return {
        "id": claim.id,
        "paper": claim.paper,
        "says": claim.says.strip(),
        "number": claim.number,
        "verdict": verdict(parts),
        "parts": _parts(parts),
        "at": _at(claim, values, speeds),
        "settles": claim.settles if {REFUTED, INCONCLUSIVE} & set(parts) else "",
        "decides": claim.decides,
        "contrasts": contrasts,
        "measured": speeds,
    }


def _parts(verdicts: list[str]) -> str:
    """The verdicts on the parts of a claim that is not tested because some of them are not; "" if
    no part is tested."""
    if verdict(verdicts) != NOT_TESTED or set(verdicts) <= {NOT_TESTED}:
        return ""
    known = Counter(one for one in verdicts if one != NOT_TESTED)
    told = ", ".join(f"{count} {word}" for word, count in known.items())
    return f"{told} of {len(verdicts)} parts"


def _at(claim: Claim, values: Values, speeds: list[Found]) -> str:
    """The device, or the scale of the compared runs, for which the verdict holds."""
    if claim.measured:
        devices = dict.fromkeys(speed["device"] for speed in speeds if speed["device"])
        return f"measured on {'; '.join(devices)}" if devices else ""
    compared: dict[tuple[str, str], dict[int, Any]] = {}
    for c in claim.contrasts:
        pair = [values.get((c.block, arm), {}) for arm in (c.arm, c.against)]
        both = pair[0].keys() & pair[1].keys()
        for arm, records in zip((c.arm, c.against), pair, strict=True):
            compared.setdefault((c.block, arm), {}).update({s: records[s] for s in both})
    told = scale.of_records([r for _, seeds in sorted(compared.items()) for r in seeds.values()])
    return f"at this scale: {told}" if told else ""


def _contrast(claims: Claims, judged: Judged, values: Values) -> Found:
    found = {**dataclasses.asdict(judged.contrast), **dataclasses.asdict(judged)}
    del found["contrast"]
    found["more_seeds"] = judged.more_seeds
    found["low"], found["high"] = found.pop("interval")
    c, found["gap_closed"] = judged.contrast, {}
    if c.metric == _metrics(claims)[c.block] and math.isfinite(judged.effect):
        seeds = PRELIMINARY if judged.why else claims.seeds
        for arm in (c.arm, c.against):
            g = scale.gap_closed(values, c.block, arm, c.metric, claims.margin, seeds)
            if g is not None and arm != claims.margin.upper:  # whose g is 1 by definition
                found["gap_closed"][arm] = dataclasses.asdict(g)
    return found


def _released(released: Released, values: Values) -> Found:
    """The effect of a defect of released code, without a verdict; two seeds are enough. A run that
    diverged is named, not left out."""
    r = released
    paired = differences(values, r.block, r.arm, r.against, r.metric)
    finite = all(map(math.isfinite, paired))
    told = len(paired) > 1 and finite
    low, high = paired_interval(paired) if told else (math.nan, math.nan)
    return {
        **dataclasses.asdict(r),
        "n": len(paired),
        "effect": mean(paired) if told else math.nan,
        "low": low,
        "high": high,
        "why": "" if told else f"n = {len(paired)}" if finite else "a run diverged",
    }


def _speed(measured: Measured) -> Found:
    found = {**dataclasses.asdict(measured.speed), **dataclasses.asdict(measured)}
    del found["speed"]
    for line in found["lines"]:
        line["low"], line["high"] = line.pop("interval")
    return found


# --- text ----------------------------------------------------------------------------------------


def lines(found: Found) -> list[str]:
    """The lines that are printed on a terminal."""
    text = []
    for claim in found["claims"]:
        word = ": ".join(filter(None, (claim["verdict"], claim["parts"])))
        text.append(f"{claim['id']}. [{word}] {claim['paper']}: {claim['says']}")
        text.append(f"   the paper: {claim['number']}")
        if claim["at"]:
            text.append(f"   {claim['at']}")
        for contrast in claim["contrasts"]:
            text += _contrast_lines(contrast)
        for measured in claim["measured"]:
            text += _measured_lines(measured)
        if claim["settles"]:
            text.append(f"   would settle it: {claim['settles']}")
    if found["released"]:
        text.append(
            "As released: what a defect of the authors' code changes (minus the arm without it)."
        )
    for released in found["released"]:
        text += _released_lines(released)
    for gap in found["blocks"]:
        text.append(_gap_line(gap))
    return text


def _name(c: Found) -> str:
    return f"   {c['arm']} - {c['against']} ({c['metric'].rpartition('.')[2]}, block {c['block']})"


def _released_lines(r: Found) -> list[str]:
    return [f"{_name(r)}: {r['why'] or _effect(r)}", f"      {r['defect']}"]


def _effect(c: Found) -> str:
    form = difference_form(c["effect"], c["low"], c["high"])
    return f"{c['effect']:{form}} [{c['low']:{form}}, {c['high']:{form}}], n = {c['n']}"


def _contrast_lines(c: Found) -> list[str]:
    name = _name(c)
    if c["verdict"] == NOT_TESTED:
        so_far = f": so far {_effect(c)}" if math.isfinite(c["effect"]) else ""
        told = [f"{name}: not tested, {c['why']}{so_far}"]
    else:
        margin = "" if c["margin"] is None else f" within {c['margin']:.4f}"
        told = [
            f"{name}: {_effect(c)}, expected {c['expect']}{margin}, p = {p_told(c)}: {c['verdict']}"
        ]
    if c["by_seed"]:
        form = difference_form(c["effect"], c["low"], c["high"])
        seeds = ", ".join(f"{seed} {one:{form}}" for seed, one in c["by_seed"].items())
        more = "; more seeds are asked for" if c["more_seeds"] else ""
        told.append(f"      by seed: {seeds}{more}")
    closed = [f"{arm} {_part(g, c['n'])}" for arm, g in c["gap_closed"].items()]
    if closed:
        told.append(
            f"      g (0: as good as dense, 1: as bad as half the width): {'; '.join(closed)}"
        )
    return told


def p_told(c: Found) -> str:
    """The p-value of a tested contrast: that of the contrary where this is the smaller one."""
    expected, contrary = c["p_expected"], c["p_contrary"]
    return f"{contrary:.2g} (contrary)" if contrary < expected else f"{expected:.2g}"


def _part(g: Found, n: int) -> str:
    # Fieller's interval is endless where half the width is not told from dense.
    known = f" [{g['low']:.2f}, {g['high']:.2f}]" if math.isfinite(g["low"]) else ""
    return f"{g['value']:.2f}{known}" + (f" (n = {g['n']})" if g["n"] != n else "")


def _measured_lines(m: Found) -> list[str]:
    """A statement on speed in one line, then the rows that speak against it."""
    name = f"   {statement(m)}"
    if not m["lines"]:
        return [f"{name}: not tested, {m['why']}"]
    ours, papers, repeats = (
        _range([line[key] for line in m["lines"] if line[key] is not None], form)
        for key, form in (("ours", ".3f"), ("paper", ".3f"), ("n", "d"))
    )
    told = f"{name}: {ours}; the paper {papers or 'gives none'}; n = {repeats}"
    if m["verdict"] == NOT_TESTED:
        return [f"{told}: not tested, {m['why']}"]
    if m["verdict"] == SHOWN:
        return [f"{told}: {SHOWN}"]
    where = m["device"].partition(",")[0]
    text = [f"{told}; {agreement(m)}: {m['verdict']} on {where}"]
    for found in (REFUTED, INCONCLUSIVE):
        rows = [line for line in m["lines"] if line["verdict"] == found]
        text += [f"      {found}: {_row(x)}" for x in sorted(rows, key=_gain_left)[:3]]
        if len(rows) > 3:
            text.append(f"      {found}: and {len(rows) - 3} more (claims.csv)")
    return text


def statement(m: Found) -> str:
    """The name of a statement on speed or memory, with the table that it is judged by."""
    memory = "memory of " if m["less"] else ""
    than = f", times as fast as {m['than'].strip(' /')}" if m["than"] else ""
    return f"{memory}{m['column']}{than} ({m['table']}, {m['kind']})"


def agreement(m: Found) -> str:
    """The number of rows that confirm a statement on speed or memory; "" where none is judged."""
    judged = [x["verdict"] for x in m["lines"] if x["verdict"] not in (SHOWN, NOT_TESTED)]
    what = "faster" if m["than"] else "at least half of the paper's gain"
    return f"{what} in {judged.count(CONFIRMED)} of {len(judged)} rows" if judged else ""


def _row(line: Found) -> str:
    interval = "" if line["n"] < 2 else f" [{line['low']:.3f}, {line['high']:.3f}]"
    paper = "-" if line["paper"] is None else f"{line['paper']:.3f}"
    return f"{line['label']}: {line['ours']:.3f}{interval}, the paper {paper}"


def _gain_left(line: Found) -> float:
    """Our factor as a share of the paper's; rows are sorted by it, the least first."""
    return line["ours"] / line["paper"] if line["paper"] else line["ours"]


def _range(values: Iterable[float], form: str) -> str:
    ends = sorted(values)
    told = dict.fromkeys(f"{end:{form}}" for end in ends[:1] + ends[-1:])
    return " to ".join(told)


def _gap_line(gap: Found) -> str:
    metric, met = gap["metric"].rpartition(".")[2], gap["ratio"] >= scale.ENOUGH
    told = (
        f"Can block {gap['block']} tell methods apart? Half the width changes {metric} by "
        f"{gap['gap']:+.4f}, {gap['ratio']:.1f} standard deviations of a paired difference (n = "
        f"{gap['n']} seeds); at least {scale.ENOUGH:g} are asked for: {'met' if met else 'missed'}."
    )
    if gap["other_arms"]:
        told += (
            f" By the deviations of the {gap['other_arms']} other variants' differences to "
            f"{gap['lower']} it is {gap['other_ratio']:.1f} in the median."
        )
    return told


# --- files ---------------------------------------------------------------------------------------


def table(found: Found) -> list[Found]:
    """The rows of claims.csv: one for each contrast, each measured row and each defect."""
    rows = []
    for claim in found["claims"]:
        of = {"claim": claim["id"], "paper": claim["paper"], "claim_verdict": claim["verdict"]}
        for c in claim["contrasts"]:
            row = {**of, "judged_by": f"block {c['block']}", "what": c["arm"]}
            row |= {key: c[key] for key in ("against", "metric", "expect", "n", "effect")}
            row |= {key: c[key] for key in ("low", "high", "margin", "p_expected", "p_contrary")}
            for arm, which in ((c["arm"], "g"), (c["against"], "g_against")):
                g = c["gap_closed"].get(arm)
                if g is not None:
                    row |= {which: g["value"], f"{which}_low": g["low"], f"{which}_high": g["high"]}
            rows.append({**row, "verdict": c["verdict"], "why": c["why"]})
        for m in claim["measured"]:
            of_table = {**of, "judged_by": m["table"], "metric": m["column"], "kind": m["kind"]}
            for line in m["lines"]:
                row = {**of_table, "what": line["label"], "against": m["than"].strip(" /")}
                row |= {"n": line["n"], "effect": line["ours"], "published": line["paper"]}
                row |= {"low": line["low"], "high": line["high"], "device": m["device"]}
                rows.append({**row, "verdict": line["verdict"], "why": m["why"]})
    for r in found["released"]:
        row = {"judged_by": f"block {r['block']}", "what": r["arm"], "verdict": "as released"}
        keys = ("against", "metric", "n", "effect", "low", "high", "why")
        rows.append(row | {key: r[key] for key in keys})
    return rows


def main(runs: Path, report: Callable[[str], None] = print) -> None:
    """Print and write the verdicts from the committed records and one's own."""
    claims = read_claims()
    evidence = read_evidence(EVIDENCE, runs / "evidence", only=claims.blocks)
    values, found = evidence.values, content(claims, evidence.values)
    for line in [*textwrap.wrap(LEGEND, 90), *lines(found), *evidence.warnings()]:
        report(line)
    folder = runs / "report"
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "claims.json", found)
    write_text(folder / "claims.csv", csv_text(table(found)))
    drawn = decay_curve.write(values, folder / "claim2_mu")
    told = ", claim2_mu.csv, claim2_mu.png" if drawn else ""
    report(f"written: {folder / 'claims.json'}, claims.csv{told}")
