"""Lays out a table as in the papers, split into parts that are at most 80 characters wide.

The paper's values are on a line above ours, so that a column is as wide as the wider of the two.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

WIDTH = 80
BLANK = "-"  # a cell that is missing in the paper or the tier
PAPER, OURS = "paper", "ours"
SOURCE = "source"  # the heading over these two
STUBS = {"variant": "of", "row": "method", "column": "metric"}  # headings over the names of rows


@dataclass(frozen=True)
class Line:
    """One line of a table: the names of its row, and its values."""

    names: list[str]
    values: list[str]


@dataclass(frozen=True)
class Grid:
    """A table as it is printed."""

    stubs: list[str]  # headings over the names
    # The quantity that each column shows, or "" if its heading says so; those of one form a part.
    groups: list[str]
    columns: list[str]  # headings over the values
    lines: list[Line]

    def parts(self, width: int = WIDTH) -> list[Grid]:
        """The table split into parts, each with as many columns as fit into `width` characters of
        Markdown. Every part repeats the names and leaves out lines without a value."""
        names = sum(w + 3 for w in _widths([self.stubs, *(line.names for line in self.lines)]))
        values = _widths([self.columns, *(line.values for line in self.lines)])
        parts: list[list[int]] = []
        for number, wide in enumerate(values):
            last = parts[-1] if parts else []
            taken = 1 + names + sum(values[n] + 3 for n in last) + wide + 3
            if not last or taken > width or self.groups[last[0]] != self.groups[number]:
                parts.append([])
            parts[-1].append(number)
        return [self._of(part) for part in parts]

    def _of(self, chosen: list[int]) -> Grid:
        groups, columns = ([own[n] for n in chosen] for own in (self.groups, self.columns))
        lines = [Line(line.names, [line.values[n] for n in chosen]) for line in self.lines]
        filled = [line for line in lines if set(line.values) != {BLANK}]
        return Grid(self.stubs, groups, columns, filled)

    def markdown(self, width: int = WIDTH) -> str:
        """The parts as Markdown, padded so that columns also align in plain text."""
        return "\n".join("".join(f"{line}\n" for line in _text(p)) for p in self.parts(width))


def _widths(rows: Iterable[list[str]]) -> list[int]:
    return [max(3, *map(len, column)) for column in zip(*rows, strict=True)]


def _text(part: Grid) -> list[str]:
    """The lines of a part in Markdown; names that repeat those of the line above are left blank."""
    rows, before = [], None
    for one in part.lines:
        *names, source = one.names
        same = part.stubs[-1] == SOURCE and names == before
        rows.append([*([""] * len(names) if same else names), source, *one.values])
        before = names
    heads, left = [*part.stubs, *part.columns], len(part.stubs)
    widths = _widths([heads, *rows])

    def line(cells: list[str]) -> str:
        both = enumerate(zip(cells, widths, strict=True))
        padded = [cell.ljust(w) if n < left else cell.rjust(w) for n, (cell, w) in both]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * w if n < left else "-" * (w - 1) + ":" for n, w in enumerate(widths)]
    group = part.groups[0]
    return [*([f"**{group}**", ""] if group else []), line(heads), line(rule), *map(line, rows)]
