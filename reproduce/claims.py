"""Judges the papers' claims on quality by the records of the blocks' runs.

The rules are in claims.yaml. speed_claims.py judges claims on time and memory, and verdicts.py
reports all verdicts.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

from experiments.runs.stats import (
    equivalence_p_value,
    excludes_zero,
    holm,
    mean,
    p_value,
    paired_interval,
)
from experiments.support.results import number
from reproduce.reading import build, errors_in, read_yaml
from reproduce.records import Values

FILE = Path(__file__).with_name("claims.yaml")
EXPECTED = ("lower", "higher", "equal")
KINDS = ("kernel", "step", "projected", "counted")
CONFIRMED, DIRECTION, INCONCLUSIVE = "confirmed", "direction only", "inconclusive"
REFUTED, NOT_REPRODUCED, NOT_TESTED = "refuted", "not reproduced", "not tested"
REGIME = "not in the paper's regime"  # why a contrast of such a claim is not tested
# A claim, or a statement on several rows, has the first of these that one of its parts has.
VERDICTS = (REFUTED, NOT_REPRODUCED, NOT_TESTED, INCONCLUSIVE, DIRECTION, CONFIRMED)


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
    compared, a dotted path into a record. margin_of: the block whose gap gives the margin, if it is
    not `block`. paper: the paper's values of the two, perplexities or accuracies. own_setting: the
    runs are in the paper's setting, or in one that it says its claim holds for. defect: of released
    code that `variant` has and `against` does not have; the effect is shown but not judged, because
    no paper claims anything about it.
    """

    block: str
    variant: str
    against: str
    expect: str = ""
    metric: str = "metrics.val_loss"
    margin_of: str | None = None
    paper: list[float] = field(default_factory=list)
    own_setting: bool = False
    defect: str = ""

    def __post_init__(self) -> None:
        if self.expect not in EXPECTED and not self.defect:
            raise ValueError(f"expect={self.expect}; choose one of {', '.join(EXPECTED)}")
        if len(self.paper) not in (0, 2):
            raise ValueError(f"paper={self.paper}; it takes two values, of {self.variant} first")

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
    """A statement on time or memory, judged by a column of a measured table.

    table, column: of reproduce/measured; the values are relative to dense. kind: what was timed,
    explained in claims.yaml. rows: how the labels of the judged rows end. than: how the labels of
    the rows end that these should be faster than, if the statement compares rows. less: the values
    are bytes, where less is better. left_out: rows that are shown and not judged, with the reason.
    own_setting: as of `Contrast`.
    """

    table: str
    column: str
    kind: str
    rows: str = ""
    than: str = ""
    less: bool = False
    left_out: dict[str, str] = field(default_factory=dict)
    own_setting: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind}; choose one of {', '.join(KINDS)}")


