"""Reads the papers' claims and the rules for a verdict from claims.yaml."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from reproduce.specs.reading import build, errors_in, read_yaml

FILE = Path(__file__).parents[1] / "specs" / "claims.yaml"


@dataclass(frozen=True)
class Margin:
    """The difference up to which two variants count as equal: a `share` of the gap between the
    variants `lower` and `upper`."""

    share: float
    lower: str
    upper: str


@dataclass(frozen=True)
class Contrast:
    """A comparison of two variants of a block.

    variant, against: the difference is that of `variant` minus `against`. expect: its expected
    sign, `lower` or `higher`, or `equal` if it should lie within the margin. metric: what is
    compared, a dotted path into a record. margin_of: the block whose gap in loss gives the margin,
    if it is not `block`. paper: the paper's values of the two, perplexities or accuracies.
    own_setting: the runs are in the paper's setting, or in one that it says its claim holds for.
    defect: of released code that `variant` has and `against` does not have; the effect is shown but
    not judged, because no paper claims anything about it.
    """

    block: str
    variant: str
    against: str
    expect: Literal["lower", "higher", "equal", ""] = ""
    metric: str = "metrics.val_loss"
    margin_of: str | None = None
    paper: list[float] = field(default_factory=list)
    own_setting: bool = False
    defect: str = ""

    def __post_init__(self) -> None:
        if not (self.expect or self.defect):
            raise ValueError(f"{self.variant}, {self.against}: expect is missing")

    @property
    def published(self) -> float | None:
        """The paper's effect in our unit: nats, the logarithm of the ratio of two perplexities, or
        points of accuracy; None if it gives none."""
        if not self.paper:
            return None
        own, other = self.paper
        return math.log(own / other) if self.metric.endswith("val_loss") else own - other


@dataclass(frozen=True)
class Speed:
    """A contrast of the rows of a measured table with dense, or with other rows, in time or memory.

    table, column: of reproduce/measured; the values are relative to dense. kind: what was timed,
    explained in claims.yaml. rows: how the labels of the judged rows end. than: how the labels of
    the rows end that these should be faster than, if it compares rows. less: the values are bytes,
    where less is better. left_out: rows that are shown and not judged, with the reason.
    own_setting: as of `Contrast`.
    """

    table: str
    column: str
    kind: Literal["kernel", "step", "projected", "counted"]
    rows: str = ""
    than: str = ""
    less: bool = False
    left_out: dict[str, str] = field(default_factory=dict)
    own_setting: bool = False


@dataclass(frozen=True)
class Claim:
    """One claim, judged by contrasts of runs or of measured times and bytes.

    says: the claim in words; short: in a few. number: what the paper measured. planned: contrasts
    that join the others once their runs are complete. note: what else has to be known of the
    verdict. settles: what would decide the claim.
    """

    id: int
    paper: str
    says: str
    number: str
    contrasts: list[Contrast] = field(default_factory=list)
    planned: list[Contrast] = field(default_factory=list)
    note: str = ""
    settles: str = ""
    measured: list[Speed] = field(default_factory=list)
    short: str = ""


@dataclass(frozen=True)
class Claims:
    """All claims with the rules that they share.

    level: the significance level. seeds: the least number of seeds for a test. noise: half the
    width of the interval that a single speed measurement is given, as a share of its value.
    diverged: what happened to runs that became unstable but ended with a number, by `BLOCK VARIANT
    SEED`. rates: what has to be known of the learning rate of a variant, by block and variant.
    legend: what is printed below the verdicts. papers: the papers' names. planned: claims that were
        written before any of their blocks was run; they are neither judged nor shown.
    """

    margin: Margin
    level: float
    seeds: int
    noise: float
    claims: list[Claim]
    planned: list[Claim] = field(default_factory=list)
    released: list[Contrast] = field(default_factory=list)
    diverged: dict[str, str] = field(default_factory=dict)
    rates: dict[str, dict[str, str]] = field(default_factory=dict)
    legend: str = ""
    papers: dict[str, str] = field(default_factory=dict)

    @property
    def contrasts(self) -> list[Contrast]:
        """The contrasts of all claims, and those that are planned."""
        every = [*self.claims, *self.planned]
        return [c for claim in every for c in (*claim.contrasts, *claim.planned)]

    @property
    def metrics(self) -> dict[str, str]:
        """The main metric of each block that judges a claim, a loss or an accuracy: that of its
        first contrast."""
        found: dict[str, str] = {}
        for contrast in self.contrasts:
            found.setdefault(contrast.block, contrast.metric)
        return found

    @property
    def blocks(self) -> set[str]:
        """Names of the blocks whose records judge a claim or show a defect of released code."""
        every = [*self.released, *self.contrasts]
        return {c.block for c in every} | {c.margin_of for c in every if c.margin_of}


def read_claims(path: Path = FILE) -> Claims:
    """The claims and rules in a file."""
    with errors_in(path):
        return build(Claims, read_yaml(path), "the file")
