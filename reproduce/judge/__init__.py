"""Judges the papers' claims by records of runs and by measured tables: `python -m reproduce claims
[N|all]` prints the verdicts and writes them to `runs/report`.

claims.py has the rules, verdicts.py judges one contrast, scale.py says what a difference means in
a block, and text.py puts it into words.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.support.checkpoint import csv_text, write_json, write_text
from experiments.support.errors import UserError, suggestion
from reproduce.execute.blocks import EVIDENCE, read_block
from reproduce.judge import scale, text
from reproduce.judge.claims import FILE, Claim, Claims, read_claims
from reproduce.judge.verdicts import (
    CONFIRMED,
    NOT_TESTED,
    SHOWN,
    Judged,
    Measured,
    judge,
    judge_speed,
    verdict,
    with_planned,
)
from reproduce.records import Values, read_evidence, setting
from reproduce.specs.reading import MEASURED

Json = dict[str, Any]
# What of a contrast, of a defect and of every effect is a column of claims.csv.
CONTRAST = ("against", "metric", "expect", "margin", "p_expected", "p_contrary")
DEFECT = ("against", "metric", "n", "effect", "low", "high", "verdict", "why")
COLUMNS = ("n", "effect", "low", "high", "published", "share", "verdict", "why")
PRELIMINARY = 2  # least number of seeds for which g is shown with an effect that is not tested


def content(claims: Claims, values: Values, measured: Path = MEASURED) -> Json:
    """All claims with their verdicts and evidence, and how well the blocks can tell methods apart,
    in the form of claims.json."""
    gaps = [
        scale.half_width_gap(values, block, metric, claims.margin)
        for block, metric in claims.metrics.items()
    ]
    # Defects have no verdict, so that two seeds are enough.
    released = dataclasses.replace(claims, seeds=2)
    defects = judge(released, Claim(0, "", "", "", claims.released), values)
    return {
        "rules": {
            key: plain(getattr(claims, key))
            for key in ("level", "seeds", "noise", "margin", "legend")
        },
        "blocks": [gap for gap in gaps if gap is not None],
        "claims": [_claim(claims, claim, values, measured) for claim in claims.claims],
        "released": [plain(dataclasses.replace(j, verdict="as released")) for j in defects],
    }


def plain(value: Any) -> Any:
    """A value as it is in claims.json: a dataclass as its fields and properties, those of the rule
    that it is judged by among them."""
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        names += [
            name for name in dir(type(value)) if isinstance(getattr(type(value), name), property)
        ]
        own = {name: plain(getattr(value, name)) for name in names}
        return own.pop("rule", {}) | own
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    return [plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def _claim(claims: Claims, claim: Claim, values: Values, folder: Path) -> Json:
    claim = with_planned(claims, claim, values)
    judged = judge(claims, claim, values)
    measured = [judge_speed(claims, speed, folder) for speed in claim.measured]
    parts: list[Judged | Measured] = [*judged, *measured]
    parts = [part for part in parts if part.verdict != SHOWN]
    counts = Counter(part.verdict for part in parts)
    found = verdict(counts)
    where = " and ".join(dict.fromkeys(part.where for part in parts if part.where))
    if found == NOT_TESTED:
        no_margin = any(part.why.startswith("no margin") for part in parts)
        where = "in the paper's regime" if claim.regime else "(no margin)" if no_margin else ""
    calm = verdict([(j.without or j).verdict for j in judged])
    diverged = any(j.without for j in judged)
    variants = {(c.block, v): None for c in claim.contrasts for v in (c.variant, c.against)}
    return {
        **{
            key: getattr(claim, key) for key in ("id", "paper", "short", "number", "regime", "note")
        },
        "says": claim.says.strip(),
        "name": claims.papers.get(claim.paper, claim.paper),
        "verdict": found,
        "where": where,
        "parts": ", ".join(f"{n} {word}" for word, n in counts.most_common() if len(counts) > 1),
        "without": f"without the run that diverged: {calm}" if diverged else "",
        "at": _at(claim, values, list(dict.fromkeys(m.device for m in measured if m.device))),
        "rates": {
            f"{variant} (block {block})": claims.rates[block][variant]
            for block, variant in variants
            if variant in claims.rates.get(block, {})
        },
        "settles": "" if found == CONFIRMED else claim.settles,
        "contrasts": [plain(j) | {"gap_closed": _gap_closed(claims, j, values)} for j in judged],
        "measured": [plain(m) for m in measured],
    }


def _at(claim: Claim, values: Values, devices: list[str]) -> str:
    """The device, or the scale of the compared runs, for which the verdict on a claim holds."""
    if claim.measured:
        return f"measured on {'; '.join(devices)}" if devices else ""
    compared = {
        (c.block, variant, seed): values[c.block, variant][seed]
        for c in claim.contrasts
        for seed in values.get((c.block, c.variant), {}).keys()
        & values.get((c.block, c.against), {})
        for variant in (c.variant, c.against)
    }
    words = setting(compared[run] for run in sorted(compared))
    return f"at this scale: {words}" if words else ""


def _gap_closed(claims: Claims, j: Judged, values: Values) -> Json:
    """g of the variants of a contrast, by variant; half the width is left out, whose g is 1."""
    c, found = j.rule, {}
    if c.metric == claims.metrics[c.block] and math.isfinite(j.effect):
        seeds = PRELIMINARY if j.why else claims.seeds
        for variant in {c.variant: None, c.against: None, claims.margin.upper: None}:
            g = scale.gap_closed(values, c.block, variant, c.metric, claims.margin, seeds)
            if g is not None and variant != claims.margin.upper:
                found[variant] = plain(g)
    return found


def table(judged: Json) -> list[Json]:
    """The rows of claims.csv: one for each contrast, each measured row and each defect."""
    rows = []
    for claim in judged["claims"]:
        of = {"claim": claim["id"], "paper": claim["paper"], "claim_verdict": claim["verdict"]}
        for c in claim["contrasts"]:
            row = {**of, "judged_by": f"block {c['block']}", "what": c["variant"]}
            row |= {key: c[key] for key in (*CONTRAST, *COLUMNS)}
            for variant, which in ((c["variant"], "g"), (c["against"], "g_against")):
                if g := c["gap_closed"].get(variant):
                    row |= {which: g["value"], f"{which}_low": g["low"], f"{which}_high": g["high"]}
            rows.append(row)
        for m in claim["measured"]:
            of |= {"judged_by": m["table"], "metric": m["column"], "kind": m["kind"]}
            of |= {"against": m["than"].strip(" /"), "device": m["device"]}
            for line in m["lines"]:
                row = {**of, "what": line["label"], **{key: line[key] for key in COLUMNS}}
                rows.append({**row, "why": line["why"] or m["why"]})
    for r in judged["released"]:
        row = {"judged_by": f"block {r['block']}", "what": r["variant"]}
        rows.append(row | {key: r[key] for key in DEFECT})
    return rows


def check_variants(claims: Claims) -> None:
    """Raise a `UserError` if a contrast names a block or variant that does not exist."""
    for contrast in claims.contrasts:
        known = read_block(contrast.block).variants
        for name in (contrast.variant, contrast.against):
            if name not in known:
                close = suggestion(name, known)
                raise UserError(f"{FILE}: block {contrast.block} has no variant {name!r}{close}")


def main(runs: Path, which: str = "", report: Callable[[str], None] = print) -> None:
    """Print and write the verdicts by the committed records and those of one's own runs.

    Args:
        which: the number of a claim, to print all about it, or `all`; "" = a line for each.
    Raises:
        UserError: there is no such claim, or one names a block or variant that does not exist.
    """
    claims = read_claims()
    check_variants(claims)
    ids = [str(claim.id) for claim in claims.claims]
    if which not in ("", "all", *ids):
        raise UserError(f"no claim {which!r}; there are {ids[0]} to {ids[-1]}, and all")
    evidence = read_evidence(EVIDENCE, runs / "evidence", only=claims.blocks)
    judged = content(claims, evidence.values)
    for line in text.wrapped([*text.lines(judged, which), *evidence.warnings()]):
        report(line)
    folder = runs / "report"
    write_json(folder / "claims.json", judged)
    write_text(folder / "claims.csv", csv_text(table(judged)))
    report(f"written: {folder / 'claims.json'}, claims.csv")
