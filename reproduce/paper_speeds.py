"""Writes the table that compares the papers' statements on speed with our measurements into
reproduce/README.md: `python -m reproduce.paper_speeds`.

Our values come from the CSV files of `measured/h200`, the papers' from `published.json`. The
table is written between two marks; the rest of the README is left as it is.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, reduce
from operator import truediv
from pathlib import Path

from experiments.support.checkpoint import write_text
from reproduce.cells import published_cell
from reproduce.reading import read_tables
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
    path = MEASURED / f"{table}-full.csv"
    if not path.exists():
        return None
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["method"] == method and row.get(f"{column}: mean"):
                return float(row[f"{column}: mean"])
    return None


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


def fst(shape: str, column: str) -> Gain:
    """The statement in a row of FST's Figure 7."""
    part = column.removesuffix(" speedup")
    return Gain(f"FST, Figure 7: {part}, {shape}", (("fst_figure7", shape, column),))


def sste(column: str) -> Gain:
    """The statement in a column of S-STE's Table 10."""
    table, quoted = "sste_table10", "as quoted, shape unknown"
    text = f"S-STE, Table 10: {column}; ours at d=4096, their shape is unknown"
    return Gain(text, ((table, "d=4096", column),), ((table, quoted, column),))


def faster_than_fst(model: str) -> Ranking:
    """The statement that SLoPe trains this model faster than FST, from SLoPe's Table 1."""
    cells = (f"{model} / {method}" for method in ("SLoPe", "FST"))
    first, second = (("slope_table1", row, "training") for row in cells)
    return Ranking(
        f"SLoPe, Table 1: {model} trains faster with SLoPe than with FST", (first, second)
    )


def slope(number: int, model: str, column: str) -> Gain:
    """The statement on a model in SLoPe's Table 1 (speed) or Table 2 (memory)."""
    what = {1: "speed", 2: "memory"}[number]
    cell = (f"slope_table{number}", f"{model} / SLoPe", column)
    return Gain(f"SLoPe, Table {number}: {what} of {column}, {model}", (cell,), smaller=number == 2)


def tiled(column: str, model: str) -> Ranking:
    """The statement that products are faster when a wide weight is cut into square tiles, from
    SLoPe's Table 7."""
    after, before = (("slope_table7", model, f"{column}, {when}") for when in ("after", "before"))
    text = f"SLoPe, Table 7: upsample tiling makes {column} faster, {model} (after / before)"
    return Ranking(text, (after, before))


def fused_adapters(rank: str, model: str) -> Ranking:
    """The statement that the fused kernel of the adapters is faster, from SLoPe's Table 6."""
    after, before = (("slope_table6", model, f"{rank}, {when}") for when in ("after", "before"))
    text = f"SLoPe, Table 6: fusing adapters of {rank} makes inference faster, {model}"
    return Ranking(f"{text} (after / before)", (after, before))


def with_flash(column: str, model: str) -> Gain:
    """The statement that SLoPe is also faster when both models use FlashAttention-2, from SLoPe's
    Table B.3."""
    both, flash = (("slope_tableB3", model, f"{column}, {part}") for part in ("both", "FA"))
    text = f"SLoPe, Table B.3: {column}, {model}, over dense, both with FlashAttention-2"
    return Gain(text, (both, flash))


def product(part: str, size: str) -> Gain:
    """The statement on the speed of one product, from SLoPe's Figure 3a."""
    text = f"SLoPe, Figure 3a, read off the plot: {part.lower()} product, {size}"
    return Gain(text, (("slope_figure3", size, part),))


def decoding(lengths: str, device: str) -> Gain:
    """The statement in a row of AST's Table 6, for these lengths of prompt and text and this
    GPU."""
    table, column = "ast_table6", "speedup"
    what = f"decoding by transformers, prompt and text of {lengths} tokens"
    text = f"AST, Table 6: {what}; theirs by TensorRT-LLM on one {device}"
    return Gain(text, ((table, lengths, column),), ((table, f"{device}, {lengths}", column),))


