"""The dataclasses of a table, into which `reproduce/tables/<name>.yaml` is read.

A table has rows (methods), may have variants (sizes, tasks, patterns) and has tiers (budgets). For
every variant, row and seed of a tier there is one training, or one benchmark, and then the tier's
measurements on what was trained. Columns say which of the resulting numbers are shown. A tier may
instead show what a block (reproduce/blocks) has measured: then nothing is run for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

TIERS = ("smoke", "mini", "full")
COMPARING = ("paired", "ratio", "speedup")
SHOWN_AS = ("mean_std", "mean", "interval", "sum", *COMPARING)
TRAINING = ("pretrain", "dino", "translate")
MEASURING = ("finetune", "evaluate")
BENCH = "bench"
SEARCH = "find_decay"
FIGURES = ("curves", "blocks", "scatter", "bars", "lines", "none")


@dataclass
class Measure:
    """A measurement of every finished training.

    driver: `finetune` or `evaluate`. tasks: one fine-tuning each; none for `evaluate`.
    overrides: hydra overrides; `{inputs}` stands for the folder of reproduce/smoke_tasks.py.
    """

    driver: str
    overrides: list[str] = field(default_factory=list)
    tasks: list[str] = field(default_factory=list)


@dataclass
class Variant:
    """One of several settings that all rows are run in, a model size for example.

    key: takes the place of `{variant}` in overrides. rows: labels of those that it has; all if
        empty. published: its name in `published.json`.
    """

    label: str
    key: str = ""
    overrides: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    published: str | None = None


@dataclass
class Tier:
    """One budget at which a table can be made.

    setting: what is trained, and what of the paper's setting it replaces; printed. needs: data and
        machine. overrides: hydra overrides of every row; started: further ones of rows that start
        from another one. measure: what is measured afterwards, by a name that columns refer to.
        variants: instead of the table's. rows: labels of those that this tier has; all if empty.
        block: whose records it shows, those of the rows' arms; it has the block's seeds and runs
        nothing. pretrained: the model brings trained weights, from which all rows start.
        incomparable: why no difference to the paper is taken even in the tier `full`, if so.
        unavailable: why there is no such tier, if so.
    """

    setting: str = ""
    needs: str = ""
    overrides: list[str] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    measure: dict[str, Measure] = field(default_factory=dict)
    variants: list[Variant] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    block: str = ""
    pretrained: bool = False
    incomparable: str = ""
    unavailable: str = ""


@dataclass
class TableRow:
    """One row of a table: a method with its options.

    tiers: further overrides by tier. measure: further overrides of a measurement, by its name.
    published: the row's name in `published.json`, in `published_table` if not in the table's.
    cells: where a column's published value is, as
        [row, column], instead of where the table's `published_row` and `published_column` say.
    starts_from: label of an earlier row, whose finished run of the same variant and seed gives the
        first weights. against: label of the row that it is compared with, instead of the first
        one. stage: it is there to start from: trained, but neither measured nor shown.
    not_run: why it stands there with the paper's values alone, if so. arm: of the block that a
        tier shows, or `<block>/<arm>` of the one that it goes on from; a row that has nothing else
        is there in such tiers only.
    """

    label: str
    overrides: list[str] = field(default_factory=list)
    tiers: dict[str, list[str]] = field(default_factory=dict)
    measure: dict[str, list[str]] = field(default_factory=dict)
    published: str | None = None
    published_table: str | None = None
    cells: dict[str, list[str]] = field(default_factory=dict)
    starts_from: str | None = None
    against: str | None = None
    stage: bool = False
    not_run: str = ""
    arm: str = ""


@dataclass
class Column:
    """One column of a table: a quantity of a run.

    value: dotted path into `result.json`, `tail.<name>` for the mean of that entry of
        `metrics.jsonl` over the last tenth of the steps, or `<measure>.<metric>` and
        `<measure>.<task>.<metric>` for a measurement's metrics, `<measure>.mean` for the mean of
        its tasks' scores; several with commas for their mean; `exp.<value>` for the exponential
        of one. None cannot be measured. tiers: another value in some tiers, or None.
    show: over the seeds, `mean_std`, `mean`, `interval` (the mean with its 95 % interval) or `sum`;
        against the first row, or the row's `against`, at the same seeds, `paired` (mean difference
        with its 95 % interval), `ratio` (mean quotient) or `speedup` (mean of its inverse).
    format: Python format of a number. published: the column's name in `published.json`; then the
        published value and our difference to it are shown beside ours. scale: factor of what is
        shown, 100 for a share in percent. unit: printed, where no published value has one.
    """

    label: str
    value: str | None = None
    show: str = "mean_std"
    format: str = ".3f"
    published: str | None = None
    scale: float = 1.0
    unit: str = ""
    tiers: dict[str, str | None] = field(default_factory=dict)

    def value_in(self, tier: str) -> str | None:
        """The column's `value` in a tier."""
        return self.tiers.get(tier, self.value)


@dataclass
class Figure:
    """The figure of a table. kind: `curves` (loss and flip rate against the step), `blocks` (the
    flip rate of each block, of runs with `method.flips_by_layer`), `scatter` (two quantities of
    the steps against each other, row by row), `bars` or `lines` (the values of `columns`, the
    paper's beside ours, row by row; `lines` for ordered rows), `none`.

    columns: labels; empty = those with a published name. quantities: panels of `curves`; of
    `scatter` x and y. distribution: a further panel of `scatter` shows that of y.
    """

    kind: str = "curves"
    columns: list[str] = field(default_factory=list)
    quantities: list[str] = field(default_factory=lambda: ["val_loss", "flip_rate"])
    distribution: bool = False


