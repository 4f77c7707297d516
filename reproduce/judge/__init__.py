"""Judges the papers' claims by records of runs and by measured tables: `python -m reproduce claims
[N|all]` prints the verdicts and writes them to `runs/report`.

claims.py reads the rules, verdicts.py applies them, scale.py relates a difference to a block's gap,
and text.py writes the sentences.
"""

import dataclasses
import math
from collections import Counter
from pathlib import Path
from typing import Any

from experiments.support.checkpoint import write_json
from experiments.support.errors import UserError
from reproduce.execute.blocks import EVIDENCE, read_block
from reproduce.judge import scale, text, verdicts
from reproduce.judge.claims import Claim, Claims, read_claims
from reproduce.judge.verdicts import Judged, Measured
from reproduce.records import Values, read_evidence, setting
from reproduce.specs.reading import MEASURED

Json = dict[str, Any]
RULES = ("level", "seeds", "noise", "margin", "legend")
SAID = ("id", "paper", "short", "number", "note")  # of a claim, as in claims.yaml
PRELIMINARY = 2  # least number of seeds for which g is shown with an effect that is not tested


def check_names(claims: Claims) -> None:
    """Raise a `UserError` if a contrast names a block or a variant that there is not."""
    variants = {name: read_block(name).variants for name in sorted(claims.blocks)}
    for c in (*claims.contrasts, *claims.released):
        named = [(c.block, c.variant), (c.block, c.against)]
        if c.expect == "equal":  # the margin is a share of this gap
            ends = claims.margin.lower, claims.margin.upper
            named += [(c.margin_of or c.block, name) for name in ends]
        for block, name in named:
            if name not in (own := variants[block]):
                raise UserError(f"claims: block {block} has no {name!r}; it has {', '.join(own)}")


def content(claims: Claims, values: Values, measured: Path = MEASURED) -> Json:
    """All claims with verdicts and evidence, and the scale of blocks, as in claims.json."""
    gaps = [scale.half_width_gap(values, *of, claims.margin) for of in claims.metrics.items()]
    # Defects have no verdict, so that two seeds are enough.
    released = dataclasses.replace(claims, seeds=2)
    defects = verdicts.judge(released, Claim(0, "", "", "", claims.released), values)
    return {
        "rules": {key: plain(getattr(claims, key)) for key in RULES},
        "blocks": [gap for gap in gaps if gap is not None],
        "claims": [_claim(claims, claim, values, measured) for claim in claims.claims],
        "released": [plain(dataclasses.replace(j, verdict="as released")) for j in defects],
    }


def plain(value: Any) -> Any:
    """A value as it is in claims.json: a dataclass as its fields and properties, those of the rule
    that it is judged by among them."""
    if dataclasses.is_dataclass(value):
        of = type(value)
        names = [name for name in dir(of) if isinstance(getattr(of, name), property)]
        names += [field.name for field in dataclasses.fields(value)]
        own = {name: plain(getattr(value, name)) for name in names}
        return own.pop("rule", {}) | own
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    return [plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def _claim(claims: Claims, claim: Claim, values: Values, folder: Path) -> Json:
    ready = [c for c in claim.planned if len(verdicts.by_seed(values, c)) >= claims.seeds]
    claim = dataclasses.replace(claim, contrasts=[*claim.contrasts, *ready])
    judged = verdicts.judge(claims, claim, values)
    measured = [verdicts.judge_speed(claims, speed, folder) for speed in claim.measured]
    parts: list[Judged | Measured] = [*judged, *measured]
    parts = [part for part in parts if part.verdict != verdicts.SHOWN]
    counts = Counter(part.verdict for part in parts)
    found = verdicts.verdict(counts)
    calm = verdicts.verdict([(j.without or j).verdict for j in judged])
    where = " and ".join(dict.fromkeys(part.where for part in parts if part.where))
    if found == verdicts.NOT_TESTED:
        no_margin = any(part.why.startswith("no margin") for part in parts)
        where = "(no margin)" if no_margin else ""
    diverged = any(j.without for j in judged)
    variants = dict.fromkeys((c.block, v) for c in claim.contrasts for v in (c.variant, c.against))
    return {
        **{key: getattr(claim, key) for key in SAID},
        "says": claim.says.strip(),
        "name": claims.papers.get(claim.paper, claim.paper),
        "verdict": found,
        "where": where,
        "parts": ", ".join(f"{n} {word}" for word, n in counts.most_common() if len(counts) > 1),
        "without": f"without the run that diverged: {calm}" if diverged else "",
        "at": _at(claim, values, list(dict.fromkeys(m.device for m in measured if m.device))),
        "rates": {
            f"{variant} (block {block})": rate
            for block, variant in variants
            if (rate := claims.rates.get(block, {}).get(variant))
        },
        "settles": "" if found == verdicts.CONFIRMED else claim.settles,
        "contrasts": [plain(j) | {"gap_closed": _gap_closed(claims, j, values)} for j in judged],
        "measured": [plain(m) for m in measured],
    }


def _at(claim: Claim, values: Values, devices: list[str]) -> str:
    """The device, or the scale of the compared runs, for which the verdict on a claim holds."""
    if claim.measured:
        return f"measured on {'; '.join(devices)}" if devices else ""
    compared = {
        (c.block, variant, seed): record
        for c in claim.contrasts
        for seed, two in verdicts.pairs(values, c).items()
        for variant, record in zip((c.variant, c.against), two, strict=True)
    }
    words = setting(compared[run] for run in sorted(compared))
    return f"at this scale: {words}" if words else ""


def _gap_closed(claims: Claims, j: Judged, values: Values) -> Json:
    """g of the variants of a contrast, by variant; half the width is left out, whose g is 1."""
    c, margin, seeds = j.rule, claims.margin, PRELIMINARY if j.why else claims.seeds
    if c.metric != claims.metrics[c.block] or not math.isfinite(j.effect):
        return {}
    return {
        variant: g
        for variant in (c.variant, c.against)
        if variant != margin.upper
        and (g := scale.gap_closed(values, c.block, variant, c.metric, margin, seeds))
    }


def main(runs: Path, which: str = "") -> None:
    """Print and write the verdicts by the committed records and those of one's own runs. which: the
    number of a claim, to print all about it, or `all`; "" = a line for each."""
    claims = read_claims()
    check_names(claims)
    ids = [str(claim.id) for claim in claims.claims]
    if which not in ("", "all", *ids):
        raise UserError(f"no claim {which!r}; there are {ids[0]} to {ids[-1]}, and all")
    evidence = read_evidence(EVIDENCE, runs / "evidence", only=claims.blocks)
    judged = content(claims, evidence.values)
    path = runs / "report" / "claims.json"
    write_json(path, judged)
    said = text.wrapped([*text.lines(judged, which), *evidence.warnings()])
    print(*said, f"written: {path}", sep="\n")
