"""Judges contrasts: an effect with its interval beside the paper's effect gives a verdict.

A contrast of runs has one effect, the mean difference of two variants over their seeds; one of
measurements a factor for each row of a table. Both are judged by the rules in claims.yaml.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from experiments.runs import stats
from experiments.support.errors import UserError
from experiments.support.results import number
from reproduce.judge.claims import Claim, Claims, Contrast, Speed
from reproduce.records import Values, model
from reproduce.specs.reading import MEASURED, read_rows
from reproduce.specs.table import TABLES, read_table

CONFIRMED, DIRECTION, INCONCLUSIVE = "confirmed", "direction only", "inconclusive"
REFUTED, NOT_REPRODUCED, NOT_TESTED = "refuted", "not reproduced", "not tested"
SHOWN = "shown, not judged"
# A claim, or a contrast of several rows, has the first of these that one of its parts has.
VERDICTS = (REFUTED, NOT_REPRODUCED, NOT_TESTED, INCONCLUSIVE, DIRECTION, CONFIRMED)


@dataclass(frozen=True, kw_only=True)
class Effect:
    """An effect, the mean with its 95 % interval, and the verdict on it."""

    n: int  # of seeds or repeats
    effect: float = math.nan
    low: float = math.nan
    high: float = math.nan
    published: float | None = None  # the paper's effect in the same unit, if it gives one
    p_expected: float = math.nan  # of the expected result, adjusted by Holm's method
    p_contrary: float = math.nan
    verdict: str = NOT_TESTED
    why: str = ""  # it was not tested; the effect is then preliminary, or nan
    nothing: ClassVar[float] = 0.0  # the effect where there is none

    @property
    def share(self) -> float | None:
        """Our effect as a fraction of the paper's, if it gives one."""
        if self.published in (None, self.nothing):
            return None
        return (self.effect - self.nothing) / (self.published - self.nothing)


E = TypeVar("E", bound=Effect)


@dataclass(frozen=True, kw_only=True)
class Judged(Effect):
    """The effect of a contrast of runs."""

    rule: Contrast
    margin: float | None = None  # the difference up to which the variants are equal
    equal: bool = False  # they are, by TOST
    by_seed: dict[int, float] = field(default_factory=dict)  # the paired differences
    without: Judged | None = None  # the result without the seeds `lost` of a run that diverged
    lost: tuple[int, ...] = ()
    place: str = ""  # the model, for which the verdict holds

    @property
    def where(self) -> str:
        """The place, if the verdict is restricted to it."""
        return self.place if self.verdict == NOT_REPRODUCED else ""

    @property
    def more_seeds(self) -> bool:
        """True if it was tested and more seeds are needed by the rule: its interval is wider than
        half of the effect, or of the margin of an expected equality if that is larger."""
        margin = self.margin if self.rule.expect == "equal" else None
        return not self.why and self.high - self.low > max(abs(self.effect), margin or 0.0) / 2


@dataclass(frozen=True, kw_only=True)
class Row(Effect):
    """The effect of a row of a measured table: a factor over dense or over another row."""

    label: str
    nothing: ClassVar[float] = 1.0

    @property
    def to_paper(self) -> float | None:
        """Our factor over the paper's."""
        return self.effect / self.published if self.published else None


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A contrast of measurements with its rows."""

    rule: Speed
    name: str  # of the table
    verdict: str = NOT_TESTED
    lines: list[Row] = field(default_factory=list)
    device: str = ""
    code: str = ""  # its revision
    why: str = ""  # it was not tested

    @property
    def where(self) -> str:
        """The device, if the verdict is restricted to it."""
        return f"on {self.device.partition(',')[0]}" if self.verdict == NOT_REPRODUCED else ""


def verdict(verdicts: Collection[str]) -> str:
    """The first of `VERDICTS` that is among those on a claim's parts; not tested without any."""
    return next((word for word in VERDICTS if word in verdicts), NOT_TESTED)