@dataclass
class Table:
    """A table of a paper or of this project. Its first row is the dense baseline, except for
    benchmarks and searches for decay factors, which measure their baseline themselves.

    paper, number: whose table it is, None for our own; `figure 7` is given as `figure7`, an
        appendix table as `B2`. driver: what a row is run by. published_table: its name in
        `published.json`. published_setting: what the paper did; printed. published_row,
        published_column: names of a cell there, with `{row}`, `{variant}` and `{column}` for the
        published names of these. notes: printed below the settings.
    """

    name: str
    title: str
    tiers: dict[str, Tier]
    rows: list[TableRow]
    columns: list[Column]
    variants: list[Variant] = field(default_factory=list)
    driver: str = "pretrain"
    paper: str | None = None
    number: str | None = None
    published_table: str | None = None
    published_setting: str = ""
    published_row: str = "{row}"
    published_column: str = "{column}"
    notes: list[str] = field(default_factory=list)
    figure: Figure = field(default_factory=Figure)

    def __post_init__(self) -> None:
        labels = [row.label for row in self.rows]
        for what, names in (
            ("row", labels),
            ("column", [column.label for column in self.columns]),
            ("variant", [variant.label for variant in self.variants]),
        ):
            if len(set(names)) < len(names):
                raise ValueError(f"two {what}s have the same label: {names}")
        _check("driver", self.driver, (*TRAINING, BENCH, SEARCH))
        _check("figure.kind", self.figure.kind, FIGURES)
        if not self.rows:
            raise ValueError("there are no rows")
        if self.has_baseline and "method=dense" not in self.rows[0].overrides:
            raise ValueError("the first row must be the dense baseline (method=dense)")
        for position, row in enumerate(self.rows):
            if row.starts_from is not None and row.starts_from not in labels[:position]:
                raise ValueError(f"{row.label!r} starts from {row.starts_from!r}, no earlier row")
        for name, tier in self.tiers.items():
            self._check_tier(name, tier)
        for column in self.columns:
            _check(f"{column.label!r}: show", column.show, SHOWN_AS)
        if self.figure.kind == "scatter" and len(self.figure.quantities) != 2:
            raise ValueError(f"figure.quantities={self.figure.quantities}; a scatter has x and y")
        for label in self.figure.columns:
            _check("figure.columns", label, tuple(column.label for column in self.columns))

    def _check_tier(self, name: str, tier: Tier) -> None:
        _check("tier", name, TIERS)
        if tier.block and (tier.overrides or tier.measure):
            raise ValueError(f"tier {name} shows block {tier.block}: it runs nothing of its own")
        distinct = len(set(tier.seeds))
        none = distinct == 0 and not tier.block
        if not tier.unavailable and (none or distinct < len(tier.seeds)):
            raise ValueError(f"tier {name} needs seeds, each once, got {tier.seeds}")
        for label in tier.rows:
            _check(f"tier {name}: rows", label, tuple(row.label for row in self.rows))
        shown = [row.label for row in self.rows if not row.stage]
        if self.has_baseline and tier.rows and shown[0] not in tier.rows:
            raise ValueError(f"tier {name}: rows must have the baseline, {shown[0]!r}")
        there = tuple(row.label for row in self.rows_of(name) if not row.stage)
        for row in self.rows_of(name):
            if row.against is not None:
                _check(f"tier {name}: {row.label!r}: against", row.against, there)
        for part, measure in tier.measure.items():
            _check(f"tier {name}: {part}: driver", measure.driver, MEASURING)
        for row in self.rows:
            for part in row.measure:
                known = [p for t in self.tiers.values() for p in t.measure]
                _check(f"{row.label!r}: measure", part, tuple(known))
            for other in row.tiers:
                _check(f"{row.label!r}: tiers", other, tuple(self.tiers))

    @property
    def has_baseline(self) -> bool:
        """True if its rows are trainings, whose first is the dense baseline."""
        return self.driver in TRAINING

    @property
    def command(self) -> str:
        """The word of the command line that asks for it: `table<number>`, `figure<number>` or its
        own name."""
        if self.number is None:
            return self.name
        return self.number if self.number.startswith("figure") else f"table{self.number}"

    @property
    def arms(self) -> dict[str, str]:
        """The arm that trains the same on a small model, as `<block>/<arm>`, by row; of tiers that
        show a block."""
        shown = [
            (tier.block, self.rows_of(name)) for name, tier in self.tiers.items() if tier.block
        ]
        return {
            row.label: f"{block}/{row.arm}"
            for block, rows in shown
            for row in rows
            if row.arm and "/" not in row.arm
        }

    def rows_of(self, tier: str) -> list[TableRow]:
        """The rows of a tier, stages included."""
        if self.tiers[tier].block:
            return [row for row in self.rows if row.arm or row.not_run]
        chosen = self.tiers[tier].rows
        own = [row for row in self.rows if row.overrides or not row.arm]
        return [row for row in own if not chosen or row.label in chosen]

    def trainings(self, tier: str) -> Iterator[tuple[Variant, TableRow, int]]:
        """Yields (variant, row, seed) of each training or benchmark of a tier."""
        for variant in self.variants_of(tier):
            for row in self.rows_of(tier):
                if not row.not_run and (not variant.rows or row.label in variant.rows):
                    yield from ((variant, row, seed) for seed in self.tiers[tier].seeds)

    def variants_of(self, tier: str) -> list[Variant]:
        """The variants of a tier; a single nameless one for a table without variants."""
        return self.tiers[tier].variants or self.variants or [Variant("")]


def _check(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value}; choose of {', '.join(choices)}")
