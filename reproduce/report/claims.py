"""The page's first section: the claims with their verdicts."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from reproduce.claims import NOT_TESTED, verdict
from reproduce.report import html
from reproduce.report.figures import SHAPES, badge
from reproduce.report.html import MINUS, Markup, tag, text
from reproduce.report.links import Links
from reproduce.report.tables import MEASURED, Verdicts
from reproduce.speed_claims import SHOWN
from reproduce.verdicts import statement

PAPERS = {"fst": "FST", "sste": "S-STE", "ast": "AST", "slope": "SLoPe", "torchao": "torchao"}
Arms = set[tuple[str, str]]  # block and arm
Found = dict[str, Any]  # plain values made by reproduce/verdicts.py


def section(found: Found, arms: Arms, links: Links) -> Markup:
    """The section on the claims. arms: those that have a place on the page to link to."""
    counts = Counter(claim["verdict"] for claim in found["claims"])
    rules = found["rules"]
    share = rules["margin"]
    return text(
        tag(
            "p",
            [[badge(kind), f" {counts[kind]} "] for kind in SHAPES if counts[kind]],
            class_="counts",
        ),
        tag(
            "p",
            "A verdict holds at the scale or on the device that stands beside it. Runs of one seed "
            "share first weights and batches and are compared pair by pair; [ ] is the 95 % "
            "interval of the mean difference (Student's t), p is Holm's within a claim. Equality "
            f"is tested within {share['share']:g} of the gap between {share['lower']} and "
            f"{share['upper']}; at least {rules['seeds']} seeds are needed: an effect so far, of "
            "fewer, is preliminary. Contrasts and rules, and which of them are older than the "
            "runs, are in ",
            links.to(MEASURED.parent / "claims.yaml"),
            ".",
        ),
        tag("ol", [tag("li", _entry(claim)) for claim in found["claims"]], class_="index"),
        [_claim(claim, arms, links) for claim in found["claims"]],
    )


def _entry(claim: Found) -> Markup:
    words = f"{PAPERS.get(claim['paper'], claim['paper'])}: {claim['says']}"
    return text(badge(claim["verdict"]), " ", tag("a", words, href=f"#claim-{claim['id']}"))


def _claim(claim: Found, arms: Arms, links: Links) -> Markup:
    paper = PAPERS.get(claim["paper"], claim["paper"])
    heading = tag("h3", f"{claim['id']}. {paper}: {claim['says']}")
    parts = f": {claim['parts']}," if claim["parts"] else ""
    lines = [tag("p", badge(claim["verdict"]), f"{parts} {claim['at']}", class_="told")]
    lines.append(tag("p", tag("strong", "The paper: "), claim["number"]))
    if claim["contrasts"]:
        lines.append(_contrasts(claim, arms))
    for measured in claim["measured"]:
        lines.append(_measured(claim, measured, links))
    if claim["decides"]:
        lines.append(tag("p", claim["decides"]))
    if claim["settles"]:
        lines.append(tag("p", tag("strong", "What would decide it: "), claim["settles"]))
    return tag("article", heading, lines, id=f"claim-{claim['id']}", class_="claim")


def _contrasts(claim: Found, arms: Arms) -> Markup:
    rows = []
    for c in claim["contrasts"]:
        name = [
            *(_arm(arms, c["block"], c["arm"]), f" {MINUS} ", _arm(arms, c["block"], c["against"])),
            f", {c['metric'].rpartition('.')[2]}, block {c['block']}",
        ]
        within = "" if c["margin"] is None else f" within {c['margin']:.4f}"
        told = text(badge(c["verdict"]), f": {c['why']}" if c["why"] else "")
        p = min(c["p_expected"], c["p_contrary"]) if not c["why"] else math.nan
        so_far = "so far " if c["why"] and math.isfinite(c["effect"]) else ""
        effect = so_far + signed(c["effect"])
        numbers = [effect, interval(c["low"], c["high"]), c["n"], formatted(p, ".2g")]
        rows.append([name, told, f"{c['expect']}{within}", *numbers])
    heads = ["contrast", "verdict", "expected", "effect", "95 % interval", "n", "p"]
    return html.table(f"Contrasts of claim {claim['id']}", heads, rows, words=(0, 1, 2))


def _arm(arms: Arms, block: str, arm: str) -> Markup:
    if (block, arm) not in arms:
        return text(arm)
    return tag("a", arm, href=f"#{html.slug('arm', block, arm)}")


def _measured(claim: Found, measured: Found, links: Links) -> Markup:
    name = statement(measured)
    judged = [line for line in measured["lines"] if line["verdict"] not in (SHOWN, NOT_TESTED)]
    agree = sum(line["verdict"] == "confirmed" for line in judged)
    count = f": {agree} of {len(judged)} rows as stated" if judged else ""
    count += f", {measured['why']}" if measured["why"] else ""
    rows = [
        [
            line["label"],
            badge(line["verdict"]),
            formatted(line["paper"], ".3f"),
            formatted(line["ours"], ".3f"),
            interval(line["low"], line["high"], ".3f"),
            line["n"],
        ]
        for line in measured["lines"]
    ]
    heads = ["row", "verdict", "paper", "ours", "95 % interval", "n"]
    files = sorted(MEASURED.glob(f"*/{measured['table']}-full*.csv"))
    where = [f"{measured['device']}. {measured['code']}. ", html.listed(map(links.to, files))]
    return html.details(
        [badge(measured["verdict"]), f" {name}{count}"],
        html.table(f"Claim {claim['id']}: {name}", heads, rows, words=(0, 1)) if rows else None,
        tag("p", where),
    )


def verdicts(found: Found) -> Verdicts:
    """The verdicts on rows of measured tables, by (table, column, row)."""
    return {
        (measured["table"], measured["column"], line["label"]): line["verdict"]
        for claim in found["claims"]
        for measured in claim["measured"]
        for line in measured["lines"]
        if not measured["than"] and line["verdict"] in SHAPES
    }


def of_arm(found: Found, block: str, arm: str) -> Markup:
    """The verdicts on contrasts whose first arm is this one, grouped by claim."""
    told = []
    for claim in found["claims"]:
        own = [c for c in claim["contrasts"] if (c["block"], c["arm"]) == (block, arm)]
        if own:
            link = tag("a", f"claim {claim['id']}", href=f"#claim-{claim['id']}")
            told.append(text(badge(verdict([c["verdict"] for c in own])), " ", link))
    return html.listed(told) if told else text("-")


def formatted(value: float | None, form: str) -> str:
    """A number in this format; `-` if there is none or it is not finite."""
    return "-" if value is None or not math.isfinite(value) else f"{value:{form}}"


def signed(value: float) -> str:
    """A difference with its sign and four digits; `-` if it is not finite."""
    return formatted(value, "+.4f").replace("-", MINUS) if math.isfinite(value) else "-"


def interval(low: float, high: float, form: str = "+.4f") -> str:
    """An interval in brackets; `-` if it is not finite."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return "-"
    return f"[{low:{form}}, {high:{form}}]".replace("-", MINUS)