def by_size(interval: Sequence[float], half: float | None, certain: int, own_setting: bool) -> str:
    """The verdict on an effect, positive in the paper's direction. interval: of our effect. half:
    half of the paper's effect, or None if it gives none. certain: 1 if the sign is certainly the
    paper's, -1 if it is the opposite, else 0. own_setting: ours is the paper's own setting."""
    low, high = sorted(interval)
    against = REFUTED if own_setting else NOT_REPRODUCED
    if certain < 0:
        return against
    if half is not None and high < half:
        return DIRECTION if certain else against
    return CONFIRMED if certain and (half is None or low >= half) else INCONCLUSIVE


def _adjusted(effects: list[E], level: float) -> list[tuple[E, int]]:
    """The effects with adjusted p-values, each with the certainty of its sign (`by_size`)."""
    tested = [e for e in effects if not e.why]
    expected = iter(stats.holm([e.p_expected for e in tested]))
    contrary = iter(stats.holm([e.p_contrary for e in tested]))
    found = []
    for e in effects:
        if not e.why:
            e = replace(e, p_expected=next(expected), p_contrary=next(contrary))
        found.append((e, (e.p_expected < level) - (e.p_contrary < level)))
    return found


def _with_p(effect: E, expected: bool, p: float) -> E:
    """The effect with the p-value of its sign, expected or not."""
    return replace(effect, p_expected=p if expected else 1.0, p_contrary=1.0 if expected else p)


def differences(values: Values, block: str, variant: str, against: str, metric: str) -> list[float]:
    """The differences of `metric`, `variant` minus `against`, at every seed that both have.

    Runs that start from a trained model are compared only if it is the same one: trained twice on a
    GPU it differs by 0.01 nats (block pilot_b_decay), more than some variants do.
    """
    return [*by_seed(values, Contrast(block, variant, against, "lower", metric)).values()]


def pairs(values: Values, c: Contrast) -> dict[int, tuple[Any, Any]]:
    """The records of the two variants of a contrast at the seeds that both have."""
    first, second = (values.get((c.block, variant), {}) for variant in (c.variant, c.against))
    return {s: (first[s], second[s]) for s in sorted(first.keys() & second.keys())}


def by_seed(values: Values, c: Contrast) -> dict[int, float]:
    """The paired differences of a contrast by seed, as in `differences`."""
    return {
        s: number(first, c.metric) - number(second, c.metric)
        for s, (first, second) in pairs(values, c).items()
        if first.get("init") == second.get("init")
    }


def judge(claims: Claims, claim: Claim, values: Values) -> list[Judged]:
    """The contrasts of a claim with their verdicts; p-values are corrected by Holm's method for
    their number. Those with a run that diverged have the result without it, too."""
    found, calm = _judged(claims, claim, values), dict(values)
    for c in claim.contrasts:
        for variant in (c.variant, c.against):
            calm[c.block, variant] = {
                seed: record
                for seed, record in calm.get((c.block, variant), {}).items()
                if f"{c.block} {variant} {seed}" not in claims.diverged
                and math.isfinite(number(record, c.metric))
            }
    again = _judged(replace(claims, seeds=max(2, claims.seeds - 1)), claim, calm)
    for place, (j, other) in enumerate(zip(found, again, strict=True)):
        if 1 < other.n < j.n:
            lost = tuple(sorted(by_seed(values, j.rule).keys() - other.by_seed.keys()))
            found[place] = replace(j, without=other, lost=lost)
    return found


def _judged(claims: Claims, claim: Claim, values: Values) -> list[Judged]:
    tested = _adjusted([_tested(claims, c, values) for c in claim.contrasts], claims.level)
    return [j if j.why else replace(j, verdict=_verdict(j, certain)) for j, certain in tested]


def _verdict(j: Judged, certain: int) -> str:
    if j.rule.expect == "equal":
        return by_size((j.low, j.high), None, certain, j.rule.own_setting)
    sign = -1 if j.rule.expect == "lower" else 1
    half = None if j.published is None else sign * j.published / 2
    found = by_size((sign * j.low, sign * j.high), half, certain, j.rule.own_setting)
    # What a paper calls a difference must not count as none.
    return DIRECTION if found == CONFIRMED and j.equal else found


