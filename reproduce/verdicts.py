"""Judges all claims, and prints and writes the verdicts: `python -m reproduce claims [N|all]`.

Writes to `runs/report`: `claims.json` with everything; `claims.csv` with a line for each contrast,
each measured row and each defect of released code; and the curve of loss against mu for claim 2
(decay_curve.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from experiments.support.checkpoint import csv_text, write_json, write_text
from experiments.support.errors import UserError
from reproduce import decay_curve, scale
from reproduce.blocks import EVIDENCE
from reproduce.claims import (
    CONFIRMED,
    NOT_REPRODUCED,
    NOT_TESTED,
    Claim,
    Claims,
    Judged,
    judge,
    read_claims,
    verdict,
)
from reproduce.reading import MEASURED
from reproduce.records import Values, read_evidence
from reproduce.speed_claims import SHOWN, Measured, judge_speed
from reproduce.verdict_text import LEGEND, Json, details, overview, released_lines, wrapped

# What of a contrast is a column of claims.csv.
CONTRAST = (
    *("against", "metric", "expect", "n", "effect", "low", "high", "margin", "p_expected"),
    *("p_contrary", "published", "share", "verdict", "why"),
)
PRELIMINARY = 2  # least number of seeds for which g is shown with an effect that is not tested


def content(claims: Claims, values: Values, measured: Path = MEASURED) -> Json:
    """All claims with their verdicts and evidence, and how well the blocks can tell methods apart,
    in the form of claims.json."""
    metrics = _metrics(claims)
    released = Claim(0, "", "", "", claims.released)  # without a verdict: two seeds are enough
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
        "released": [
            _contrast(claims, j, values) | {"verdict": "as released"}
            for j in judge(dataclasses.replace(claims, seeds=2), released, values)
        ],
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
    parts = [part for part in [*contrasts, *speeds] if part["verdict"] != SHOWN]
    words = [part["verdict"] for part in parts]
    calm = verdict([(c["without"] or c)["verdict"] for c in contrasts])
    diverged = any(c["without"] for c in contrasts)
    variants = {
        (c.block, variant): None for c in claim.contrasts for variant in (c.variant, c.against)
    }
    return {
        "id": claim.id,
        "paper": claim.paper,
        "short": claim.short,
        "says": claim.says.strip(),
        "number": claim.number,
        "verdict": verdict(words),
        "where": _where(claim, parts, verdict(words)),
        "parts": _parts(words),
        "without": f"without the run that diverged: {calm}" if diverged else "",
        "at": _at(claim, values, speeds),
        "regime": claim.regime,
        "note": claim.note,
        "rates": {
            f"{variant} (block {block})": claims.rates[block][variant]
            for block, variant in variants
            if variant in claims.rates.get(block, {})
        },
        "settles": "" if verdict(words) == CONFIRMED else claim.settles,
        "contrasts": contrasts,
        "measured": speeds,
    }


def _where(claim: Claim, parts: list[Json], verdict: str) -> str:
    """The setting to which a verdict is restricted: where a claim is not reproduced, such as "on
    NVIDIA H200", or why it is not tested; else ""."""
    if verdict == NOT_TESTED:
        no_margin = any(part["why"].startswith("no margin") for part in parts)
        return "in the paper's regime" if claim.regime else "(no margin)" if no_margin else ""
    return " and ".join(dict.fromkeys(part["where"] for part in parts if part["where"]))


def _here(verdict: str, place: str) -> str:
    """The place, if a verdict is restricted to it; else ""."""
    return place if verdict == NOT_REPRODUCED else ""


def _parts(verdicts: list[str]) -> str:
    """How many parts of a claim have which verdict, in words; "" if all have the same."""
    counts = Counter(verdicts)
    if len(counts) < 2:
        return ""
    return ", ".join(f"{count} {word}" for word, count in counts.most_common())


def _at(claim: Claim, values: Values, speeds: list[Json]) -> str:
    """The device, or the scale of the compared runs, for which the verdict on a claim holds."""
    if claim.measured:
        devices = dict.fromkeys(speed["device"] for speed in speeds if speed["device"])
        return f"measured on {'; '.join(devices)}" if devices else ""
    compared = {
        (c.block, variant, seed): values[c.block, variant][seed]
        for c in claim.contrasts
        for seed in values.get((c.block, c.variant), {}).keys()
        & values.get((c.block, c.against), {})
        for variant in (c.variant, c.against)
    }
    setting = scale.of_records(compared[run] for run in sorted(compared))
    return f"at this scale: {setting}" if setting else ""


