"""Computes the loss over mu, a ratio of flip rates, for several decay factors.

mu is the flip rate with a decay factor over that of a dense run, both in the last quarter of the
warm-up (experiments.find_decay). The dense flip rate was measured only in the pilot. For a factor
that the pilot did not try, mu is computed from that of the recommended factor and the ratio of the
flip rates in their records; the period between two choices of masks is the same for both and
cancels.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from experiments.runs.stats import mean, paired_interval, std
from experiments.support.results import number
from reproduce.execute.blocks import EVIDENCE, read_record
from reproduce.judge.claims import Curve
from reproduce.records import Values

Row = dict[str, Any]


def factors(curve: Curve | None, values: Values, folder: Path = EVIDENCE) -> list[Row]:
    """A row for each decay factor in ascending order of mu; [] without records of the recommended
    one. folder: where the pilot's file is.

    mu_from: where mu comes from, `pilot` or `records`. mu_records: mu computed from the records, in
    either case. feasible: True if FST calls this mu feasible. val_loss: the mean over n seeds, with
    its standard deviation std and its 95 % interval from low to high.
    """
    if curve is None or not (recommended := values.get((curve.block, curve.variant))):
        return []
    first = next(iter(recommended.values()))
    rate = {"learning_rate": _option(first, "train.learning_rate")}
    wanted = {"method": "fst", "decay_on": "gradients", **rate}
    searches = read_record(folder / curve.pilot, {"searches": dict})["searches"].values()
    search = next(s for s in searches if wanted.items() <= s.items())
    tried = {candidate["alpha"]: candidate["mu"] for candidate in search["candidates"]}
    least, most = search["feasible_mu"]
    rows = []
    for (block, variant), records in values.items():
        if block != curve.block or not (variant == curve.variant or curve.others in variant):
            continue
        alpha = _option(next(iter(records.values())), "method.alpha")
        ratios = [
            _flips(records[s], search["window"]) / _flips(recommended[s], search["window"])
            for s in sorted(records.keys() & recommended.keys())
        ]
        anchor = tried[_option(first, "method.alpha")]
        by_records = anchor * mean(ratios) if ratios else math.nan
        mu = tried.get(alpha, by_records)
        losses = {s: number(records[s], "metrics.val_loss") for s in sorted(records)}
        every = list(losses.values())
        low, high = paired_interval(every)
        row = {"variant": variant, "alpha": alpha, "mu": mu}
        row |= {"mu_from": "pilot" if alpha in tried else "records", "mu_records": by_records}
        row |= {"feasible": least <= mu <= most, "n": len(every), "val_loss": mean(every)}
        row |= {"std": std(every), "low": low, "high": high}
        rows.append(row | {f"seed {seed}": loss for seed, loss in losses.items()})
    return sorted(rows, key=lambda row: row["mu"])


def _option(record: dict[str, Any], key: str) -> float:
    return float(dict(o.split("=", 1) for o in record["overrides"])[key])


def _flips(record: dict[str, Any], window: list[int]) -> float:
    """The mean flip rate between two steps."""
    first, last = window
    inside = [rate for step, rate in record["curves"]["flip_rate"] if first <= step <= last]
    return mean(inside) if inside else math.nan
