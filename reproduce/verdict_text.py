"""Writes the verdicts on the papers' claims as lines of text."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from experiments.runs.stats import difference_form
from reproduce import scale
from reproduce.claims import CONFIRMED, INCONCLUSIVE, NOT_TESTED, REFUTED
from reproduce.speed_claims import SHOWN

PAPERS = {"fst": "FST", "sste": "S-STE", "ast": "AST", "slope": "SLoPe", "torchao": "torchao"}
Json = dict[str, Any]  # claims.json, as `verdicts.content` gives it, or a part of it
LEGEND = (
    "n is the number of seeds that both arms have, or of repeats of a measurement. Square brackets "
    "give the 95 % interval of the mean paired difference (Student's t). p is the p-value of the "
    "expected result or, where marked, of the contrary. It is adjusted for the number of contrasts "
    "in a claim (Holm's method), so a single interval can exclude 0 although the verdict is "
    "inconclusive. More seeds are needed where an interval is wider than half of the effect (or of "
    "the margin, if that is larger). Losses are in nats, flip rates are fractions of the mask per "
    "step, accuracies in percentage points."
)


def table_name(name: str) -> str:
    """The name of a table in words: `FST, Figure 7` for fst_figure7."""
    paper, _, kind = name.partition("_")
    number = kind.removeprefix("table").removeprefix("figure")
    kind = kind.removesuffix(number).capitalize()
    return f"{PAPERS[paper]}, {kind} {number}" if paper in PAPERS else name


def lines(judged: Json) -> list[str]:
    """The lines about all claims that are printed on a terminal."""
    text = []
    for claim in judged["claims"]:
        word = ": ".join(filter(None, (claim["verdict"], claim["parts"])))
        paper = PAPERS.get(claim["paper"], claim["paper"])
        text.append(f"{claim['id']}. [{word}] {paper}: {claim['says']}")
        text.append(f"   the paper: {claim['number']}")
        if claim["at"]:
            text.append(f"   {claim['at']}")
        for contrast in claim["contrasts"]:
            text += _contrast_lines(contrast)
        for measured in claim["measured"]:
            text += _measured_lines(measured)
        if claim["settles"]:
            text.append(f"   what would decide it: {claim['settles']}")
    if judged["released"]:
        text.append("Effects of defects in released code: with the defect minus without it.")
    for released in judged["released"]:
        text += _released_lines(released)
    for gap in judged["blocks"]:
        text.append(_gap_line(gap))
    return text


def _name(c: Json) -> str:
    return f"   {c['arm']} - {c['against']} ({c['metric'].rpartition('.')[2]}, block {c['block']})"


def _released_lines(r: Json) -> list[str]:
    return [f"{_name(r)}: {r['why'] or _effect(r)}", f"      {r['defect']}"]


def _effect(c: Json) -> str:
    form = difference_form(c["effect"], c["low"], c["high"])
    return f"{c['effect']:{form}} [{c['low']:{form}}, {c['high']:{form}}], n = {c['n']}"


def _contrast_lines(c: Json) -> list[str]:
    name = _name(c)
    if c["verdict"] == NOT_TESTED:
        so_far = f": so far {_effect(c)}" if math.isfinite(c["effect"]) else ""
        text = [f"{name}: not tested, {c['why']}{so_far}"]
    else:
        margin = "" if c["margin"] is None else f" within {c['margin']:.4f}"
        text = [
            f"{name}: {_effect(c)}, expected {c['expect']}{margin}, p = {p_value(c)}: "
            f"{c['verdict']}"
        ]
    if c["by_seed"]:
        form = difference_form(c["effect"], c["low"], c["high"])
        seeds = ", ".join(f"{seed}: {one:{form}}" for seed, one in c["by_seed"].items())
        more = "; more seeds are needed" if c["more_seeds"] else ""
        text.append(f"      by seed: {seeds}{more}")
    closed = [f"{arm} {_gap_closed(g, c['n'])}" for arm, g in c["gap_closed"].items()]
    if closed:
        text.append(
            f"      g (0: as good as dense, 1: as bad as half the width): {'; '.join(closed)}"
        )
    return text


def p_value(c: Json) -> str:
    """The p-value of a tested contrast: of the expected result or, if it is smaller, of the
    contrary, which is then marked."""
    expected, contrary = c["p_expected"], c["p_contrary"]
    return f"{contrary:.2g} (contrary)" if contrary < expected else f"{expected:.2g}"


def _gap_closed(g: Json, n: int) -> str:
    """g with its interval, and its number of seeds if it is not n."""
    seeds = f" (n = {g['n']})" if g["n"] != n else ""
    return f"{g['value']:.2f} [{g['low']:.2f}, {g['high']:.2f}]{seeds}"


def _measured_lines(m: Json) -> list[str]:
    """A line on a statement on speed, then the rows that do not confirm it."""
    name = f"   {statement(m)}"
    if not m["lines"]:
        return [f"{name}: not tested, {m['why']}"]
    ours, papers, repeats = (
        _range([line[key] for line in m["lines"] if line[key] is not None], form)
        for key, form in (("ours", ".3f"), ("paper", ".3f"), ("n", "d"))
    )
    start = f"{name}: {ours}; the paper {papers or 'gives none'}; n = {repeats}"
    if m["verdict"] == NOT_TESTED:
        return [f"{start}: not tested, {m['why']}"]
    if m["verdict"] == SHOWN:
        return [f"{start}: {SHOWN}"]
    device = m["device"].partition(",")[0]
    text = [f"{start}; {agreement(m)}: {m['verdict']} on {device}"]
    for verdict in (REFUTED, INCONCLUSIVE):
        rows = [line for line in m["lines"] if line["verdict"] == verdict]
        text += [f"      {verdict}: {_row(x)}" for x in sorted(rows, key=_share_of_paper)[:3]]
        if len(rows) > 3:
            text.append(f"      {verdict}: and {len(rows) - 3} more (claims.csv)")
    return text


def statement(m: Json) -> str:
    """A statement on speed or memory in words, with the table that it is judged by."""
    memory = "memory of " if m["less"] else ""
    than = f", times as fast as {m['than'].strip(' /')}" if m["than"] else ""
    return f"{memory}{m['column']}{than} ({table_name(m['table'])}, {m['kind']})"


def agreement(m: Json) -> str:
    """The number of rows that confirm a statement on speed or memory; "" if no row is judged."""
    judged = [x["verdict"] for x in m["lines"] if x["verdict"] not in (SHOWN, NOT_TESTED)]
    what = "faster" if m["than"] else "at least half of the paper's gain"
    return f"{what} in {judged.count(CONFIRMED)} of {len(judged)} rows" if judged else ""


def _row(line: Json) -> str:
    interval = "" if line["n"] < 2 else f" [{line['low']:.3f}, {line['high']:.3f}]"
    paper = "-" if line["paper"] is None else f"{line['paper']:.3f}"
    return f"{line['label']}: {line['ours']:.3f}{interval}, the paper {paper}"


def _share_of_paper(line: Json) -> float:
    """Our factor over the paper's, by which rows are sorted."""
    return line["ours"] / line["paper"] if line["paper"] else line["ours"]


def _range(values: Iterable[float], form: str) -> str:
    """The least and the greatest of the values in words; one number if they are equal."""
    ends = sorted(values)
    return " to ".join(dict.fromkeys(f"{end:{form}}" for end in ends[:1] + ends[-1:]))


def _gap_line(gap: Json) -> str:
    """A line on how well a block can tell methods apart."""
    metric, met = gap["metric"].rpartition(".")[2], gap["ratio"] >= scale.ENOUGH
    text = (
        f"Can block {gap['block']} tell methods apart? Half the width changes {metric} by "
        f"{gap['gap']:+.4f} [{gap['low']:+.4f}, {gap['high']:+.4f}], which is {gap['ratio']:.1f} "
        f"standard deviations of a paired difference (n = {gap['n']} seeds); at least "
        f"{scale.ENOUGH:g} are needed: {'met' if met else 'missed'}."
    )
    if gap["other_arms"]:
        text += (
            f" It is {gap['other_ratio']:.1f} times the median standard deviation of the "
            f"differences of the {gap['other_arms']} other arms to {gap['lower']}."
        )
    return text