def _contrast(claims: Claims, judged: Judged, values: Values) -> Json:
    content = _interval({**dataclasses.asdict(judged.contrast), **dataclasses.asdict(judged)})
    del content["contrast"], content["paper"]
    c, other, content["gap_closed"] = judged.contrast, judged.without, {}
    content["more_seeds"], content["published"] = judged.more_seeds, c.published
    content["share"] = judged.effect / c.published if c.published else None
    place = f"at {scale.model(values.get((c.block, c.variant), {}))}"
    content["where"] = _here(judged.verdict, place)
    if other is not None:
        where = _here(other.verdict, place)
        content["without"] = _interval({**dataclasses.asdict(other), "where": where})
    if c.metric == _metrics(claims).get(c.block) and not c.defect and math.isfinite(judged.effect):
        seeds = PRELIMINARY if judged.why else claims.seeds
        for variant in (c.variant, c.against):
            g = scale.gap_closed(values, c.block, variant, c.metric, claims.margin, seeds)
            if g is not None and variant != claims.margin.upper:  # whose g is 1 by definition
                content["gap_closed"][variant] = dataclasses.asdict(g)
    return content


def _interval(content: Json) -> Json:
    low, high = content.pop("interval")
    return content | {"low": low, "high": high}


def _speed(measured: Measured) -> Json:
    content = {**dataclasses.asdict(measured.speed), **dataclasses.asdict(measured)}
    del content["speed"]
    content["where"] = _here(measured.verdict, f"on {measured.device.partition(',')[0]}")
    content["lines"] = [
        _interval({**dataclasses.asdict(line), "share": line.share}) for line in measured.lines
    ]
    return content


# --- files ---------------------------------------------------------------------------------------


def table(judged: Json) -> list[Json]:
    """The rows of claims.csv: one for each contrast, each measured row and each defect."""
    rows = []
    for claim in judged["claims"]:
        of = {"claim": claim["id"], "paper": claim["paper"], "claim_verdict": claim["verdict"]}
        for c in claim["contrasts"]:
            row = {**of, "judged_by": f"block {c['block']}", "what": c["variant"]}
            row |= {key: c[key] for key in CONTRAST}
            for variant, which in ((c["variant"], "g"), (c["against"], "g_against")):
                if g := c["gap_closed"].get(variant):
                    row |= {which: g["value"], f"{which}_low": g["low"], f"{which}_high": g["high"]}
            rows.append(row)
        for m in claim["measured"]:
            of_table = {**of, "judged_by": m["table"], "metric": m["column"], "kind": m["kind"]}
            for line in m["lines"]:
                row = {**of_table, "what": line["label"], "against": m["than"].strip(" /")}
                row |= {"n": line["n"], "effect": line["ours"], "published": line["paper"]}
                row |= {key: line[key] for key in ("low", "high", "share")}
                why = line["why"] or m["why"]
                rows.append({**row, "device": m["device"], "verdict": line["verdict"], "why": why})
    for r in judged["released"]:
        keys = ("against", "metric", "n", "effect", "low", "high", "verdict", "why")
        row = {"judged_by": f"block {r['block']}", "what": r["variant"]}
        rows.append(row | {key: r[key] for key in keys})
    return rows


def main(runs: Path, which: str = "", report: Callable[[str], None] = print) -> None:
    """Print and write the verdicts by the committed records and those of one's own runs.

    Args:
        which: the number of a claim, to print all about it, or `all`; "" = a line for each.
    Raises:
        UserError: there is no such claim.
    """
    claims = read_claims()
    ids = [str(claim.id) for claim in claims.claims]
    if which not in ("", "all", *ids):
        raise UserError(f"no claim {which!r}; there are {ids[0]} to {ids[-1]}, and all")
    evidence = read_evidence(EVIDENCE, runs / "evidence", only=claims.blocks)
    values, judged = evidence.values, content(claims, evidence.values)
    text = overview(judged) if not which else []
    for claim in judged["claims"]:
        text += details(claim) if which in ("all", str(claim["id"])) else []
    text += released_lines(judged) if which == "all" else []
    for line in wrapped([*text, *[LEGEND] * bool(which), *evidence.warnings()]):
        report(line)
    folder = runs / "report"
    write_json(folder / "claims.json", judged)
    write_text(folder / "claims.csv", csv_text(table(judged)))
    drawn = decay_curve.write(values, folder / "claim2_mu")
    curve = ", claim2_mu.csv, claim2_mu.png" if drawn else ""
    report(f"written: {folder / 'claims.json'}, claims.csv{curve}")
