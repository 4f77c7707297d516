"""Writes the table that compares the papers' statements on speed with our measurements into
reproduce/README.md: `python -m reproduce.paper_speeds`.

Our values come from the CSV files of `measured/h200`, the papers' from `published.json`. The
table is written between two marks; the rest of the README is left as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, reduce
from operator import truediv
from pathlib import Path

from experiments.support.checkpoint import write_text
from reproduce.cells import published_cell
from reproduce.reading import read_rows, read_tables
from reproduce.spec import Table, Variant

HERE = Path(__file__).parent
MEASURED, README = HERE / "measured" / "h200", HERE / "README.md"
BEGIN, END = "<!-- written by python -m reproduce.paper_speeds -->\n", "<!-- end -->\n"
EQUAL = 0.01  # relative difference up to which two speeds count as equal: the noise of timing

Cell = tuple[str, str, str]  # table, row, column
Cells = tuple[Cell, ...]  # one cell, for its value, or two, for the first over the second


@dataclass(frozen=True)
class Gain:
    """The statement that something is faster or smaller than dense.

    cells: where our value is. paper: where the paper's value is, if it is in other cells.
    smaller: less is better, as for memory.
    """

    text: str
    cells: Cells
    paper: Cells = ()
    smaller: bool = False

    def line(self) -> list[str]:
        """The row of the statement: its text, the paper's value, our value and the verdict."""
        paper, ours = quotient(self.paper or self.cells, published), quotient(self.cells, measured)
        if paper is None or ours is None:
            return [self.text, _number(paper), _number(ours), "not measured"]
        gains = [1 - v if self.smaller else v - 1 for v in (paper, ours)]
        verdict = "holds" if gains[1] >= gains[0] / 2 else "less than half of the gain"
        if gains[1] <= 0:
            verdict = "**no gain**" if gains[0] > 0 else "a loss in both"
        return [self.text, _number(paper), _number(ours), verdict]


@dataclass(frozen=True)
class Ranking:
    """The statement that the first of two is faster than the second."""

    text: str
    cells: tuple[Cell, Cell]

    def line(self) -> list[str]:
        """The row of the statement: its text, the paper's values, our values and the verdict."""
        paper, ours = ([read(cell) for cell in self.cells] for read in (published, measured))
        texts = [self.text, *(" / ".join(map(_number, values)) for values in (paper, ours))]
        first, second = ours
        if first is None or second is None:
            return [*texts, "not measured"]
        if abs(first / second - 1) < EQUAL:
            return [*texts, "**no difference**"]
        return [*texts, "holds" if first > second else "**the other way round**"]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def quotient(cells: Cells, read: Callable[[Cell], float | None]) -> float | None:
    """The value of one cell, or that of the first of two cells over that of the second; None if a
    value is missing."""
    values = [read(cell) for cell in cells]
    return None if None in values else reduce(truediv, values)


def measured(cell: Cell) -> float | None:
    """Our value in a cell of a measured table; None if it was not measured."""
    table, method, column = cell
    rows = (row for row in read_rows(MEASURED / f"{table}-full.csv") if row["method"] == method)
    return next((float(own) for row in rows if (own := row.get(f"{column}: mean"))), None)


def published(cell: Cell) -> float | None:
    """The paper's value in a cell of a table; None if `published.json` has none."""
    name, label, column = cell
    table = _tables()[name]
    rows = {row.label: row for row in table.rows}
    columns = {column.label: column for column in table.columns}
    found = published_cell(table, Variant(""), rows[label], columns[column])
    return None if found is None else found.value


@cache
def _tables() -> dict[str, Table]:
    return {table.name: table for table in read_tables()}


def _gains(
    text: str, table: str, rows: Iterable[str], columns: Iterable[str], smaller: bool = False
) -> list[Gain]:
    """The statements on these cells of a table, whose texts are made of `{row}` and `{column}`."""
    cells = [(row, column) for column in columns for row in rows]
    return [
        Gain(
            text.format(row=row.removesuffix(" / SLoPe"), column=column.removesuffix(" speedup")),
            ((table, row, column),),
            smaller=smaller,
        )
        for row, column in cells
    ]


def _sam(text: str, row: str, column: str = "") -> Gain:
    """The statement in a row of torchao's Table 5, relative to its dense row."""
    paper = tuple(("torchao_table5", r, column or "images a second") for r in (row, "dense"))
    # Our speed was measured in alternation with dense, which is more exact than a quotient of rows.
    ours = paper if column else (("torchao_table5", row, "speed-up"),)
    text = f"torchao, Table 5: SAM's encoder at inference, {text}"
    return Gain(text, ours, paper, smaller=bool(column))


