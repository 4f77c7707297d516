"""Reads the papers' claims and the rules for a verdict from claims.yaml."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from experiments.support.typed import typed
from reproduce.specs.reading import errors_in, read_yaml

FILE = Path(__file__).parents[1] / "specs" / "claims.yaml"


@dataclass(frozen=True)
class Margin:
    """The largest difference that counts as none: a `share` of the gap between the variants `lower`
    and `upper`."""

    share: float
    lower: str
    upper: str


@dataclass(frozen=True)
class Contrast:
    """A comparison of two variants of a block: `variant` minus `against`."""

    block: str
    variant: str
    against: str
    # The expected sign, or `equal` if the difference should lie within the margin. "" for a defect.
    expect: Literal["lower", "higher", "equal", ""] = ""
    metric: str = "metrics.val_loss"  # what is compared, a dotted path into a record
    margin_of: str | None = None  # the block whose gap in loss gives the margin, if not `block`
    # The paper's values of the two, perplexities or accuracies.
    paper: list[float] = field(default_factory=list)
    # The runs are in the paper's setting, or in one that it says its claim holds for.
    own_setting: bool = False
    # The defect of released code that `variant` has and `against` does not have; the effect is
    # shown but not judged, because no paper claims anything about it.
    defect: str = ""

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
    The values are relative to dense."""

    table: str  # of reproduce/measured
    column: str
    kind: Literal["kernel", "step", "projected", "counted"]  # what was timed; see claims.yaml
    rows: str = ""  # how the labels of the judged rows end
    than: str = ""  # how those of the rows end that these should be faster than, instead of dense
    less: bool = False  # the values are bytes, where less is better
    # Rows that are shown and not judged, with the reason.
    left_out: dict[str, str] = field(default_factory=dict)
    own_setting: bool = False  # as of `Contrast`


@dataclass(frozen=True)
class Claim:
    """One claim, judged by contrasts of runs or of measured times and bytes."""

    id: int
    paper: str
    says: str  # the claim in words
    number: str  # what the paper measured
    contrasts: list[Contrast] = field(default_factory=list)
    # Those that join the others once their runs are complete.
    planned: list[Contrast] = field(default_factory=list)
    note: str = ""  # what else has to be known of the verdict
    settles: str = ""  # what would decide the claim
    measured: list[Speed] = field(default_factory=list)
    short: str = ""  # the claim in a few words


@dataclass(frozen=True)
class Claims:
    """All claims with the rules that they share."""

    margin: Margin
    level: float  # of significance
    seeds: int  # the least number for a test
    # Half the width of the interval that a single speed measurement is given, as a share of it.
    noise: float
    claims: list[Claim]
    # Written before any of their blocks was run; neither judged nor shown.
    planned: list[Claim] = field(default_factory=list)
    released: list[Contrast] = field(default_factory=list)
    # What happened to runs that became unstable but ended with a number, by `BLOCK VARIANT SEED`.
    diverged: dict[str, str] = field(default_factory=dict)
    # What has to be known of the learning rate of a variant, by block and variant.
    rates: dict[str, dict[str, str]] = field(default_factory=dict)
    legend: str = ""  # what is printed below the verdicts
    papers: dict[str, str] = field(default_factory=dict)  # their names

    @property
    def contrasts(self) -> list[Contrast]:
        """The contrasts of all claims, and those that are planned."""
        every = [*self.claims, *self.planned]
        return [c for claim in every for c in (*claim.contrasts, *claim.planned)]

    @property
    def metrics(self) -> dict[str, str]:
        """The main metric of each block that judges a claim: that of its first contrast."""
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
    """The claims and rules in a file. Every claim has a number of its own, and its paper a name."""
    with errors_in(path):
        found: Claims = typed(Claims, "", read_yaml(path))
        ids = [claim.id for claim in found.claims]
        for claim in found.claims:
            if ids.count(claim.id) > 1:
                free = max(ids) + 1
                raise ValueError(f"two claims have the id {claim.id}; give one of them {free}")
            if claim.paper not in found.papers:
                name = f"claim {claim.id}: its paper {claim.paper} has no name"
                raise ValueError(f"{name}; add `{claim.paper}: NAME` to `papers:`")
        return found
