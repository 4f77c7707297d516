"""Draws the loss against mu, a ratio of flip rates, for the decay factors of claim 2.

mu is the flip rate with a decay factor over that of a dense run, both in the last quarter of the
warm-up (experiments.find_decay). The dense flip rate was measured only in the pilot,
evidence/pilot_decay.json. For a factor that the pilot did not try, mu is computed from that of the
recommended factor and the ratio of the flip rates in their records. The period between two choices
of masks is the same for both and cancels.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from experiments.runs.stats import mean, paired_interval, std
from experiments.support.checkpoint import csv_text, write_atomic, write_text
from experiments.support.results import number
from reproduce.blocks import EVIDENCE, read_record
from reproduce.records import Values

PILOT = EVIDENCE / "pilot_decay.json"
BLOCK, VARIANT, PREFIX = "a", "fst", "fst_alpha_"  # VARIANT has the recommended factor
LINES = ("dense", "half")  # the variants whose loss is drawn as a horizontal line


@dataclass(frozen=True)
class Factor:
    """One decay factor, alpha, and its variant.

    mu_from: where mu comes from, `pilot` or `records`. mu_records: mu computed from the records, in
    either case. feasible: True if FST calls this mu feasible. val_loss: the mean over n seeds, with
    its standard deviation std and its 95 % interval from low to high. by_seed: the loss of each.
    """

    variant: str
    alpha: float
    mu: float
    mu_from: str
    mu_records: float
    feasible: bool
    n: int
    val_loss: float
    std: float
    low: float
    high: float
    by_seed: dict[int, float]

    @property
    def row(self) -> dict[str, Any]:
        """Its row of the CSV file, with a column for each seed."""
        row = asdict(self)
        return row | {f"seed {seed}": loss for seed, loss in row.pop("by_seed").items()}


def factors(values: Values, pilot: Path = PILOT) -> list[Factor]:
    """The decay factors in ascending order of mu; [] without records of the recommended one."""
    variants = {
        a: r for (b, a), r in values.items() if b == BLOCK and (a == VARIANT or PREFIX in a)
    }
    if VARIANT not in variants:
        return []
    search = _search(pilot, next(iter(variants[VARIANT].values())))
    tried = {candidate["alpha"]: candidate["mu"] for candidate in search["candidates"]}
    low, high = search["feasible_mu"]
    anchor = tried[_option(next(iter(variants[VARIANT].values())), "method.alpha")]
    found = []
    for variant, records in variants.items():
        alpha = _option(next(iter(records.values())), "method.alpha")
        ratios = [
            _flips(records[s], search["window"]) / _flips(variants[VARIANT][s], search["window"])
            for s in sorted(records.keys() & variants[VARIANT].keys())
        ]
        by_records = anchor * mean(ratios) if ratios else math.nan
        mu = tried.get(alpha, by_records)
        source = "pilot" if alpha in tried else "records"
        by_seed = {s: number(records[s], "metrics.val_loss") for s in sorted(records)}
        losses = [*by_seed.values()]
        loss = mean(losses), std(losses), *paired_interval(losses), by_seed
        feasible = low <= mu <= high
        found.append(Factor(variant, alpha, mu, source, by_records, feasible, len(losses), *loss))
    return sorted(found, key=lambda f: f.mu)


def _search(pilot: Path, record: dict[str, Any]) -> dict[str, Any]:
    """The pilot's search with the learning rate of the record."""
    rate = _option(record, "train.learning_rate")
    searches = read_record(pilot, {"searches": dict})["searches"].values()
    wanted = {"method": "fst", "decay_on": "gradients", "learning_rate": rate}
    return next(s for s in searches if wanted.items() <= s.items())


def _option(record: dict[str, Any], key: str) -> float:
    return float(dict(o.split("=", 1) for o in record["overrides"])[key])


def _flips(record: dict[str, Any], window: list[int]) -> float:
    """The mean flip rate between two steps."""
    first, last = window
    inside = [rate for step, rate in record["curves"]["flip_rate"] if first <= step <= last]
    return mean(inside) if inside else math.nan


def write(values: Values, stem: Path, pilot: Path = PILOT) -> bool:
    """Write `<stem>.csv` and `<stem>.png`; return False if there are no records to show."""
    found = factors(values, pilot)
    if not found:
        return False
    lines = {}
    for variant in LINES:
        losses = [number(r, "metrics.val_loss") for r in values.get((BLOCK, variant), {}).values()]
        if losses and all(map(math.isfinite, losses)):
            lines[variant] = mean(losses)
    write_text(stem.with_suffix(".csv"), csv_text([factor.row for factor in found]))
    write_atomic(stem.with_suffix(".png"), lambda path: _draw(found, lines, path))
    return True


def draw(axes: Any, found: list[Factor], lines: dict[str, float]) -> None:
    """Draw the mean loss of each factor over its mu, with its 95 % interval and each seed beside
    it. lines: losses of other variants, drawn as horizontal lines."""
    from experiments.find_decay import FEASIBLE
    from experiments.runs.curves import COLOURS

    axes.axvspan(*FEASIBLE, color=COLOURS[3], alpha=0.15, label="mu that FST calls feasible")
    for place, (variant, loss) in enumerate(lines.items()):
        axes.axhline(loss, color=COLOURS[0], linestyle=("--", ":")[place], label=f"{variant}, mean")
    shown = [f for f in found if math.isfinite(f.val_loss) and math.isfinite(f.mu)]
    mus, losses = [f.mu for f in shown], [f.val_loss for f in shown]
    ends = [[f.val_loss - f.low for f in shown], [f.high - f.val_loss for f in shown]]
    whisker = "FST, mean and 95 % interval"
    axes.errorbar(mus, losses, yerr=ends, marker="o", color=COLOURS[6], capsize=3, label=whisker)
    beside = 0.015 * (max(mus, default=0.0) - min(mus, default=0.0))
    seeds = [(f.mu + beside, loss) for f in shown for loss in f.by_seed.values()]
    x, y = [at for at, _ in seeds], [loss for _, loss in seeds]
    axes.plot(x, y, ".", color=COLOURS[0], alpha=0.55, label="one seed")
    factor = axes.secondary_xaxis("top")
    factor.set_xticks(mus, [f"{f.alpha:g}" for f in shown], fontsize=8)
    factor.set_xlabel("decay factor", fontsize=9)
    axes.set_xlabel("mu: flip rate over that of dense training", fontsize=9)


def _draw(found: list[Factor], lines: dict[str, float], path: Path) -> None:
    from experiments.runs.curves import figure

    n = " to ".join(dict.fromkeys(str(f(x.n for x in found)) for f in (min, max)))
    title = f"Loss of FST by its decay factor (block {BLOCK}, {n} seeds)"
    panels = {"validation loss, nats": partial(draw, found=found, lines=lines)}
    figure(panels, title, path, width=5.0)
