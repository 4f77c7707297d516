"""Verdicts on the papers' claims, computed from the kept runs of the blocks by `claims.yaml`.

`python -m reproduce claims` prints them. The rules stand in claims.yaml, which is older than the
runs that they judge.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.errors import UserError
from reproduce.blocks import EVIDENCE
from reproduce.reading import build
from reproduce.stats import equivalence_p_value, holm, mean, p_value, paired_interval

FILE = Path(__file__).with_name("claims.yaml")
EXPECTED = ("lower", "higher", "equal")
CONFIRMED, REFUTED, INCONCLUSIVE = "confirmed", "refuted", "inconclusive"
NOT_TESTED = "not tested"


@dataclass(frozen=True)
class Margin:
    """share: of the gap between the arms `lower` and `upper`, that counts as no difference."""

    share: float
    lower: str
    upper: str


@dataclass(frozen=True)
class Contrast:
    """`arm` compared with `against` in `block`, by `metric`, a dotted path into a record."""

    block: str
    arm: str
    against: str
    expect: str
    metric: str = "metrics.val_loss"

    def __post_init__(self) -> None:
        if self.expect not in EXPECTED:
            raise ValueError(f"expect={self.expect}; choose one of {', '.join(EXPECTED)}")


@dataclass(frozen=True)
class Claim:
    """One claim. number: what the paper gives. decides: what the contrasts need explained. speed:
    it is about time or memory, and is judged by the speed tables, not by runs of a block."""

    id: int
    paper: str
    says: str
    number: str
    contrasts: list[Contrast] = field(default_factory=list)
    decides: str = ""
    speed: bool = False


@dataclass(frozen=True)
class Claims:
    """All claims with the rules that they share."""

    margin: Margin
    level: float
    seeds: int
    claims: list[Claim]


@dataclass(frozen=True)
class Judged:
    """A contrast with what came out: the mean paired difference, its 95 % interval, the number of
    seeds, the margin (of `equal`), Holm's p-values for what is expected and for its contrary."""

    contrast: Contrast
    n: int
    effect: float = float("nan")
    interval: tuple[float, float] = (float("nan"), float("nan"))
    margin: float | None = None
    p_expected: float = float("nan")
    p_contrary: float = float("nan")
    verdict: str = NOT_TESTED


Values = dict[tuple[str, str], dict[int, dict[str, Any]]]  # (block, arm) -> seed -> record


def read_claims(path: Path = FILE) -> Claims:
    """The claims and rules of a file.

    Raises:
        UserError: a key that does not exist, or a value of the wrong kind.
    """
    import yaml

    try:
        return build(Claims, yaml.safe_load(path.read_text(encoding="utf-8")), "the file")
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from error


def read_records(*folders: Path) -> Values:
    """All kept records, those of the first folder before the others'."""
    values: Values = {}
    for folder in folders:
        for path in sorted(folder.glob("*/*.json")):
            record = json.loads(path.read_text(encoding="utf-8"))
            arm = values.setdefault((record["block"], record["arm"]), {})
            arm.setdefault(record["seed"], record)
    return values


def value(record: dict[str, Any], metric: str) -> float:
    """The number at a dotted path."""
    found: Any = record
    for key in metric.split("."):
        found = found[key]
    return float(found)


def differences(values: Values, block: str, arm: str, against: str, metric: str) -> list[float]:
    """arm - against at every seed that both have."""
    first, second = values.get((block, arm), {}), values.get((block, against), {})
    seeds = sorted(first.keys() & second.keys())
    return [value(first[s], metric) - value(second[s], metric) for s in seeds]


def judge(claims: Claims, claim: Claim, values: Values) -> list[Judged]:
    """The contrasts of a claim with their verdicts; one with too few seeds is not tested."""
    found = []
    for contrast in claim.contrasts:
        c = contrast
        paired = differences(values, c.block, c.arm, c.against, c.metric)
        if len(paired) < claims.seeds:
            found.append(Judged(contrast, len(paired)))
            continue
        margin = None
        if c.expect == "equal":
            rule = claims.margin
            gaps = differences(values, c.block, rule.upper, rule.lower, c.metric)
            if len(gaps) < claims.seeds:
                found.append(Judged(contrast, len(paired)))
                continue
            margin = rule.share * abs(mean(gaps))
            expected = equivalence_p_value(paired, margin)
            outside = min(p_value(paired, margin, "above"), p_value(paired, -margin, "below"))
            contrary = min(1.0, 2 * outside)
        else:
            both = p_value(paired)
            as_expected = (mean(paired) < 0) == (c.expect == "lower")
            expected, contrary = (both, 1.0) if as_expected else (1.0, both)
        found.append(
            Judged(
                contrast, len(paired), mean(paired), paired_interval(paired), margin, expected,
                contrary,
            )
        )  # fmt: skip
    return _with_verdicts(found, claims.level)


def _with_verdicts(found: list[Judged], level: float) -> list[Judged]:
    tested = [j for j in found if j.p_expected == j.p_expected]  # not nan
    expected = iter(holm([j.p_expected for j in tested]))
    contrary = iter(holm([j.p_contrary for j in tested]))
    judged = []
    for j in found:
        if j.p_expected != j.p_expected:
            judged.append(j)
            continue
        p, q = next(expected), next(contrary)
        verdict = CONFIRMED if p < level else REFUTED if q < level else INCONCLUSIVE
        judged.append(
            Judged(j.contrast, j.n, j.effect, j.interval, j.margin, p, q, verdict),
        )
    return judged


def verdict(judged: list[Judged]) -> str:
    """Of a claim: refuted if one contrast is, confirmed if all are."""
    verdicts = [j.verdict for j in judged]
    if REFUTED in verdicts:
        return REFUTED
    if not verdicts or NOT_TESTED in verdicts:
        return NOT_TESTED
    return CONFIRMED if set(verdicts) == {CONFIRMED} else INCONCLUSIVE


def lines(claims: Claims, values: Values) -> list[str]:
    """The claims with their verdicts and contrasts, for a terminal."""
    text = []
    for claim in claims.claims:
        judged = judge(claims, claim, values)
        text.append(f"{claim.id}. [{verdict(judged)}] {claim.paper}: {claim.says}")
        text.append(f"   the paper: {claim.number}")
        for j in judged:
            c = j.contrast
            name = f"   {c.arm} - {c.against} ({c.metric.rpartition('.')[2]}, block {c.block})"
            if j.verdict == NOT_TESTED:
                text.append(f"{name}: not tested, {j.n} of {claims.seeds} seeds")
                continue
            low, high = j.interval
            margin = "" if j.margin is None else f" within {j.margin:.4f}"
            text.append(
                f"{name}: {j.effect:+.4f} [{low:+.4f}, {high:+.4f}], n = {j.n}, expected "
                f"{c.expect}{margin}, p = {j.p_expected:.2g}: {j.verdict}"
            )
        if claim.speed:
            text.append("   judged by the speed tables (reproduce/measured)")
    return text


def main(runs: Path) -> None:
    """Print the verdicts from the committed records and one's own."""
    for line in lines(read_claims(), read_records(EVIDENCE, runs / "evidence")):
        print(line)