def _tested(claims: Claims, c: Contrast, values: Values) -> Judged:
    """A contrast with its own p-values, without a verdict, or with why it is not tested."""
    found = by_seed(values, c)
    paired = list(found.values())
    place = f"at {model(values.get((c.block, c.variant), {}).values())}"
    judged = Judged(rule=c, n=len(paired), published=c.published, place=place)
    both = pairs(values, c).items()
    unequal = [str(s) for s, two in both if len({r.get("corpus_hash") for r in two}) > 1]
    if len(paired) > 1 and all(map(math.isfinite, paired)) and not unequal:
        judged = _with_effect(judged, found)
    if why := _untestable(claims, c, paired):
        return replace(judged, why=why)
    if unequal:
        had = f"{c.variant} and {c.against} had different data at seeds {', '.join(unequal)}"
        return replace(judged, why=had)
    equality = _tested_for_equality(claims, judged, values)
    if c.expect == "equal":
        return equality
    judged = replace(judged, margin=equality.margin, equal=equality.equal)
    return _with_p(judged, (judged.effect < 0) == (c.expect == "lower"), stats.p_value(paired))


def _with_effect(judged: Judged, found: dict[int, float]) -> Judged:
    paired = list(found.values())
    (low, high), effect = stats.paired_interval(paired), stats.mean(paired)
    return replace(judged, n=len(paired), effect=effect, low=low, high=high, by_seed=found)


def _tested_for_equality(claims: Claims, judged: Judged, values: Values) -> Judged:
    """The contrast tested at the seeds that have both the difference and the gap of the margin."""
    c, rule = judged.rule, claims.margin
    half = replace(c, variant=rule.upper, against=rule.lower)
    if c.margin_of is not None:
        half = replace(half, block=c.margin_of, metric="metrics.val_loss")
    gaps = by_seed(values, half)
    both = {s: difference for s, difference in judged.by_seed.items() if s in gaps}
    paired, gap = list(both.values()), [gaps[s] for s in both]
    why = _untestable(claims, half, gap)
    if not why and not stats.excludes_zero(*stats.paired_interval(gap, 1 - claims.level)):
        why = f"{rule.upper} does not differ significantly from {rule.lower}"
    if why:  # a share of a gap that may be zero means nothing
        return replace(judged, why=f"no margin: {why}")
    # The ends of the margin seed by seed, because the gap has an error as the difference has.
    ends = [math.copysign(rule.share, stats.mean(gap)) * one for one in gap]
    above = stats.p_value([d - end for d, end in zip(paired, ends, strict=True)], side="above")
    below = stats.p_value([d + end for d, end in zip(paired, ends, strict=True)], side="below")
    p = stats.equivalence_p_value(paired, ends)
    return replace(
        _with_effect(judged, both),
        margin=rule.share * abs(stats.mean(gap)),
        equal=p < claims.level,
        p_expected=p,
        p_contrary=min(1.0, 2 * min(above, below)),  # the difference may lie beyond either end
    )


def _untestable(claims: Claims, c: Contrast, paired: list[float]) -> str:
    """The reason why pairs cannot be tested, or "". A pair without a finite number prevents the
    test: without it only the runs that went well would be left."""
    if len(paired) < claims.seeds:
        seeds = f"{len(paired)} of {claims.seeds} seeds of {c.variant} and {c.against}"
        return seeds if paired else f"{seeds} (python -m reproduce run {c.block})"
    if not all(map(math.isfinite, paired)):
        return f"{c.variant} or {c.against} has no finite {c.metric} at one of the seeds"
    return ""


