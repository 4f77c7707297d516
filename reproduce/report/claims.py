"""Makes the page's first section: the claims with their verdicts."""

from __future__ import annotations

import math
from collections import Counter

from experiments.runs.stats import difference_form
from reproduce.claims import verdict
from reproduce.report import html
from reproduce.report.figures import SHAPES, badge
from reproduce.report.html import MINUS, Markup, tag, text
from reproduce.report.links import Links
from reproduce.report.tables import MEASURED, Verdicts
from reproduce.verdict_text import LEGEND, PAPERS, Json, agreement, p_value, statement, without

Arms = set[tuple[str, str]]  # block and arm


def section(judged: Json, arms: Arms, links: Links) -> Markup:
    """The section on the claims. arms: those that the page describes, to which it links."""
    counts = Counter(claim["verdict"] for claim in judged["claims"])
    rules = judged["rules"]
    share = rules["margin"]
    return text(
        tag(
            "p",
            [[badge(kind), f" {counts[kind]} "] for kind in SHAPES if counts[kind]],
            class_="counts",
        ),
        tag(
            "p",
            "A verdict holds only at the scale or on the device given with it. Claims on losses "
            "and accuracies are judged by blocks of runs: one small model, trained in many "
            "variants, called arms, with the same seeds. A contrast compares two arms. Runs "
            "with the same seed have the same initial weights and batches and are compared in "
            f"pairs. {LEGEND} "
            f"Two arms are equal if they differ by less than {share['share']:g} of the gap between "
            f"{share['lower']} and {share['upper']}.",
        ),
        tag(
            "p",
            f"A verdict needs at least {rules['seeds']} seeds; an effect from fewer is marked "
            "'so far' and is preliminary. A + after the number of seeds means that more are "
            "needed. The contrasts and rules, and which were fixed before the runs, are in ",
            links.to(MEASURED.parent / "claims.yaml"),
            ".",
        ),
        tag("ol", [tag("li", _entry(claim)) for claim in judged["claims"]], class_="index"),
        [_claim(claim, arms, links) for claim in judged["claims"]],
        _released(judged["released"], arms) if judged["released"] else None,
    )


def _entry(claim: Json) -> Markup:
    words = f"{PAPERS.get(claim['paper'], claim['paper'])}: {claim['says']}"
    link = tag("a", words, href=f"#claim-{claim['id']}")
    return text(badge(claim["verdict"]), f" {claim['where']} ", link)


def _claim(claim: Json, arms: Arms, links: Links) -> Markup:
    paper = PAPERS.get(claim["paper"], claim["paper"])
    heading = tag("h3", f"{claim['id']}. {paper}: {claim['says']}")
    told = filter(None, (claim["where"], claim["parts"], claim["without"], claim["at"]))
    lines = [tag("p", badge(claim["verdict"]), f" {'; '.join(told)}", class_="told")]
    lines.append(tag("p", tag("strong", "The paper: "), claim["number"]))
    rates = "; ".join(f"{arm}: {what}" for arm, what in claim["rates"].items())
    notes = {"Not in its regime": claim["regime"], "Note": claim["note"], "Learning rates": rates}
    for name, what in notes.items():
        if what:
            lines.append(tag("p", tag("strong", f"{name}: "), what))
    if claim["contrasts"]:
        lines.append(_contrasts(claim, arms))
    for measured in claim["measured"]:
        lines.append(_measured(claim, measured, links))
    if claim["settles"]:
        lines.append(tag("p", tag("strong", "What would decide it: "), claim["settles"]))
    return tag("article", heading, lines, id=f"claim-{claim['id']}", class_="claim")


def _contrasts(claim: Json, arms: Arms) -> Markup:
    rows = []
    for c in claim["contrasts"]:
        name = [
            *(_arm(arms, c["block"], c["arm"]), f" {MINUS} ", _arm(arms, c["block"], c["against"])),
            f", {c['metric'].rpartition('.')[2]}, {html.unbroken('block ' + c['block'])}",
        ]
        within = "" if c["margin"] is None else f" within {c['margin']:.4f}"
        equal = c["equal"] and c["expect"] != "equal"
        told = [c["where"], c["why"], f"equal{within}" if equal else "", without(c)]
        judgement = text(badge(c["verdict"]), f" {'; '.join(filter(None, told))}")
        within = within if c["expect"] == "equal" else ""
        preliminary = c["why"] and not claim["regime"] and math.isfinite(c["effect"])
        so_far = "so far " if preliminary else ""
        effect = so_far + signed(c["effect"], c["low"], c["high"])
        n = f"{c['n']}{' +' * c['more_seeds']}"
        p = "-" if c["why"] else p_value(c)
        expected = f"{c['expect']}{within}"
        ends, share = interval(c["low"], c["high"]), formatted(c["share"], ".2f")
        published = "-" if c["published"] is None else signed(c["published"])
        rows.append([name, judgement, effect, ends, published, share, expected, n, p])
    heads = ["contrast", "verdict", "effect", "95 % interval", "the paper's", "ours / the paper's"]
    heads += ["expected", "seeds", "p"]
    drawn = html.table(f"Contrasts of claim {claim['id']}", heads, rows, words=(0, 1, 6))
    return text(drawn, _by_seed(claim))


