"""Judges all claims, and prints and writes the verdicts: `python -m reproduce claims`.

Writes to `runs/report`: `claims.json` with everything; `claims.csv` with a line for each contrast,
each measured row and each defect of released code; and the curve of loss against mu for claim 2
(decay_curve.py).
"""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.runs.stats import mean, paired_interval
from experiments.support.checkpoint import csv_text, write_json, write_text
from reproduce import decay_curve, scale
from reproduce.blocks import EVIDENCE
from reproduce.claims import (
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
from reproduce.verdict_text import LEGEND, Json, lines

PRELIMINARY = 2  # least number of seeds for which g is shown with an effect that is not tested


def content(claims: Claims, values: Values, measured: Path = MEASURED) -> Json:
    """All claims with their verdicts and evidence, and how well the blocks can tell methods apart,
    in the form of claims.json."""
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
    """The main metric of each block, a loss or an accuracy: that of its first contrast."""
    metrics: dict[str, str] = {}
    for contrast in (contrast for claim in claims.claims for contrast in claim.contrasts):
        metrics.setdefault(contrast.block, contrast.metric)
    return metrics


def _claim(claims: Claims, claim: Claim, values: Values, measured: Path) -> Json:
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
    """The verdicts on the tested parts of a claim of which other parts are not tested, in words; ""
    if all parts or none are tested."""
    if verdict(verdicts) != NOT_TESTED or set(verdicts) <= {NOT_TESTED}:
        return ""
    tested = Counter(one for one in verdicts if one != NOT_TESTED)
    counts = ", ".join(f"{count} {word}" for word, count in tested.items())
    return f"{counts} of {len(verdicts)} parts"


def _at(claim: Claim, values: Values, speeds: list[Json]) -> str:
    """The device, or the scale of the compared runs, for which the verdict on a claim holds."""
    if claim.measured:
        devices = dict.fromkeys(speed["device"] for speed in speeds if speed["device"])
        return f"measured on {'; '.join(devices)}" if devices else ""
    compared: dict[tuple[str, str], dict[int, Any]] = {}
    for c in claim.contrasts:
        pair = [values.get((c.block, arm), {}) for arm in (c.arm, c.against)]
        both = pair[0].keys() & pair[1].keys()
        for arm, records in zip((c.arm, c.against), pair, strict=True):
            compared.setdefault((c.block, arm), {}).update({s: records[s] for s in both})
    setting = scale.of_records(r for _, seeds in sorted(compared.items()) for r in seeds.values())
    return f"at this scale: {setting}" if setting else ""


def _contrast(claims: Claims, judged: Judged, values: Values) -> Json:
    content = {**dataclasses.asdict(judged.contrast), **dataclasses.asdict(judged)}
    del content["contrast"]
    content["more_seeds"] = judged.more_seeds
    content["low"], content["high"] = content.pop("interval")
    c, content["gap_closed"] = judged.contrast, {}
    if c.metric == _metrics(claims)[c.block] and math.isfinite(judged.effect):
        seeds = PRELIMINARY if judged.why else claims.seeds
        for arm in (c.arm, c.against):
            g = scale.gap_closed(values, c.block, arm, c.metric, claims.margin, seeds)
            if g is not None and arm != claims.margin.upper:  # whose g is 1 by definition
                content["gap_closed"][arm] = dataclasses.asdict(g)
    return content


def _released(released: Released, values: Values) -> Json:
    """The effect of a defect of released code, without a verdict; two seeds are enough. If a run
    diverged, this is said instead of the effect of the others."""
    r = released
    paired = differences(values, r.block, r.arm, r.against, r.metric)
    finite = all(map(math.isfinite, paired))
    known = len(paired) > 1 and finite
    low, high = paired_interval(paired)
    return {
        **dataclasses.asdict(r),
        "n": len(paired),
        "effect": mean(paired) if known else math.nan,
        "low": low,
        "high": high,
        "why": "" if known else f"n = {len(paired)}" if finite else "a run diverged",
    }


def _speed(measured: Measured) -> Json:
    content = {**dataclasses.asdict(measured.speed), **dataclasses.asdict(measured)}
    del content["speed"]
    for line in content["lines"]:
        line["low"], line["high"] = line.pop("interval")
    return content


# --- files ---------------------------------------------------------------------------------------


def table(judged: Json) -> list[Json]:
    """The rows of claims.csv: one for each contrast, each measured row and each defect."""
    rows = []
    for claim in judged["claims"]:
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
    for r in judged["released"]:
        row = {"judged_by": f"block {r['block']}", "what": r["arm"], "verdict": "as released"}
        keys = ("against", "metric", "n", "effect", "low", "high", "why")
        rows.append(row | {key: r[key] for key in keys})
    return rows


def main(runs: Path, report: Callable[[str], None] = print) -> None:
    """Print and write the verdicts by the committed records and those of one's own runs."""
    claims = read_claims()
    evidence = read_evidence(EVIDENCE, runs / "evidence", only=claims.blocks)
    values, judged = evidence.values, content(claims, evidence.values)
    for line in [*textwrap.wrap(LEGEND, 90), *lines(judged), *evidence.warnings()]:
        report(line)
    folder = runs / "report"
    write_json(folder / "claims.json", judged)
    write_text(folder / "claims.csv", csv_text(table(judged)))
    drawn = decay_curve.write(values, folder / "claim2_mu")
    curve = ", claim2_mu.csv, claim2_mu.png" if drawn else ""
    report(f"written: {folder / 'claims.json'}, claims.csv{curve}")
