"""Writes the verdicts on the papers' claims as lines of text, by the template claims.jinja."""

import math
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from experiments.runs.stats import difference_form
from reproduce.judge.scale import ENOUGH
from reproduce.judge.verdicts import CONFIRMED, VERDICTS

WIDTH = 80
Json = dict[str, Any]  # claims.json or a part of it


def formatted(value: float | None, form: str) -> str:
    """A number in this format; `-` if it is None or not finite."""
    return "-" if value is None or not math.isfinite(value) else f"{value:{form}}"


def wrapped(lines: Iterable[str]) -> list[str]:
    """The lines, broken where they are too long for a terminal; what follows is indented."""
    text = []
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        text += textwrap.wrap(
            line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        ) or [""]
    return text


def lines(judged: Json, which: str = "all") -> list[str]:
    """All about one claim, asked for by its number, or about all; or, without any, a line each."""
    claims = judged["claims"]
    if not which:
        return [
            *(f"{c['id']:>2} {c['name']}, {c['short']}: {worded(c)}" for c in claims),
            "Verdicts hold for the models, texts and cards that were used.",
            "All about one: python -m reproduce claims N; about every one: claims all",
        ]
    asked = [claim for claim in claims if which in ("all", str(claim["id"]))]
    return TEMPLATE.render(judged | {"claims": asked, "all": which == "all"}).splitlines()


def worded(part: Json) -> str:
    """The verdict on a claim or a part of it, with what it is restricted to."""
    return f"{part['verdict']} {part['where']}".rstrip()


def range_of(m: Json, key: str, form: str = ".3f") -> str:
    """The least and the greatest of a number over the rows, in words; one if they are equal."""
    rows = [x for x in m["lines"] if x[key] is not None and not (key == "share" and x["why"])]
    ends = sorted(x[key] for x in rows)
    return " to ".join(dict.fromkeys(f"{end:{form}}" for end in ends[:1] + ends[-1:]))


ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
ENVIRONMENT.filters["formatted"] = formatted
ENVIRONMENT.globals |= {
    **{f.__name__: f for f in (worded, range_of)},
    "form_of": lambda c: difference_form(c["effect"], c["low"], c["high"]),
    "enough": ENOUGH,
    "verdicts": VERDICTS,
    "confirmed": CONFIRMED,
}
TEMPLATE = ENVIRONMENT.get_template("claims.jinja")