def _by_seed(claim: Json) -> Markup | None:
    """The paired difference at every seed, which shows outliers; None without any."""
    seeds = sorted({seed for c in claim["contrasts"] for seed in c["by_seed"]})
    rows = []
    for c in claim["contrasts"]:
        known = {s: signed(one, c["low"], c["high"]) for s, one in c["by_seed"].items()}
        rows.append([f"{c['arm']} {MINUS} {c['against']}", *(known.get(s, "-") for s in seeds)])
    if not seeds:
        return None
    heads = ["contrast", *(f"seed {seed}" for seed in seeds)]
    caption = f"Differences of claim {claim['id']} by seed"
    return html.details("Differences by seed", html.table(caption, heads, rows))


def _released(released: list[Json], arms: Arms) -> Markup:
    rows = [
        [
            [_arm(arms, r["block"], r["arm"]), f" {MINUS} ", _arm(arms, r["block"], r["against"])],
            r["defect"],
            r["why"] or signed(r["effect"], r["low"], r["high"]),
            interval(r["low"], r["high"]),
            r["n"],
        ]
        for r in released
    ]
    explanation = (
        "Each arm is trained with one defect of released code and compared with the same arm "
        "without it. Effects are differences of validation loss in nats. There is no verdict, "
        "because no paper makes a claim about these defects."
    )
    heads = ["contrast", "defect", "effect", "95 % interval", "seeds"]
    return text(
        tag("h3", "Defects of released code"),
        tag("p", explanation),
        html.table("What a defect changes", heads, rows, words=(0, 1)),
    )


def _arm(arms: Arms, block: str, arm: str) -> Markup:
    if (block, arm) not in arms:
        return html.name(arm)
    return tag("a", html.name(arm), href=f"#{html.slug('arm', block, arm)}")


def _measured(claim: Json, measured: Json, links: Links) -> Markup:
    name = statement(measured)
    count = "".join(f": {part}" for part in (agreement(measured), measured["why"]) if part)
    rows = [
        [
            line["label"],
            text(badge(line["verdict"]), f": {line['why']}" if line["why"] else ""),
            formatted(line["paper"], ".3f"),
            formatted(line["ours"], ".3f"),
            interval(line["low"], line["high"], ".3f"),
            formatted(line["share"], ".2f"),
            "counted" if measured["kind"] == "counted" else line["n"],
        ]
        for line in measured["lines"]
    ]
    heads = ["row", "verdict", "paper", "ours", "95 % interval", "gain / the paper's", "n"]
    files = sorted(MEASURED.glob(f"*/{measured['table']}-full*.csv"))
    where = [f"{measured['device']}; {measured['code']}: ", html.listed(map(links.to, files))]
    return html.details(
        [badge(measured["verdict"]), f" {measured['where']} {name}{count}"],
        html.table(f"Claim {claim['id']}: {name}", heads, rows, words=(0, 1)) if rows else None,
        tag("p", where),
    )


def verdicts(judged: Json) -> Verdicts:
    """The verdicts on rows of measured tables, by (table, column, row)."""
    return {
        (measured["table"], measured["column"], line["label"]): line["verdict"]
        for claim in judged["claims"]
        for measured in claim["measured"]
        for line in measured["lines"]
        if not measured["than"] and line["verdict"] in SHAPES
    }


def of_arm(judged: Json, block: str, arm: str) -> Markup:
    """For each claim with contrasts of this arm against others, the verdict on them."""
    badges = []
    for claim in judged["claims"]:
        own = [c for c in claim["contrasts"] if (c["block"], c["arm"]) == (block, arm)]
        if own:
            link = tag("a", f"claim {claim['id']}", href=f"#claim-{claim['id']}")
            badges.append(text(badge(verdict([c["verdict"] for c in own])), " ", link))
    return html.listed(badges) if badges else text("-")


def formatted(value: float | None, form: str) -> str:
    """A number in this format; `-` if it is None or not finite."""
    return "-" if value is None or not math.isfinite(value) else f"{value:{form}}"


def signed(value: float, low: float = math.nan, high: float = math.nan) -> str:
    """A difference with its sign and as many decimals as suit its interval; `-` if it is not
    finite."""
    form = difference_form(value, low, high)
    return f"{value:{form}}".replace("-", MINUS) if math.isfinite(value) else "-"


def interval(low: float, high: float, form: str = "") -> str:
    """An interval in square brackets, in this format or with as many decimals as suit it; `-` if it
    is not finite."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return "-"
    form = form or difference_form(low, low, high)
    return f"[{low:{form}}, {high:{form}}]".replace("-", MINUS)