@dataclass(frozen=True)
class Claim:
    """One claim, judged by contrasts of runs or by measurements of time and memory.

    says: the claim in words; short: in a few. number: what the paper measured. regime: why the
    runs are not in the paper's regime, so that the claim is not tested whatever they show. note:
    what else has to be known of the verdict. settles: what would decide the claim.
    """

    id: int
    paper: str
    says: str
    number: str
    contrasts: list[Contrast] = field(default_factory=list)
    regime: str = ""
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
    """

    margin: Margin
    level: float
    seeds: int
    noise: float
    claims: list[Claim]
    released: list[Contrast] = field(default_factory=list)
    diverged: dict[str, str] = field(default_factory=dict)
    rates: dict[str, dict[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.seeds < 2:
            raise ValueError(f"seeds={self.seeds}; one pair has no spread, so it must be 2 or more")

    @property
    def blocks(self) -> set[str]:
        """Names of the blocks whose records judge a claim or show a defect of released code."""
        contrasts = [c for claim in self.claims for c in claim.contrasts]
        margins = {c.margin_of for c in contrasts if c.margin_of is not None}
        return margins | {c.block for c in contrasts} | {r.block for r in self.released}


@dataclass(frozen=True)
class Judged:
    """A contrast with its result.

    n: number of seeds. effect, interval: the mean paired difference and its 95 % interval. margin:
    up to which the variants are equal; None without one. equal: they are, by TOST. p_expected,
    p_contrary: p-values of the expected result and of the contrary, adjusted by Holm's method.
    by_seed: the paired differences. why: the reason why it was not tested; effect and interval are
    then preliminary, or nan if the runs cannot be compared. without: the result without the seeds
    `lost` of a run that diverged, if there was one.
    """

    contrast: Contrast
    n: int
    effect: float = float("nan")
    interval: tuple[float, float] = (float("nan"), float("nan"))
    margin: float | None = None
    equal: bool = False
    p_expected: float = float("nan")
    p_contrary: float = float("nan")
    verdict: str = NOT_TESTED
    why: str = ""
    by_seed: dict[int, float] = field(default_factory=dict)
    without: Judged | None = None
    lost: tuple[int, ...] = ()

    @property
    def more_seeds(self) -> bool:
        """True if it was tested and more seeds are needed by the rule: its interval is wider than
        half of the effect, or of the margin of an expected equality if that is larger."""
        low, high = self.interval
        margin = self.margin if self.contrast.expect == "equal" else None
        return not self.why and high - low > max(abs(self.effect), margin or 0.0) / 2


def read_claims(path: Path = FILE) -> Claims:
    """The claims and rules in a file.

    Raises:
        UserError: a key does not exist, or a value is of the wrong kind.
    """
    with errors_in(path):
        return build(Claims, read_yaml(path), "the file")


def differences(values: Values, block: str, variant: str, against: str, metric: str) -> list[float]:
    """The differences of `metric`, `variant` minus `against`, at every seed that both have.

    Runs that start from a trained model are compared only if it is the same model. A model that is
    trained twice on a GPU differs by 0.01 nats (block pilot_b_decay), which is more than the
    difference between some variants.
    """
    return list(_paired(values, block, variant, against, metric).values())


def _paired(
    values: Values, block: str, variant: str, against: str, metric: str
) -> dict[int, float]:
    first, second = values.get((block, variant), {}), values.get((block, against), {})
    shared = sorted(first.keys() & second.keys())
    seeds = [s for s in shared if first[s].get("init") == second[s].get("init")]
    return {s: number(first[s], metric) - number(second[s], metric) for s in seeds}


def judge(claims: Claims, claim: Claim, values: Values) -> list[Judged]:
    """The contrasts of a claim with their verdicts; p-values are corrected by Holm's method for
    their number. Those with a run that diverged have the result without it, too."""
    found = _judged(claims, claim, values)
    calm = dict(values)
    for c in claim.contrasts:
        for variant in (c.variant, c.against):
            calm[c.block, variant] = {
                seed: record
                for seed, record in calm.get((c.block, variant), {}).items()
                if f"{c.block} {variant} {seed}" not in claims.diverged
                and math.isfinite(number(record, c.metric))
            }
    again = _judged(replace(claims, seeds=max(2, claims.seeds - 1)), claim, calm)
    lost = [
        sorted({*_paired(values, c.block, c.variant, c.against, c.metric)} - {*other.by_seed})
        for c, other in zip(claim.contrasts, again, strict=True)
    ]
    return [
        replace(j, without=other, lost=tuple(seeds)) if 1 < other.n < j.n else j
        for j, other, seeds in zip(found, again, lost, strict=True)
    ]


def _judged(claims: Claims, claim: Claim, values: Values) -> list[Judged]:
    tested = [_tested(claims, c, values) for c in claim.contrasts]
    return _with_verdicts(tested, claims.level, claim.regime)


def _tested(claims: Claims, contrast: Contrast, values: Values) -> Judged:
    """A contrast with the p-values of its own test, still without a verdict, or with the reason
    why it cannot be tested."""
    c = contrast
    by_seed = _paired(values, c.block, c.variant, c.against, c.metric)
    paired = list(by_seed.values())
    other_data = _on_other_data(values, c)
    judged = Judged(c, len(paired))
    if len(paired) > 1 and all(map(math.isfinite, paired)) and not other_data:
        judged = _with_effect(judged, by_seed)
    if why := _untestable(claims, c.variant, c.against, c.metric, paired) or other_data:
        return replace(judged, why=why)
    equality = _tested_for_equality(claims, judged, values)
    if c.expect == "equal":
        return equality
    p = p_value(paired)
    as_expected = (judged.effect < 0) == (c.expect == "lower")
    expected, contrary = (p, 1.0) if as_expected else (1.0, p)
    judged = replace(judged, margin=equality.margin, equal=equality.equal)
    return replace(judged, p_expected=expected, p_contrary=contrary)


def _with_effect(judged: Judged, by_seed: dict[int, float]) -> Judged:
    paired = list(by_seed.values())
    return replace(
        judged,
        n=len(paired),
        effect=mean(paired),
        interval=paired_interval(paired),
        by_seed=by_seed,
    )


def _tested_for_equality(claims: Claims, judged: Judged, values: Values) -> Judged:
    """The contrast tested at the seeds that have both the difference and the gap of the margin."""
    c, rule = judged.contrast, claims.margin
    gaps = _paired(values, c.margin_of or c.block, rule.upper, rule.lower, c.metric)
    gap = [gaps[s] for s in judged.by_seed if s in gaps]
    if why := _no_gap(claims, c.metric, gap):
        return replace(judged, why=f"no margin: {why}")
    by_seed = {s: difference for s, difference in judged.by_seed.items() if s in gaps}
    paired = list(by_seed.values())
    # The ends of the margin seed by seed, because the gap has an error as the difference has.
    ends = [math.copysign(rule.share, mean(gap)) * one for one in gap]
    above = p_value([d - end for d, end in zip(paired, ends, strict=True)], side="above")
    below = p_value([d + end for d, end in zip(paired, ends, strict=True)], side="below")
    p = equivalence_p_value(paired, ends)
    return replace(
        _with_effect(judged, by_seed),
        margin=rule.share * abs(mean(gap)),
        equal=p < claims.level,
        p_expected=p,
        p_contrary=min(1.0, 2 * min(above, below)),  # the difference may lie beyond either end
    )


def _untestable(
    claims: Claims, variant: str, against: str, metric: str, paired: list[float]
) -> str:
    """The reason why pairs cannot be tested, or "". A pair without a finite number prevents the
    test: without it only the runs that went well would be left."""
    if len(paired) < claims.seeds:
        return f"{len(paired)} of {claims.seeds} seeds of {variant} and {against}"
    if not all(map(math.isfinite, paired)):
        return f"{variant} or {against} has no finite {metric} at one of the seeds"
    return ""


def _no_gap(claims: Claims, metric: str, gap: list[float]) -> str:
    """The reason why a gap gives no margin, or "": a share of a gap that may be zero means
    nothing."""
    rule = claims.margin
    if why := _untestable(claims, rule.upper, rule.lower, metric, gap):
        return why
    if excludes_zero(*paired_interval(gap, 1 - claims.level)):
        return ""
    return f"{rule.upper} does not differ significantly from {rule.lower}"


def _on_other_data(values: Values, c: Contrast) -> str:
    """The seeds at which the two runs had different data, as a reason in words, or ""."""
    first, second = (values.get((c.block, variant), {}) for variant in (c.variant, c.against))
    common = sorted(first.keys() & second.keys())
    unequal = [s for s in common if first[s].get("corpus_hash") != second[s].get("corpus_hash")]
    seeds = ", ".join(map(str, unequal))
    return f"{c.variant} and {c.against} had different data at seeds {seeds}" if unequal else ""


def _with_verdicts(contrasts: list[Judged], level: float, regime: str) -> list[Judged]:
    """The contrasts with their corrected p-values and verdicts."""
    tested = [j for j in contrasts if not j.why]
    expected = iter(holm([j.p_expected for j in tested]))
    contrary = iter(holm([j.p_contrary for j in tested]))
    judged = []
    for j in contrasts:
        if not j.why:
            p, q = next(expected), next(contrary)
            certain = 1 if p < level else -1 if q < level else 0
            j = replace(j, p_expected=p, p_contrary=q)
            j = replace(j, verdict=_verdict(j, certain)) if not regime else replace(j, why=REGIME)
        judged.append(j)
    return judged


def _verdict(j: Judged, certain: int) -> str:
    """The verdict on a contrast. certain: 1 if the expected result is, -1 if the contrary is."""
    c = j.contrast
    if c.expect == "equal":
        return by_size(j.interval, None, certain, c.own_setting)
    sign = -1 if c.expect == "lower" else 1
    low, high = sorted(sign * end for end in j.interval)
    half = None if c.published is None else sign * c.published / 2
    found = by_size((low, high), half, certain, c.own_setting)
    # What a paper calls a difference must not count as none.
    return DIRECTION if found == CONFIRMED and j.equal else found


def by_size(
    interval: tuple[float, float], half: float | None, certain: int, own_setting: bool
) -> str:
    """The verdict on a difference, positive in the paper's direction.

    Args:
        interval: of our difference.
        half: half of the paper's difference, or None if it gives none.
        certain: 1 if the sign is certainly the paper's, -1 if it is the opposite, else 0.
        own_setting: ours is the paper's own setting.
    """
    against = REFUTED if own_setting else NOT_REPRODUCED
    if certain < 0:
        return against
    if half is not None and interval[1] < half:
        return DIRECTION if certain else against
    return CONFIRMED if certain and (half is None or interval[0] >= half) else INCONCLUSIVE


def verdict(verdicts: Collection[str]) -> str:
    """The verdict on a claim from those on its parts: the first of `VERDICTS` that is among them,
    not tested without any."""
    return next((word for word in VERDICTS if word in verdicts), NOT_TESTED)
