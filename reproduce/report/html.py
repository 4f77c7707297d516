"""Builds HTML and SVG as text: plain text is escaped, and every tag is closed."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import Any

VOID = ("meta", "wbr")
MINUS = "\N{MINUS SIGN}"


class Markup(str):
    """A string that is HTML already and is not escaped again."""


def text(*children: Any) -> Markup:
    """The children joined: elements unchanged, plain text escaped, lists joined in the same way.
    None is left out."""
    parts = []
    for child in children:
        if isinstance(child, Markup):
            parts.append(child)
        elif isinstance(child, str | int | float):
            parts.append(Markup(html.escape(str(child))))
        elif child is not None:
            parts.append(text(*child))
    return Markup("".join(parts))


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """An element. The attribute `class_` becomes class, `stroke_width` becomes stroke-width;
    attributes that are None or False are left out."""
    given = []
    for key, value in attributes.items():
        key = key.rstrip("_").replace("_", "-")
        if value is True:
            given.append(f" {key}")
        elif value is not None and value is not False:
            given.append(f' {key}="{html.escape(str(value))}"')
    start = f"<{name}{''.join(given)}>"
    return Markup(start if name in VOID else f"{start}{text(*children)}</{name}>")


def slug(*words: object) -> str:
    """An id made of these words."""
    return re.sub(r"[^a-z0-9]+", "-", " ".join(map(str, words)).lower()).strip("-")


def table(
    caption: Any, heads: Iterable[Any], rows: Iterable[Iterable[Any]], words: Iterable[int] = (0,)
) -> Markup:
    """A table in a container that scrolls sideways where the page is narrow.

    The first cell of a row is its heading. words: numbers of the columns with words; all others are
    aligned to the right.
    """
    left = set(words)

    def side(number: int) -> str | None:
        return None if number in left else "number"

    heading = [tag("th", h, scope="col", class_=side(n)) for n, h in enumerate(heads)]
    body = []
    for row in rows:
        first, *others = row
        cells = [tag("td", cell, class_=side(n) or _long(cell)) for n, cell in enumerate(others, 1)]
        body.append(tag("tr", tag("th", first, scope="row", class_=side(0)), cells))
    content = tag(
        "table",
        tag("caption", tag("span", caption)),
        tag("thead", tag("tr", heading)),
        tag("tbody", body),
    )
    # tabindex: without focus it could not be scrolled by the keyboard.
    name = re.sub(r"<[^>]*>", "", caption) if isinstance(caption, str) else "table"
    return tag("div", content, class_="scroll", tabindex=0, role="group", aria_label=name)


def _long(cell: Any) -> str | None:
    """The class of a cell whose text needs more than one line, or None."""
    return "long" if len(re.sub(r"<[^>]*>", "", text(cell))) > 34 else None


def details(summary: Any, *children: Any, **attributes: Any) -> Markup:
    """A section that opens when its summary is clicked."""
    return tag("details", tag("summary", summary), *children, **attributes)


def command(line: str) -> Markup:
    """A block with a command to copy."""
    return tag("pre", tag("code", line), class_="command", tabindex=0)


def unbroken(words: str) -> str:
    """The words joined by no-break spaces."""
    return words.replace(" ", "\N{NO-BREAK SPACE}")


def name(words: str) -> Markup:
    """A name that breaks after its underscores where a line is too short for it."""
    return Markup(html.escape(words).replace("_", "_<wbr>"))


def listed(items: Iterable[Any]) -> Markup:
    """The items separated by commas."""
    parts = [text(item) for item in items]
    return Markup(", ".join(parts))
