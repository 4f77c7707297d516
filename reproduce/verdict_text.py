"""Writes the verdicts on the papers' claims as lines of text."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable
from typing import Any

from experiments.runs.stats import difference_form
from reproduce import scale
from reproduce.claims import CONFIRMED, NOT_TESTED, VERDICTS
from reproduce.speed_claims import SHOWN

PAPERS = {"fst": "FST", "sste": "S-STE", "ast": "AST", "slope": "SLoPe", "torchao": "torchao"}
WIDTH = 80
Json = dict[str, Any]  # claims.json, as `verdicts.content` gives it, or a part of it
LEGEND = (
    "n is the number of seeds of both variants, or of repeats of a measurement. Square brackets "
    "give the 95 % interval of the mean paired difference (Student's t). p is the p-value of the "
    "expected result or, where marked, of the contrary. It is adjusted for the number of contrasts "
    "in a claim (Holm's method), so a single interval can exclude 0 although the verdict is "
    "inconclusive. g is the share of the cost of half the width: 0 is as good as dense, 1 as bad "
    "as half the width. More seeds are needed where an interval is wider than half of the effect "
    "(or of the margin of an expected equality, if that is larger). Losses are in nats, flip rates "
    "are fractions of the mask per step, accuracies in percentage points."
)


def table_name(name: str) -> str:
    """The name of a table in words: `FST, Figure 7` for fst_figure7."""
    paper, _, kind = name.partition("_")
    number = kind.removeprefix("table").removeprefix("figure")
    kind = kind.removesuffix(number).capitalize()
    return f"{PAPERS[paper]}, {kind} {number}" if paper in PAPERS else name


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


def overview(judged: Json) -> list[str]:
    """A line for each claim."""
    lines = (
        f"{c['id']:>2} {PAPERS.get(c['paper'], c['paper'])}, {c['short']}: {worded(c)}"
        for c in judged["claims"]
    )
    return [
        *lines,
        "Verdicts hold for the models, texts and cards that were used.",
        "All about one: python -m reproduce claims N; about every one: claims all",
    ]


def details(claim: Json) -> list[str]:
    """The lines about one claim."""
    parts = f" ({claim['parts']})" if claim["parts"] else ""
    without = f"; {claim['without']}" if claim["without"] else ""
    told = {
        "verdict: ": f"{worded(claim)}{parts}{without}",
        "the paper: ": claim["number"],
        "": claim["at"],
        "not in the paper's regime: ": claim["regime"],
        "note: ": claim["note"],
        "learning rates: ": "; ".join(
            f"{variant}: {what}" for variant, what in claim["rates"].items()
        ),
        "what would decide it: ": claim["settles"],
    }
    return [
        f"{claim['id']}. {PAPERS.get(claim['paper'], claim['paper'])}: {claim['says']}",
        *(f"  {name}{what}" for name, what in told.items() if what),
        *(line for c in claim["contrasts"] for line in _contrast_lines(c)),
        *(line for m in claim["measured"] for line in _measured_lines(m)),
    ]


def released_lines(judged: Json) -> list[str]:
    """The lines on the defects of released code, and on what the blocks can tell apart."""
    text = ["Effects of defects in released code: with the defect minus without it."]
    for r in judged["released"]:
        text += [f"  {_name(r)}: {r['why'] or _effect(r)}", f"    {r['defect']}"]
    return [*text, *map(_gap_line, judged["blocks"])]


def _name(c: Json) -> str:
    return f"{c['variant']} - {c['against']} ({c['metric'].rpartition('.')[2]}, block {c['block']})"


def _effect(c: Json) -> str:
    form = difference_form(c["effect"], c["low"], c["high"])
    return f"{c['effect']:{form}} [{c['low']:{form}}, {c['high']:{form}}], n = {c['n']}"


def _contrast_lines(c: Json) -> list[str]:
    margin = "" if c["margin"] is None else f" within {c['margin']:.4f}"
    equality = c["expect"] == "equal"
    told = [worded(c), c["why"], f"equal{margin}" if c["equal"] and not equality else ""]
    text = [f"  {_name(c)}: {'; '.join(filter(None, told))}"]
    if math.isfinite(c["effect"]):
        expected = f", expected {c['expect']}{margin if equality else ''}"
        p = "" if c["why"] else f", p = {p_value(c)}"
        text.append(f"    {_effect(c)}{expected}{p}{_paper(c)}")
    if other := c["without"]:
        text.append(f"    {without(c)}, {_effect(other)}")
    if c["by_seed"]:
        form = difference_form(c["effect"], c["low"], c["high"])
        seeds = ", ".join(f"{seed}: {one:{form}}" for seed, one in c["by_seed"].items())
        text.append(f"    by seed: {seeds}{'; more seeds are needed' * c['more_seeds']}")
    if c["gap_closed"]:
        closed = (f"{variant} {_gap_closed(g, c['n'])}" for variant, g in c["gap_closed"].items())
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


def _paper(c: Json) -> str:
    """The paper's effect in our unit and ours as a fraction of it; "" if it gives none."""
    if c["published"] is None:
        return ""
    return f"; the paper {c['published']:+.4f}, ours is {c['share']:.2f} times that"