def judge_speed(claims: Claims, speed: Speed, folder: Path = MEASURED) -> Measured:
    """A contrast of measurements with its verdict by the tables in `folder`."""
    if not (path := TABLES / f"{speed.table}.yaml").exists():
        raise UserError(f"claims.yaml: there is no table {speed.table} ({path})")
    table, stem = read_table(path), f"{speed.table}-full"
    if speed.column not in {c.label for c in table.columns}:
        raise UserError(f"claims.yaml: {speed.table} has no column {speed.column!r}")
    command = f"python -m reproduce {table.command} paper={table.paper} tier=full"
    found = Measured(rule=speed, name=table.title.partition(":")[0])
    if not (rows := read_rows(folder / f"{stem}.csv")):
        return replace(found, why=f"not measured ({command})")
    paper = _column(rows, f"{speed.column}: paper")
    ours = {label: {0: value} for label, value in _column(rows, f"{speed.column}: mean").items()}
    if runs := read_rows(folder / f"{stem}-runs.csv"):
        value = next((c.value for c in table.columns if c.label == speed.column), None) or ""
        ours = {}
        for row in (row for row in runs if row.get(value)):
            ours.setdefault(row["method"], {})[int(row["seed"])] = float(row[value])
    labels = [label for label in ours if label.endswith(speed.rows)]
    if not labels:
        raise UserError(f"{folder}: {speed.table} has no {speed.column!r} of rows {speed.rows!r}")
    lines, why = [_row(speed, label, paper, ours) for label in labels], ""
    fewest = min(line.n for line in lines)
    if speed.than and fewest < claims.seeds:
        why = f"{fewest} of {claims.seeds} repeats ({command})"
        lines = [replace(line, verdict=SHOWN if line.why else NOT_TESTED) for line in lines]
    else:
        lines = [_judged_row(claims, speed, *line) for line in _adjusted(lines, claims.level)]
    judged = [line.verdict for line in lines if line.verdict != SHOWN]
    facts = json.loads((folder / f"{stem}.json").read_text(encoding="utf-8"))["facts"]
    found = replace(found, device=facts["Device"], code=facts["Code"], lines=lines, why=why)
    return replace(found, verdict=verdict(judged) if judged else SHOWN)


def _row(
    speed: Speed, label: str, paper: dict[str, float], ours: dict[str, dict[int, float]]
) -> Row:
    """The factor of a row, still without a verdict: its mean over the repeats or, over another row,
    the geometric mean of the quotients of equal repeats."""
    repeats, published = ours[label], paper.get(label)
    row = Row(label=label, n=0, published=published, why=speed.left_out.get(label, ""))
    if not speed.than:
        # A count has no error, however often it was made.
        values = list(repeats.values())[: 1 if speed.kind == "counted" else None]
        low, high = stats.paired_interval(values)
        return replace(row, n=len(values), effect=stats.mean(values), low=low, high=high)
    other = label.removesuffix(speed.rows) + speed.than
    both = sorted(repeats.keys() & ours.get(other, {}).keys())
    logs = [math.log(repeats[seed] / ours[other][seed]) for seed in both]
    middle = stats.mean(logs) if logs else math.nan
    low, high = map(math.exp, stats.paired_interval(logs))
    quotient = paper[label] / paper[other] if {label, other} <= paper.keys() else None
    n, effect = len(both), math.exp(middle)
    row = replace(row, n=n, effect=effect, low=low, high=high, published=quotient)
    return _with_p(row, middle > 0, stats.p_value(logs))


def _judged_row(claims: Claims, speed: Speed, row: Row, certain: int) -> Row:
    if row.why or (row.published is None and not speed.than):
        return replace(row, verdict=SHOWN)
    noise = 0.0 if speed.kind == "counted" else claims.noise
    ends = (row.low, row.high) if row.n > 1 else [row.effect * (1 + n) for n in (-noise, noise)]
    gains = [_gain(speed, end) for end in ends]
    if not speed.than:
        certain = (min(gains) > 0) - (max(gains) < 0)
    half = None if row.published is None else _gain(speed, row.published) / 2
    return replace(row, verdict=by_size(gains, half, certain, speed.own_setting))


def _gain(speed: Speed, factor: float) -> float:
    """The gain of a factor: over dense its difference from 1, over another row its logarithm."""
    return math.log(factor) if speed.than else (1 - factor) if speed.less else factor - 1


def _column(rows: list[dict[str, str]], name: str) -> dict[str, float]:
    return {row["method"]: float(row[name]) for row in rows if row.get(name)}
