"""Loads the page's templates (templates/), with the filters that they use."""

import math
import os
import re
from pathlib import Path, PurePath

from jinja2 import FileSystemLoader
from markupsafe import Markup

from experiments.runs.stats import difference_form
from reproduce.judge import text
from reproduce.judge.text import formatted

MINUS = "\N{MINUS SIGN}"
HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def slug(*words: object) -> str:
    """An id made of these words."""
    return re.sub(r"[^a-z0-9]+", "-", " ".join(map(str, words)).lower()).strip("-")


def signed(value: float, low: float = math.nan, high: float = math.nan) -> str:
    """A difference with its sign, its decimals by its interval; `-` if it is not finite."""
    said = formatted(value, difference_form(value, low, high))
    return said if said == "-" else said.replace("-", MINUS)


def interval(low: float, high: float, form: str = "") -> str:
    """An interval in brackets, in this form or by its width; `-` if it is not finite."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return "-"
    form = form or difference_form(low, low, high)
    return f"[{low:{form}}, {high:{form}}]".replace("-", MINUS)


def link(page: Path, path: Path) -> Markup:
    """A link from the folder of the page to a file; its text is the path in the repository."""
    full = path.resolve()
    shown = full.relative_to(ROOT) if full.is_relative_to(ROOT) else path
    href = PurePath(os.path.relpath(full, page.resolve())).as_posix()
    return Markup('<a href="{}" data-source>{}</a>').format(href, shown.as_posix())


TEMPLATES = text.ENVIRONMENT.overlay(
    loader=FileSystemLoader([HERE / "templates", Path(text.__file__).parent]),
    autoescape=True,
    extensions=["jinja2.ext.do"],
)
TEMPLATES.globals |= {f.__name__: f for f in (signed, interval, slug)} | {"minus": MINUS}
