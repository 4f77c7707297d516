"""Judges the papers' claims of quality by the kept runs of the blocks, with the rules of
`claims.yaml`.

The rules stand in claims.yaml, which is older than the runs that they judge. speed_claims.py judges
what is said of time and memory, verdicts.py tells all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from experiments.runs.stats import equivalence_p_value, holm, mean, p_value, paired_interval
from experiments.support.errors import UserError
from experiments.support.results import number
from reproduce.reading import build
from reproduce.records import Values

FILE = Path(__file__).with_name("claims.yaml")
EXPECTED = ("lower", "higher", "equal")
KINDS = ("kernel", "step", "projected")
CONFIRMED, REFUTED, INCONCLUSIVE = "confirmed", "refuted", "inconclusive"
NOT_TESTED = "not tested"


@dataclass(frozen=True)
class Margin:
    """The margin within which two arms count as equal: a `share` of the gap between the arms
    `lower` and `upper`."""

    share: float
    lower: str
    upper: str


@dataclass(frozen=True)
class Contrast:
    """A comparison of two arms of a block, `arm` and `against`, by `metric`, a dotted path into a
    record.

    margin_of: block whose gap gives the margin of `equal`, where it is not its own."""

    block: str
    arm: str
    against: str
    expect: str
    metric: str = "metrics.val_loss"
    margin_of: str | None = None

    def __post_init__(self) -> None:
        if self.expect not in EXPECTED:
            raise ValueError(f"expect={self.expect}; choose one of {', '.join(EXPECTED)}")


@dataclass(frozen=True)
class Speed:
    """A statement on time or memory: a column of `table` (in reproduce/measured) as factors of
    dense, over all rows whose labels end with `rows`. kind: see claims.yaml. than: the end of
    the labels of the rows that these should be faster than. less: it is memory, where less is
    better."""

    table: str
    column: str
    kind: str
    rows: str = ""
    than: str = ""
    less: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind}; choose one of {', '.join(KINDS)}")


@dataclass(frozen=True)
class Claim:
    """One claim, judged by contrasts of runs or by measurements of time and memory.

    number: what the paper gives. decides: what the contrasts need explained. settles: what would
    decide it, where it is not confirmed.
    """

    id: int
    paper: str
    says: str
    number: str
    contrasts: list[Contrast] = field(default_factory=list)
    decides: str = ""
    settles: str = ""
    measured: list[Speed] = field(default_factory=list)


@dataclass(frozen=True)
class Released:
    """A defect of released code that `arm` has and `against` has not. Its effect is shown but not
    judged, since no paper claims anything about it."""

    block: str
    arm: str
    against: str
    defect: str
    metric: str = "metrics.val_loss"


@dataclass(frozen=True)
class Claims:
    """All claims with the rules that they share. seeds: the least number of seeds for a test.
    noise: the share of a single speed measurement that stands for its interval."""

    margin: Margin
    level: float
    seeds: int
    noise: float
    claims: list[Claim]
    released: list[Released] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.seeds < 2:
            raise ValueError(f"seeds={self.seeds}; one pair has no spread, so it must be 2 or more")

    @property
    def blocks(self) -> set[str]:
        """Names of the blocks that claims are judged by, or defects of released code shown by."""
        contrasts = [c for claim in self.claims for c in claim.contrasts]
        margins = {c.margin_of for c in contrasts if c.margin_of is not None}
        return margins | {c.block for c in contrasts} | {r.block for r in self.released}


@dataclass(frozen=True)
class Judged:
    """A contrast with its result: mean paired difference, its 95 % interval, the number of seeds,
    the margin (if `equal` is expected), and Holm's p-values for what is expected and for the
    contrary. by_seed: the paired differences. why: the reason why it was not tested; difference
    and interval are preliminary then, and not there where two runs do not compare."""

    contrast: Contrast
    n: int
    effect: float = float("nan")
    interval: tuple[float, float] = (float("nan"), float("nan"))
    margin: float | None = None
    p_expected: float = float("nan")
    p_contrary: float = float("nan")
    verdict: str = NOT_TESTED
    why: str = ""
    by_seed: dict[int, float] = field(default_factory=dict)

    @property
    def more_seeds(self) -> bool:
        """True if it was tested and the rule asks for more seeds: its interval is wider than half
        of the effect, or of the margin if that is larger."""
        low, high = self.interval
        return not self.why and high - low > max(abs(self.effect), self.margin or 0.0) / 2


def read_claims(path: Path = FILE) -> Claims:
    """The claims and rules in a file.

    Raises:
        UserError: a key that does not exist, or a value of the wrong kind.
    """
    import yaml

    try:
        return build(Claims, yaml.safe_load(path.read_text(encoding="utf-8")), "the file")
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from error


def differences(values: Values, block: str, arm: str, against: str, metric: str) -> list[float]:
    """The differences of `metric`, arm minus against, at every seed that both have.

    Runs that go on from a trained model are compared if it is the same one: trained twice, its loss
    on a GPU differs by 0.01 nats (block pilot_b_decay), more than some arms do.
    """
    return list(_paired(values, block, arm, against, metric).values())


def _paired(values: Values, block: str, arm: str, against: str, metric: str) -> dict[int, float]:
    first, second = values.get((block, arm), {}), values.get((block, against), {})
    shared = sorted(first.keys() & second.keys())
    seeds = [s for s in shared if first[s].get("init") == second[s].get("init")]
    return {s: number(first[s], metric) - number(second[s], metric) for s in seeds}


def judge(claims: Claims, claim: Claim, values: Values) -> list[Judged]:
    """The contrasts of a claim with their verdicts, Holm's correction made over all of them."""
    return _with_verdicts([_compared(claims, c, values) for c in claim.contrasts], claims.level)


