"""Writes the verdicts on the papers' claims as lines of text."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable
from typing import Any

from experiments.runs.stats import difference_form
from reproduce.judge.scale import ENOUGH
from reproduce.judge.verdicts import CONFIRMED, NOT_TESTED, SHOWN, VERDICTS

WIDTH = 80
Json = dict[str, Any]  # claims.json or a part of it


def wrapped(lines: Iterable[str]) -> list[str]:
    """The lines, broken where they are too long for a terminal; what follows is indented."""
    text = []
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        text += textwrap.wrap(
            line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        ) or [""]
    return text


def worded(part: Json) -> str:
    """The verdict on a claim or a part of it, with what it is restricted to."""
    return f"{part['verdict']} {part['where']}".rstrip()


def lines(judged: Json, which: str = "all") -> list[str]:
    """All about one claim, asked for by its number, or about all; or, without any, a line each."""
    claims = judged["claims"]
    if not which:
        return [
            *(f"{c['id']:>2} {c['name']}, {c['short']}: {worded(c)}" for c in claims),
            "Verdicts hold for the models, texts and cards that were used.",
            "All about one: python -m reproduce claims N; about every one: claims all",
        ]
    text = [line for c in claims if which in ("all", str(c["id"])) for line in _details(c)]
    if which == "all":
        text.append("Effects of defects in released code: with the defect minus without it.")
        for r in judged["released"]:
            text += [f"  {_name(r)}: {r['why'] or _effect(r)}", f"    {r['defect']}"]
        text += map(_gap_line, judged["blocks"])
    return [*text, judged["rules"]["legend"]]


def _details(claim: Json) -> list[str]:
    parts = f" ({claim['parts']})" if claim["parts"] else ""
    told = {
        "verdict: ": "; ".join(filter(None, [worded(claim) + parts, claim["without"]])),
        "the paper: ": claim["number"],
        "": claim["at"],
        "not in the paper's regime: ": claim["regime"],
        "note: ": claim["note"],
        "learning rates: ": "; ".join(f"{name}: {what}" for name, what in claim["rates"].items()),
        "what would decide it: ": claim["settles"],
    }
    return [
        f"{claim['id']}. {claim['name']}: {claim['says']}",
        *(f"  {name}{what}" for name, what in told.items() if what),
        *(line for c in claim["contrasts"] for line in _contrast(c)),
        *(line for m in claim["measured"] for line in _measured(m)),
    ]


def _name(c: Json) -> str:
    metric = c["metric"].rpartition(".")[2]
    return f"{c['variant']} - {c['against']} ({metric}, block {c['block']})"


def _effect(c: Json) -> str:
    form = difference_form(c["effect"], c["low"], c["high"])
    return f"{c['effect']:{form}} [{c['low']:{form}}, {c['high']:{form}}], n = {c['n']}"


def _contrast(c: Json) -> list[str]:
    margin = "" if c["margin"] is None else f" within {c['margin']:.4f}"
    equality = c["expect"] == "equal"
    told = [worded(c), c["why"], f"equal{margin}" if c["equal"] and not equality else ""]
    text = [f"  {_name(c)}: {'; '.join(filter(None, told))}"]
    if math.isfinite(c["effect"]):
        expected = f", expected {c['expect']}{margin if equality else ''}"
        p, paper = "" if c["why"] else f", p = {p_value(c)}", ""
        if c["published"] is not None:
            paper = f"; the paper {c['published']:+.4f}, ours is {c['share']:.2f} times that"
        text.append(f"    {_effect(c)}{expected}{p}{paper}")
    if other := c["without"]:
        text.append(f"    {without(c)}, {_effect(other)}")
    if c["by_seed"]:
        form = difference_form(c["effect"], c["low"], c["high"])
        seeds = ", ".join(f"{seed}: {one:{form}}" for seed, one in c["by_seed"].items())
        text.append(f"    by seed: {seeds}{'; more seeds are needed' * c['more_seeds']}")
    if c["gap_closed"]:
        closed = [
            f"{variant} {g['value']:.2f} [{g['low']:.2f}, {g['high']:.2f}]"
            + f" (n = {g['n']})" * (g["n"] != c["n"])
            for variant, g in c["gap_closed"].items()
        ]
        text.append(f"    g: {'; '.join(closed)}")
    return text


def without(c: Json) -> str:
    """The verdict on a contrast without a run that diverged, in words; "" if none did."""
    seeds = ", ".join(map(str, c["lost"]))
    return f"without seed {seeds}, which diverged: {worded(c['without'])}" if c["without"] else ""


def p_value(c: Json) -> str:
    """The p-value of a tested contrast: of the expected result or, if it is smaller, of the
    contrary, which is then marked."""
    expected, contrary = c["p_expected"], c["p_contrary"]
    return f"{contrary:.2g} (contrary)" if contrary < expected else f"{expected:.2g}"


def _measured(m: Json) -> list[str]:
    """Lines on a contrast of measurements, then its rows that do not confirm it."""
    rows = m["lines"]
    text = [f"  {statement(m)}: {'; '.join(filter(None, [worded(m), m['why']]))}"]
    if not rows:
        return text
    n, ours, papers = (
        _range((row[key] for row in rows if row[key] is not None), form)
        for key, form in (("n", "d"), ("effect", ".3f"), ("published", ".3f"))
    )
    shares = _range((x["share"] for x in rows if x["share"] is not None and not x["why"]), ".2f")
    counted = "counted" if m["kind"] == "counted" else f"n = {n}"
    told = [agreement(m), f"{ours}, {counted}", f"the paper {papers or 'gives none'}"]
    told += [f"ours is {shares} times its gain"] if shares else []
    text.append(f"    {'; '.join(filter(None, told))}")
    for verdict in VERDICTS:
        found = [x for x in rows if x["verdict"] == verdict != CONFIRMED and not m["why"]]
        found.sort(key=lambda x: x["effect"] / x["published"])
        text += [f"    {verdict}: {_row(x)}" for x in found[:3]]
        if len(found) > 3:
            text.append(f"    {verdict}: and {len(found) - 3} more (claims.csv)")
    return [*text, *(f"    not judged: {_row(x)}: {x['why']}" for x in rows if x["why"])]


def statement(m: Json) -> str:
    """A contrast of measurements in words, with the table that it is judged by."""
    memory = "memory of " if m["less"] else ""
    than = f", times as fast as {m['than'].strip(' /')}" if m["than"] else ""
    return f"{memory}{m['column']}{than} ({m['name']}, {m['kind']})"


def agreement(m: Json) -> str:
    """The number of rows that confirm a contrast of measurements; "" if no row is judged."""
    judged = [x["verdict"] for x in m["lines"] if x["verdict"] not in (SHOWN, NOT_TESTED)]
    what = "at least half of the paper's gain"
    return f"{what} in {judged.count(CONFIRMED)} of {len(judged)} rows" if judged else ""


def _row(row: Json) -> str:
    interval = "" if row["n"] < 2 else f" [{row['low']:.3f}, {row['high']:.3f}]"
    paper = "-" if row["published"] is None else f"{row['published']:.3f}"
    return f"{row['label']}: {row['effect']:.3f}{interval}, the paper {paper}"


def _range(values: Iterable[float], form: str) -> str:
    """The least and the greatest of the values in words; one number if they are equal."""
    ends = sorted(values)
    return " to ".join(dict.fromkeys(f"{end:{form}}" for end in ends[:1] + ends[-1:]))


def _gap_line(gap: Json) -> str:
    """A line on how well a block can tell methods apart."""
    metric, met = gap["metric"].rpartition(".")[2], gap["ratio"] >= ENOUGH
    text = (
        f"Can block {gap['block']} tell methods apart? Half the width changes {metric} by "
        f"{gap['gap']:+.4f} [{gap['low']:+.4f}, {gap['high']:+.4f}], which is {gap['ratio']:.1f} "
        f"standard deviations of a paired difference (n = {gap['n']} seeds); at least "
        f"{ENOUGH:g} are needed: {'met' if met else 'missed'}."
    )
    if gap["other_variants"]:
        text += (
            f" It is {gap['other_ratio']:.1f} times the median standard deviation of the "
            f"differences of the {gap['other_variants']} other variants to {gap['lower']}."
        )
    return text