def sparse_over_dense(text: str, row: str) -> Gain:
    """The statement in a row of torchao's Table 4: its dense time over its 2:4 time."""
    cells = ("torchao_table4", row, "dense"), ("torchao_table4", row, "2:4")
    return Gain(f"torchao, Table 4: {text}", cells)


def sam(text: str, row: str, column: str = "images a second") -> Gain:
    """The statement in a row of torchao's Table 5, relative to its dense row."""
    cells = ("torchao_table5", row, column), ("torchao_table5", "dense", column)
    smaller = column == "peak memory"
    # Our speed was measured in alternation with dense, which is more exact than a quotient of rows.
    ours = cells if smaller else (("torchao_table5", row, "speed-up"),)
    return Gain(f"torchao, Table 5: SAM's encoder at inference, {text}", ours, cells, smaller)


STATEMENTS: tuple[Gain | Ranking, ...] = (
    fst("N=4 n=2048 d=768 h=12", "FFN speedup"),
    fst("N=8 n=2048 d=2048 h=32", "FFN speedup"),
    fst("N=4 n=2048 d=9216 h=72", "FFN speedup"),
    fst("N=4 n=2048 d=768 h=12", "block speedup"),
    fst("N=8 n=2048 d=2048 h=32", "block speedup"),
    fst("N=4 n=2048 d=9216 h=72", "block speedup"),
    sste("FFN, pre-training"),
    sste("FFN, inference"),
    *map(faster_than_fst, ("OPT-66B", "OPT-30B", "OPT-13B", "OPT-6.6B", "OPT-2.6B", "LLaMA-3-8B")),
    slope(1, "OPT-66B", "training"),
    slope(1, "OPT-2.6B", "training"),
    *(slope(1, model, column) for model in ("OPT-66B", "OPT-2.6B", "LLaMA-3-8B")
      for column in ("inference", "inference, r=1.56%", "inference, r=6.25%")),
    slope(2, "OPT-66B", "training"),
    slope(2, "OPT-66B", "inference"),
    *(tiled(column, model) for column in ("training", "inference")
      for model in ("OPT-66B", "OPT-13B")),
    *(fused_adapters("r=6.25%", model) for model in ("OPT-66B", "OPT-13B", "OPT-2.6B")),
    *(with_flash(column, model) for column in ("training", "inference")
      for model in ("OPT-66B", "OPT-2.6B")),
    *(product("Upsample", size) for size in ("d=768", "d=4096", "d=9216")),
    Ranking("SLoPe, Figure 3a, read off the plot: tiling makes the upsample product faster, d=9216"
            " (after / before)", (("slope_figure3", "d=9216", "Upsample, tiled"),
                                  ("slope_figure3", "d=9216", "Upsample"))),
    Ranking("SLoPe, Figure B.2, read off the plot: the set-up of a sparse product takes longer than"
            " the product, d=9216 (ms / ms)", (("slope_figureB2", "d=9216", "setup"),
                                               ("slope_figureB2", "d=9216", "multiply"))),
    Gain("torchao, Table 2: SAM's image encoder, forward and backward",
         (("torchao_table2", "2:4 MLP weights", "speed-up"),)),
    *(Gain(f"torchao, Table 3: linear {shape}", (("torchao_table3", shape, "speedup"),))
      for shape in ("(13008,1024,4096)", "(13008,4096,1024)")),
    sparse_over_dense("product alone", "product (13008,1024,4096)"),
    sparse_over_dense("MLP of PR 184, forward and backward", "MLP (44160,1024,4096,1024)"),
    Gain("torchao, Table 4: time to choose and pack, over the library's packing",
         (("torchao_table4", "product (13008,1024,4096)", "prune and pack"),
          ("torchao_table4", "product (13008,1024,4096)", "library")), smaller=True),
    sam("MLP", "2:4, MLP"),
    sam("attention and MLP", "2:4, attention and MLP"),
    sam("memory, attention and MLP", "2:4, attention and MLP", "peak memory"),
    *(decoding(lengths, device) for device in ("RTX 4090", "L20")
      for lengths in ("128, 128", "1024, 1024")),
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
