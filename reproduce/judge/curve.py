"""Draws the loss over mu, a ratio of flip rates, for several decay factors.

mu is the flip rate with a decay factor over that of a dense run, both in the last quarter of the
warm-up (experiments.find_decay). The dense flip rate was measured only in the pilot. For a factor
that the pilot did not try, mu is computed from that of the recommended factor and the ratio of the
flip rates in their records; the period between two choices of masks is the same for both and
cancels.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

from experiments.runs.stats import mean, paired_interval, std
from experiments.support.checkpoint import csv_text, write_atomic, write_text
from experiments.support.results import number
from reproduce.execute.blocks import EVIDENCE, read_record
from reproduce.judge.claims import Curve
from reproduce.records import Values

Row = dict[str, Any]


def factors(curve: Curve, values: Values, folder: Path = EVIDENCE) -> list[Row]:
    """A row for each decay factor in ascending order of mu; [] without records of the recommended
    one. folder: where the pilot's file is.

    mu_from: where mu comes from, `pilot` or `records`. mu_records: mu computed from the records, in
    either case. feasible: True if FST calls this mu feasible. val_loss: the mean over n seeds, with
    its standard deviation std and its 95 % interval from low to high.
    """
    recommended = values.get((curve.block, curve.variant), {})
    if not recommended:
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


def write(curve: Curve | None, values: Values, stem: Path, folder: Path = EVIDENCE) -> bool:
    """Write `<stem>.csv` and `<stem>.png`; return False if there are no records to show."""
    if curve is None or not (rows := factors(curve, values, folder)):
        return False
    from experiments.runs.curves import figure

    lines = {}
    for name in curve.lines:
        runs = values.get((curve.block, name), {}).values()
        lines[name] = [number(record, "metrics.val_loss") for record in runs]
    write_text(stem.with_suffix(".csv"), csv_text(rows))
    title = f"Loss of FST by its decay factor (block {curve.block})"
    panels = {"validation loss, nats": partial(draw, rows=rows, lines=lines)}
    write_atomic(stem.with_suffix(".png"), lambda path: figure(panels, title, path, width=5.0))
    return True


def draw(axes: Any, rows: list[Row], lines: dict[str, list[float]]) -> None:
    """Draw the mean loss of each factor over its mu, with its 95 % interval and every seed. lines:
    losses of other variants, whose means are horizontal lines."""
    from experiments.find_decay import FEASIBLE
    from experiments.runs.curves import COLOURS

    axes.axvspan(*FEASIBLE, color=COLOURS[3], alpha=0.15, label="mu that FST calls feasible")
    for style, (name, losses) in zip(("--", ":"), lines.items(), strict=False):
        if losses and all(map(math.isfinite, losses)):
            axes.axhline(mean(losses), color=COLOURS[0], linestyle=style, label=f"{name}, mean")
    shown = [row for row in rows if math.isfinite(row["val_loss"]) and math.isfinite(row["mu"])]
    mus, means = [row["mu"] for row in shown], [row["val_loss"] for row in shown]
    ends = [[row["val_loss"] - row["low"] for row in shown]]
    ends += [[row["high"] - row["val_loss"] for row in shown]]
    whisker = "FST, mean and 95 % interval"
    axes.errorbar(mus, means, yerr=ends, marker="o", color=COLOURS[6], capsize=3, label=whisker)
    seeds = [(row["mu"], row[key]) for row in shown for key in row if key.startswith("seed ")]
    axes.plot(*zip(*seeds, strict=True), ".", color=COLOURS[0], alpha=0.55, label="one seed")
    for row in shown:
        axes.annotate(f"{row['alpha']:g}", (row["mu"], row["high"]), fontsize=8)
    axes.set_xlabel("mu: flip rate over that of dense training; numbers are decay factors")