QUOTED = "as quoted, shape unknown"
OPT = "OPT-66B / SLoPe", "OPT-2.6B / SLoPe"
STATEMENTS: tuple[Gain | Ranking, ...] = (
    *_gains("FST, Figure 7: {column}, {row}", "fst_figure7",
            ("N=4 n=2048 d=768 h=12", "N=8 n=2048 d=2048 h=32", "N=4 n=2048 d=9216 h=72"),
            ("FFN speedup", "block speedup")),
    *(Gain(f"S-STE, Table 10: {column}; ours at d=4096, their shape is unknown",
           (("sste_table10", "d=4096", column),), (("sste_table10", QUOTED, column),))
      for column in ("FFN, pre-training", "FFN, inference")),
    *(Ranking(f"SLoPe, Table 1: {model} trains faster with SLoPe than with FST",
              (("slope_table1", f"{model} / SLoPe", "training"),
               ("slope_table1", f"{model} / FST", "training")))
      for model in ("OPT-66B", "OPT-30B", "OPT-13B", "OPT-6.6B", "OPT-2.6B", "LLaMA-3-8B")),
    *_gains("SLoPe, Table 1: speed of {column}, {row}", "slope_table1", OPT, ("training",)),
    *(gain for row in (*OPT, "LLaMA-3-8B / SLoPe")
      for gain in _gains("SLoPe, Table 1: speed of {column}, {row}", "slope_table1", (row,),
                         ("inference", "inference, r=1.56%", "inference, r=6.25%"))),
    *_gains("SLoPe, Table 2: memory of {column}, {row}", "slope_table2", OPT[:1],
            ("training", "inference"), smaller=True),
    *(Ranking(f"SLoPe, Table 7: upsample tiling makes {column} faster, {model} (after / before)",
              (("slope_table7", model, f"{column}, after"),
               ("slope_table7", model, f"{column}, before")))
      for column in ("training", "inference") for model in ("OPT-66B", "OPT-13B")),
    *(Ranking(f"SLoPe, Table 6: fusing adapters of r=6.25% makes inference faster, {model} "
              "(after / before)",
              (("slope_table6", model, "r=6.25%, after"),
               ("slope_table6", model, "r=6.25%, before")))
      for model in ("OPT-66B", "OPT-13B", "OPT-2.6B")),
    *(Gain(f"SLoPe, Table B.3: {column}, {model}, over dense, both with FlashAttention-2",
           (("slope_tableB3", model, f"{column}, both"), ("slope_tableB3", model, f"{column}, FA")))
      for column in ("training", "inference") for model in ("OPT-66B", "OPT-2.6B")),
    *_gains("SLoPe, Figure 3a, read off the plot: upsample product, {row}", "slope_figure3",
            ("d=768", "d=4096", "d=9216"), ("Upsample",)),
    Ranking("SLoPe, Figure 3a, read off the plot: tiling makes the upsample product faster, d=9216"
            " (after / before)", (("slope_figure3", "d=9216", "Upsample, tiled"),
                                  ("slope_figure3", "d=9216", "Upsample"))),
    Ranking("SLoPe, Figure B.2, read off the plot: the set-up of a sparse product takes longer than"
            " the product, d=9216 (ms / ms)", (("slope_figureB2", "d=9216", "setup"),
                                               ("slope_figureB2", "d=9216", "multiply"))),
    *_gains("torchao, Table 2: SAM's image encoder, forward and backward", "torchao_table2",
            ("2:4 MLP weights",), ("speed-up",)),
    *_gains("torchao, Table 3: linear {row}", "torchao_table3",
            ("(13008,1024,4096)", "(13008,4096,1024)"), ("speedup",)),
    *(Gain(f"torchao, Table 4: {text}", (("torchao_table4", row, "dense"),
                                         ("torchao_table4", row, "2:4")))
      for text, row in (("product alone", "product (13008,1024,4096)"),
                        ("MLP of PR 184, forward and backward", "MLP (44160,1024,4096,1024)"))),
    Gain("torchao, Table 4: time to choose and pack, over the library's packing",
         (("torchao_table4", "product (13008,1024,4096)", "prune and pack"),
          ("torchao_table4", "product (13008,1024,4096)", "library")), smaller=True),
    _sam("MLP", "2:4, MLP"),
    _sam("attention and MLP", "2:4, attention and MLP"),
    _sam("memory, attention and MLP", "2:4, attention and MLP", "peak memory"),
    *(Gain(f"AST, Table 6: decoding by transformers, prompt and text of {lengths} tokens; theirs "
           f"by TensorRT-LLM on one {device}", (("ast_table6", lengths, "speedup"),),
           (("ast_table6", f"{device}, {lengths}", "speedup"),))
      for device in ("RTX 4090", "L20") for lengths in ("128, 128", "1024, 1024")),
)  # fmt: skip


def table() -> str:
    """The table of all statements in Markdown."""
    heads = ["statement", "paper", "one H200", ""]
    rows = [heads, ["---", "--:", "--:", "---"], *(s.line() for s in STATEMENTS)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main() -> int:
    """Write the table into the README; return the exit status."""
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    written = f"{before}{BEGIN}{table()}{END}{after}"
    write_text(README, written)
    print(f"written to {README}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