def _gap_closed(g: Json, n: int) -> str:
    """g with its interval, and its number of seeds if it is not n."""
    seeds = f" (n = {g['n']})" if g["n"] != n else ""
    return f"{g['value']:.2f} [{g['low']:.2f}, {g['high']:.2f}]{seeds}"


def _measured_lines(m: Json) -> list[str]:
    """Lines on a statement on speed, then the rows that do not confirm it."""
    lines, reason = m["lines"], f"; {m['why']}" if m["why"] else ""
    text = [f"  {statement(m)}: {worded(m)}{reason}"]
    if not lines:
        return text
    n, ours, papers = (
        _range([line[key] for line in lines if line[key] is not None], form)
        for key, form in (("n", "d"), ("ours", ".3f"), ("paper", ".3f"))
    )
    shares = _range([x["share"] for x in lines if x["share"] is not None and not x["why"]], ".2f")
    counted = "counted" if m["kind"] == "counted" else f"n = {n}"
    told = [agreement(m), f"{ours}, {counted}", f"the paper {papers or 'gives none'}"]
    told += [f"ours is {shares} times its gain"] if shares else []
    text.append(f"    {'; '.join(filter(None, told))}")
    for verdict in VERDICTS:
        rows = [x for x in lines if x["verdict"] == verdict != CONFIRMED and not m["why"]]
        text += [f"    {verdict}: {_row(x)}" for x in sorted(rows, key=_share)[:3]]
        if len(rows) > 3:
            text.append(f"    {verdict}: and {len(rows) - 3} more (claims.csv)")
    left_out = (x for x in lines if x["why"])
    return [*text, *(f"    not judged: {_row(x)}: {x['why']}" for x in left_out)]


def statement(m: Json) -> str:
    """A statement on speed or memory in words, with the table that it is judged by."""
    memory = "memory of " if m["less"] else ""
    than = f", times as fast as {m['than'].strip(' /')}" if m["than"] else ""
    return f"{memory}{m['column']}{than} ({table_name(m['table'])}, {m['kind']})"


def agreement(m: Json) -> str:
    """The number of rows that confirm a statement on speed or memory; "" if no row is judged."""
    judged = [x["verdict"] for x in m["lines"] if x["verdict"] not in (SHOWN, NOT_TESTED)]
    what = "at least half of the paper's gain"
    return f"{what} in {judged.count(CONFIRMED)} of {len(judged)} rows" if judged else ""


def _row(line: Json) -> str:
    interval = "" if line["n"] < 2 else f" [{line['low']:.3f}, {line['high']:.3f}]"
    paper = "-" if line["paper"] is None else f"{line['paper']:.3f}"
    return f"{line['label']}: {line['ours']:.3f}{interval}, the paper {paper}"


def _share(line: Json) -> float:
    """Our factor over the paper's, by which rows are sorted."""
    return line["ours"] / line["paper"]


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
    if gap["other_variants"]:
        text += (
            f" It is {gap['other_ratio']:.1f} times the median standard deviation of the "
            f"differences of the {gap['other_variants']} other variants to {gap['lower']}."
        )
    return text
