"""What a table is: `reproduce/tables/<name>.yaml`, read into dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.errors import UserError

TABLES = Path(__file__).parent / "tables"
TIERS = ("smoke", "mini", "full")
SHOWN_AS = ("mean_std", "mean", "sum", "paired", "ratio")


@dataclass
class Tier:
    """One budget at which a table can be made.

    setting: what is trained, and what of the paper's setting it replaces; printed.
    overrides: hydra overrides of every row. unavailable: why there is no such tier, if so.
    """

    setting: str = ""
    overrides: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    unavailable: str = ""


@dataclass
class Row:
    """One method or variant.

    published: the row's name in `published.json`. starts_from: label of an earlier row, whose
        finished run of the same seed gives the first weights.
    """

    label: str
    overrides: list[str]
    published: str | None = None
    starts_from: str | None = None


@dataclass
class Column:
    """One quantity of a run.

    value: dotted path into `result.json`, or `tail.<name>` for the mean of that entry of
        `metrics.jsonl` over the last tenth of the steps; None is a metric that cannot be measured.
    show: over the seeds, `mean_std`, `mean` or `sum`; against the first row at the same seeds,
        `paired` (mean difference with its 95 % interval) or `ratio` (mean quotient).
    format: Python format of a number. published: the column's name in `published.json`; then the
        published value and our difference to it are shown beside ours.
    """

    label: str
    value: str | None = None
    show: str = "mean_std"
    format: str = ".3f"
    published: str | None = None


@dataclass
class Table:
    """A table; its first row is the dense baseline.

    paper, number: whose table it is, None for our own. published_table: its name in
    `published.json`. published_setting: what the paper trained; printed.
    """

    name: str
    title: str
    tiers: dict[str, Tier]
    rows: list[Row]
    columns: list[Column]
    paper: str | None = None
    number: int | None = None
    published_table: str | None = None
    published_setting: str = ""

    def __post_init__(self) -> None:
        labels = [row.label for row in self.rows]
        if len(set(labels)) < len(labels):
            raise ValueError(f"two rows have the same label: {labels}")
        if not self.rows or "method=dense" not in self.rows[0].overrides:
            raise ValueError("the first row must be the dense baseline (method=dense)")
        for position, row in enumerate(self.rows):
            if row.starts_from is not None and row.starts_from not in labels[:position]:
                raise ValueError(f"{row.label!r} starts from {row.starts_from!r}, no earlier row")
        for name, tier in self.tiers.items():
            if name not in TIERS:
                raise ValueError(f"tier {name!r}; choose of {', '.join(TIERS)}")
            distinct = len(set(tier.seeds))
            if not tier.unavailable and (distinct == 0 or distinct < len(tier.seeds)):
                raise ValueError(f"tier {name} needs seeds, each once, got {tier.seeds}")
        for column in self.columns:
            if column.show not in SHOWN_AS:
                choices = ", ".join(SHOWN_AS)
                raise ValueError(f"{column.label!r}: show={column.show}; choose of {choices}")

    @property
    def command(self) -> str:
        """The word that asks for it: `table<number>`, or its own name."""
        return self.name if self.number is None else f"table{self.number}"


def read_table(path: Path) -> Table:
    """The table of one spec file.

    Raises:
        UserError: a key that does not exist or is missing, or a value of the wrong kind.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        values: Any = OmegaConf.merge(
            OmegaConf.structured(Table), {"name": path.stem}, OmegaConf.load(path)
        )
        table = OmegaConf.to_object(values)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: {error.full_key or 'the file'}: {reason}") from error
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
    assert isinstance(table, Table)
    return table


def read_tables(folder: Path = TABLES) -> list[Table]:
    """All tables of a folder, by name."""
    return [read_table(path) for path in sorted(folder.glob("*.yaml"))]
