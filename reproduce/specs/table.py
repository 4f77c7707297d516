"""The dataclasses that describe a table, read from `reproduce/specs/tables/<name>.yaml`.

A table has rows (methods) and tiers (budgets), and may have variants (sizes, tasks, patterns). For
every variant, row and seed of a tier there is one training or one benchmark, and then the tier's
measurements of what was trained. Columns say which of the resulting numbers are shown. A tier may
instead show the records of a block (reproduce/specs/blocks); then nothing is run for it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from experiments.support.errors import UserError
from experiments.support.typed import typed
from reproduce.specs.reading import errors_in, read_yaml

TABLES = Path(__file__).parent / "tables"
COVERAGE = TABLES.with_name("coverage.yaml")  # every table and figure of the papers, for `--list`
TIERS = ("smoke", "mini", "full")
BENCH = "bench"


@dataclass
class Measure:
    """A measurement that is made of every finished training."""

    driver: Literal["finetune", "evaluate"]
    # Of hydra; `{inputs}` is the folder with the files of reproduce/execute/smoke_tasks.py.
    overrides: list[str] = field(default_factory=list)
    # The tasks to fine-tune on, each separately; empty for `evaluate`.
    tasks: list[str] = field(default_factory=list)


@dataclass
class Variant:
    """One of several settings in which all rows are run, for example a model size."""

    label: str
    key: str = ""  # replaces `{variant}` in overrides
    overrides: list[str] = field(default_factory=list)  # of hydra, in all its rows
    rows: list[str] = field(default_factory=list)  # labels of its rows; empty = all
    published: str | None = None  # its name in `published.json`


@dataclass
class Tier:
    """One budget at which a table can be made."""

    setting: str = ""  # what is trained, and what it replaces of the paper's setting; printed
    needs: str = ""  # the data and the machine that are needed, in words
    overrides: list[str] = field(default_factory=list)  # of hydra, in every row
    started: list[str] = field(default_factory=list)  # more of rows that start from another row
    seeds: list[int] = field(default_factory=list)  # of every row; empty if it shows a block
    # The measurements of what was trained, by names that columns refer to.
    measure: dict[str, Measure] = field(default_factory=dict)
    variants: list[Variant] = field(default_factory=list)  # instead of the table's
    rows: list[str] = field(default_factory=list)  # labels of its rows; empty = all
    # The name of the block whose records it shows: those of the rows' variants, with its seeds.
    block: str = ""
    pretrained: bool = False  # the model comes with trained weights, from which all rows start
    # Why our values are not compared with the paper's even in the tier `full`.
    incomparable: str = ""
    unavailable: str = ""  # why the tier cannot be made


@dataclass
class TableRow:
    """One row of a table: a method with its options."""

    label: str
    # Of hydra. A row without overrides appears only in tiers that show a block.
    overrides: list[str] = field(default_factory=list)
    tiers: dict[str, list[str]] = field(default_factory=dict)  # further overrides by tier
    # Further overrides of a measurement, by its name.
    measure: dict[str, list[str]] = field(default_factory=dict)
    published: str | None = None  # its name in `published.json`
    published_table: str | None = None  # the table there, instead of the table's own
    # The place of a column's published value as [row, column], by the column's label, where the
    # table's `published_row` and `published_column` do not give it.
    cells: dict[str, list[str]] = field(default_factory=dict)
    # Label of an earlier row: the initial weights are those of its finished run with the same
    # variant and seed.
    starts_from: str | None = None
    against: str | None = None  # label of the row to compare with, instead of the first
    stage: bool = False  # only trained for others to start from, and neither measured nor shown
    not_run: str = ""  # why only the paper's values are shown
    # Its variant in the block that a tier shows, or `<block>/<variant>` for a variant of the block
    # that this one starts from.
    variant: str = ""


@dataclass
class Column:
    """One column of a table: a quantity of a run."""

    label: str
    # The number of a run, one of
    #   a dotted path into `result.json`;
    #   `tail.<name>`: the mean of this entry of `metrics.jsonl` over the last tenth of the steps;
    #   `<measure>.<metric>` or `<measure>.<task>.<metric>`: a metric of a measurement;
    #   `<measure>.mean`: the mean of the scores of its tasks;
    #   several of these, separated by commas: their mean;
    #   `exp.<value>`: the exponential of another one;
    #   None: it cannot be measured.
    value: str | None = None
    # How the numbers of all seeds are shown; `interval`: the mean with its 95 % interval; `paired`:
    # the same of differences at equal seeds to the first row, or the row's `against`.
    show: Literal["mean_std", "mean", "interval", "sum", "paired"] = "mean_std"
    format: str = ".3f"  # Python's, of a number
    published: str | None = None  # its name in `published.json`, if those values are shown
    scale: float = 1.0  # factor of what is shown, for example 100 for a share in percent
    unit: str = ""  # printed, if published values do not give one
    tiers: dict[str, str | None] = field(default_factory=dict)  # another `value` in some tiers

    def value_in(self, tier: str) -> str | None:
        """The column's `value` in a tier."""
        return self.tiers.get(tier, self.value)


@dataclass
class Figure:
    """The figure of a table."""

    # One of
    #   `curves`: quantities of the log, such as the loss, against the step;
    #   `blocks`: the flip rate of each transformer block, of runs with `method.flips_by_layer`;
    #   `scatter`: two quantities of all steps against each other, row by row, and the distribution
    #   of the second;
    #   `bars` or `lines`: the paper's values and ours, row by row (`lines` if rows have an order);
    #   `none`: no figure.
    kind: Literal["curves", "blocks", "scatter", "bars", "lines", "none"] = "curves"
    # Labels of those in `bars` or `lines`; empty = all with published values.
    columns: list[str] = field(default_factory=list)
    # The panels of `curves`; x and y of `scatter`.
    quantities: list[str] = field(default_factory=lambda: ["val_loss", "flip_rate"])