def _compared(claims: Claims, contrast: Contrast, values: Values) -> Judged:
    """A contrast tested by itself, still without a verdict; `why` tells if it cannot be tested."""
    c, rule = contrast, claims.margin
    by_seed = _paired(values, c.block, c.arm, c.against, c.metric)
    paired, margin = list(by_seed.values()), None
    other = _on_other_data(values, c)
    found = Judged(contrast, len(paired))
    if len(paired) > 1 and all(map(math.isfinite, paired)) and not other:
        interval = paired_interval(paired)
        found = replace(found, effect=mean(paired), interval=interval, by_seed=by_seed)
    if why := _untestable(claims, c.arm, c.against, c.metric, paired) or other:
        return replace(found, why=why)
    if c.expect == "equal":
        gaps = _paired(values, c.margin_of or c.block, rule.upper, rule.lower, c.metric)
        gap = [gaps[s] for s in by_seed if s in gaps]
        if why := _no_gap(claims, c.metric, gap):
            return replace(found, why=f"no margin: {why}")
        by_seed = {s: d for s, d in by_seed.items() if s in gaps}
        paired = list(by_seed.values())
        margin = rule.share * abs(mean(gap))
        # Seed by seed, because the gap has an error as the difference has.
        ends = [math.copysign(rule.share, mean(gap)) * one for one in gap]
        expected = equivalence_p_value(paired, ends)
        above = p_value([d - end for d, end in zip(paired, ends, strict=True)], side="above")
        below = p_value([d + end for d, end in zip(paired, ends, strict=True)], side="below")
        contrary = min(1.0, 2 * min(above, below))  # the difference may lie beyond either end
    else:
        both = p_value(paired)
        as_expected = (mean(paired) < 0) == (c.expect == "lower")
        expected, contrary = (both, 1.0) if as_expected else (1.0, both)
    return replace(
        Judged(contrast, len(paired), mean(paired), paired_interval(paired), margin),
        p_expected=expected,
        p_contrary=contrary,
        by_seed=by_seed,
    )


def _untestable(claims: Claims, arm: str, against: str, metric: str, paired: list[float]) -> str:
    """The reason why pairs cannot be tested, or "". A pair without a finite number is not left out:
    the rest would be the runs that went well."""
    if len(paired) < claims.seeds:
        return f"{len(paired)} of {claims.seeds} seeds of {arm} and {against}"
    if not all(map(math.isfinite, paired)):
        return f"{arm} or {against} has no finite {metric} at one of the seeds"
    return ""


def _no_gap(claims: Claims, metric: str, gap: list[float]) -> str:
    """The reason why a gap gives no margin, or "". A share of a gap that may be zero
    means nothing."""
    rule = claims.margin
    if why := _untestable(claims, rule.upper, rule.lower, metric, gap):
        return why
    low, high = paired_interval(gap, 1 - claims.level)
    return f"{rule.upper} is not told from {rule.lower}" if low <= 0 <= high else ""


def _on_other_data(values: Values, c: Contrast) -> str:
    """The reason that at some seeds the two runs had different data, or ""."""
    first, second = (values.get((c.block, arm), {}) for arm in (c.arm, c.against))
    common = sorted(first.keys() & second.keys())
    unequal = [s for s in common if first[s].get("corpus_hash") != second[s].get("corpus_hash")]
    seeds = ", ".join(map(str, unequal))
    return f"{c.arm} and {c.against} had other data at seeds {seeds}" if unequal else ""


def _with_verdicts(found: list[Judged], level: float) -> list[Judged]:
    tested = [j for j in found if not j.why]
    expected = iter(holm([j.p_expected for j in tested]))
    contrary = iter(holm([j.p_contrary for j in tested]))
    judged = []
    for j in found:
        if j.why:
            judged.append(j)
            continue
        p, q = next(expected), next(contrary)
        verdict = CONFIRMED if p < level else REFUTED if q < level else INCONCLUSIVE
        judged.append(replace(j, p_expected=p, p_contrary=q, verdict=verdict))
    return judged


def verdict(verdicts: Sequence[str]) -> str:
    """The verdict on a claim from those on its parts: refuted if one is, confirmed if all are."""
    if REFUTED in verdicts:
        return REFUTED
    if not verdicts or NOT_TESTED in verdicts:
        return NOT_TESTED
    return CONFIRMED if set(verdicts) == {CONFIRMED} else INCONCLUSIVE