@dataclass
class Table:
    """A table of a paper or of this project. Its first row is the dense baseline, except for
    benchmarks and searches for decay factors, which measure their baseline themselves."""

    name: str
    title: str
    tiers: dict[str, Tier]
    rows: list[TableRow]
    columns: list[Column]
    variants: list[Variant] = field(default_factory=list)
    driver: Literal["pretrain", "dino", "translate", "bench", "find_decay"] = "pretrain"
    paper: str | None = None  # None for this project's own
    number: str | None = None  # Table 2 is `2`, Table 2 of an appendix `B2`, Figure 7 `figure7`
    published_table: str | None = None  # its name in `published.json`
    published_setting: str = ""  # the paper's; printed
    # The names of a cell in `published.json`, with `{row}`, `{variant}` and `{column}` for the
    # published names of these.
    published_row: str = "{row}"
    published_column: str = "{column}"
    notes: list[str] = field(default_factory=list)  # lines that are printed below the settings
    figure: Figure = field(default_factory=Figure)

    def __post_init__(self) -> None:
        rows, columns, variants = (
            [one.label for one in some] for some in (self.rows, self.columns, self.variants)
        )
        for labels in (rows, columns, variants):
            if len({*labels}) < len(labels):
                raise ValueError(f"two rows, columns or variants have the same label: {labels}")
        trains, first = self.driver not in (BENCH, "find_decay"), [*self.rows, TableRow("")][0]
        if trains and "method=dense" not in first.overrides:
            raise ValueError("the first row must be the dense baseline (method=dense)")
        _check("tiers", self.tiers, TIERS)
        _check("figure.columns", self.figure.columns, columns)
        measures = {name for tier in self.tiers.values() for name in tier.measure}
        for position, row in enumerate(self.rows):
            _check(f"{row.label!r}: starts_from", [row.starts_from], [None, *rows[:position]])
            _check(f"{row.label!r}: tiers", row.tiers, self.tiers)
            _check(f"{row.label!r}: measure", row.measure, measures)
        for name, tier in self.tiers.items():
            if not (tier.unavailable or tier.block or tier.seeds):
                raise ValueError(f"tier {name} needs seeds")
            _check(f"tier {name}: rows", tier.rows, rows)
            shown = self.shown_rows(name)
            others = [None, *(row.label for row in shown)]
            _check(f"tier {name}: against", [row.against for row in shown], others)

    @property
    def command(self) -> str:
        """Its name on the command line: `table<number>`, `figure<number>` or its own."""
        if self.number is None:
            return self.name
        return self.number if self.number.startswith("figure") else f"table{self.number}"

    def rows_of(self, tier: str) -> list[TableRow]:
        """The rows of a tier, stages included."""
        if self.tiers[tier].block:
            return [row for row in self.rows if row.variant or row.not_run]
        chosen = self.tiers[tier].rows
        own = [row for row in self.rows if row.overrides or not row.variant]
        return [row for row in own if not chosen or row.label in chosen]

    def shown_rows(self, tier: str) -> list[TableRow]:
        """The rows of a tier without those that others only start from."""
        return [row for row in self.rows_of(tier) if not row.stage]

    def trainings(self, tier: str) -> Iterator[tuple[Variant, TableRow, int]]:
        """Yields (variant, row, seed) of each training or benchmark of a tier."""
        for variant in self.variants_of(tier):
            for row in self.rows_of(tier):
                if not row.not_run and (not variant.rows or row.label in variant.rows):
                    yield from ((variant, row, seed) for seed in self.tiers[tier].seeds)

    def variants_of(self, tier: str) -> list[Variant]:
        """The variants of a tier; a single nameless one for a table without variants."""
        return self.tiers[tier].variants or self.variants or [Variant("")]


def _check(name: str, values: Iterable[str | None], choices: Iterable[str | None]) -> None:
    """Raise a `ValueError` unless all values are among the choices."""
    known = [*choices]
    if wrong := next((value for value in values if value not in known), None):
        raise ValueError(f"{name}={wrong}; choose of {', '.join(filter(None, known))}")


def read_table(path: Path) -> Table:
    """The table that a spec file describes; what it lacks comes from the one it is `based_on`."""
    with errors_in(path):
        content, base = read_yaml(path), path
        while name := content.pop("based_on", ""):
            base = base.with_name(f"{name}.yaml")
            if not base.is_file():
                raise ValueError(f"based_on: there is no {base.name}")
            content = read_yaml(base) | content
        return typed(Table, "", {"name": path.stem, **content})


def read_tables(folder: Path = TABLES) -> list[Table]:
    """All tables in a folder, sorted by name. Raises a `UserError` for one that `--list` would not
    name, because coverage.yaml lacks it."""
    tables = [read_table(path) for path in sorted(folder.glob("*.yaml"))]
    covered = {paper: [*map(str, of["items"])] for paper, of in read_yaml(COVERAGE).items()}
    for table in (table for table in tables if table.paper):
        if table.number not in covered.get(str(table.paper), []):
            where = f"add it with its caption to `items:` of `{table.paper}:`, beside a `title:`"
            raise UserError(f"{table.name}.yaml: {COVERAGE.name} lacks {table.number}; {where}")
    return tables
