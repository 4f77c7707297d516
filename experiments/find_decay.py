"""Find feasible decay factors: `python -m experiments.find_decay 'candidates=[6e-5,2e-4]'`.

Follows FST (arXiv 2404.01847, section 4). If the decay factor is too small, the masks keep
oscillating; if it is too large, they freeze. Flip rates show this long before the loss does. The
warm-up of the training is run densely and once per candidate, from equal weights on equal batches.

    mu = flip rate with the candidate / flip rate of the dense run

where both are means over the last quarter of the warm-up. A candidate counts as feasible if
0.60 <= mu <= 0.95. In these runs masks are chosen in every step, whatever the method's own period,
because mu compares flips per step. The masks of the dense run are not applied; they are of the
method's own kind, because transposable masks flip more often under the same updates.

The runs and their files are those of `experiments.pretrain`: finished ones are not repeated,
interrupted ones continue. The comparison, `result.json`, is written to
`runs/<model>-<data>/find_decay/<method>-<hash>`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from experiments.config.compose import composed, plain
from experiments.config.driver import driver
from experiments.config.run import RunConfig, freeze, resolve
from experiments.support import results
from experiments.support.errors import UserError
from experiments.support.progress import say, silent
from experiments.support.results import read_metrics
from experiments.training import pretraining
from experiments.training.distributed import world
from methods import dense, fst, sr_ste
from methods.nn import base

FEASIBLE = (0.60, 0.95)


@dataclass(frozen=True)
class DecaySearch:
    """A search for decay factors for the training `config` among `candidates`, which ascend."""

    config: RunConfig
    candidates: tuple[float, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.config.method_options, sr_ste.Decay):
            raise UserError(
                f"method={self.config.method} has no masked decay; choose sr_ste, fst or bi_mask"
            )
        if self.config.train.ramp_batch is not None:
            raise UserError("train.ramp_batch: flip rates are compared at one batch size; set null")
        if self.config.train.warmup_steps < 4:
            raise UserError(
                f"train.warmup_steps={self.config.train.warmup_steps}; the flip rates are compared "
                "at the end of the warm-up, which must have 4 steps or more"
            )

    def with_command(self, line: str) -> DecaySearch:
        return replace(self, config=self.config.with_command(line))

    @property
    def window(self) -> range:
        """The steps over which flip rates are averaged: the last quarter of the warm-up."""
        steps = self.config.train.warmup_steps
        return range(steps - steps // 4, steps)

    def directory(self) -> Path:
        """`<runs>/<model>-<data>/find_decay/<method>-<hash of the runs>`."""
        folder = self.config.directory().parents[1] / "find_decay"
        return folder / f"{self.config.method}-{self.digest()[:8]}"

    def digest(self) -> str:
        """Hash of the runs."""
        runs = [self.training(alpha) for alpha in (None, *self.candidates)]
        return hashlib.sha256("".join(run.digest() for run in runs).encode()).hexdigest()[:16]

    def training(self, alpha: float | None) -> RunConfig:
        """The warm-up trained with this decay factor, sparse from the first step to the last. For
        None it is dense, and the flip rates are those of virtual masks of the method's kind."""
        options: Any = self.config.method_options
        method, steps = self.config.method, self.config.train.warmup_steps
        if isinstance(options, fst.Config):
            fraction = 1.0 if alpha is None else 0.0
            options = replace(options, alpha=alpha or 0.0, refresh_every=1, dense_fraction=fraction)
        elif alpha is None:
            common = {f.name: getattr(options, f.name) for f in dataclasses.fields(base.Config)}
            method, options = "dense", dense.Config(**common)
        else:
            options = replace(options, alpha=alpha)
        return replace(
            self.config,
            method=method,
            method_options=replace(options, total_steps=steps, measure_every=1),
            train=replace(self.config.train, steps=steps, cooldown_steps=0, log_every=1),
        )


def finished(search: DecaySearch) -> dict[str, Any] | None:
    """The result of exactly this search, if there is one."""
    run = resolve(search)
    return results.read_finished(run.directory, run.id)


def run(search: DecaySearch, report: Callable[[str], None] = say) -> dict[str, Any]:
    """Train what is missing, report the comparison (`compared`); return that of `result.json`."""
    impl = search.config.impl
    with world(impl.device, impl.offload) as here:  # one process group for all the runs
        report = report if here.is_main else silent
        this = here.broadcast_from_rank0(lambda: resolve(search))
        alphas, runs, entries = (None, *search.candidates), [], []
        for number, alpha in enumerate(alphas, 1):
            label = "dense" if alpha is None else f"alpha={alpha:g}"
            report(f"[{number}/{len(alphas)}] {label}")
            done = pretraining.run(search.training(alpha), report)
            runs.append(done)
            log = read_metrics(done.directory / "metrics.jsonl")
            rates = {r["step"]: r["flip_rate"] for r in log if "flip_rate" in r}
            entries.append(
                {
                    "flip_rate": statistics.fmean(rates[step] for step in search.window),
                    "val_loss": done.result["metrics"]["val_loss"],
                    "directory": str(done.directory),
                }
            )
        record = compared(search, entries)
        report(f"\n{markdown(record)}")
        result = {
            **{key: runs[0].result[key] for key in ("corpus", "backend", "world_size", "steps")},
            "config_hash": this.id,
            "config": search.config.as_dict(),
            "seed": search.config.seed,
            "tier": search.config.tier,
            **record,
        }
        written = here.broadcast_from_rank0(lambda: results.write_result(this.directory, result))
        report(f"written: {this.directory / results.FILE}")
        return written


def compared(search: DecaySearch, entries: list[dict[str, Any]]) -> dict[str, Any]:
    """The candidates and the metrics, which recommend the feasible candidate farthest from both
    bounds. entries: figures of the dense run and of each candidate's."""
    reference, *others = entries
    if not reference["flip_rate"]:
        raise UserError(
            "no mask flipped at the end of the warm-up of the dense run "
            f"({reference['directory']}); raise train.learning_rate or train.warmup_steps"
        )
    candidates = []
    for alpha, entry in zip(search.candidates, others, strict=True):
        mu = entry["flip_rate"] / reference["flip_rate"]
        feasible = FEASIBLE[0] <= mu <= FEASIBLE[1]
        candidates.append({"alpha": alpha, "mu": mu, "feasible": feasible, **entry})
    good = [entry for entry in candidates if entry["feasible"]]
    none = dict.fromkeys(("alpha", "mu"))
    best = min(good, key=lambda entry: abs(entry["mu"] - sum(FEASIBLE) / 2), default=none)
    return {
        "window": [search.window.start, search.window.stop],
        "dense": reference,
        "candidates": candidates,
        "metrics": {
            "alpha": best["alpha"],
            "mu": best["mu"],
            "least": min((entry["alpha"] for entry in good), default=None),
            "largest": max((entry["alpha"] for entry in good), default=None),
            "dense_flip_rate": reference["flip_rate"],
        },
    }


def markdown(record: dict[str, Any]) -> str:
    """A Markdown table of what `compared` found, and a sentence."""
    (first, stop), metrics = record["window"], record["metrics"]
    lines = [
        f"Flip rates per step, mean of steps {first} to {stop - 1}, the end of the warm-up; "
        f"feasible: {FEASIBLE[0]:.2f} <= mu <= {FEASIBLE[1]:.2f}.",
        "",
        "| alpha | flip rate | mu | feasible | validation loss |",
        "|---|---|---|---|---|",
    ]
    named = [("dense", "", {"mu": 1.0, **record["dense"]})]
    named += [(f"{e['alpha']:g}", ["no", "yes"][e["feasible"]], e) for e in record["candidates"]]
    lines += [
        f"| {name} | {e['flip_rate']:.2e} | {e['mu']:.3f} | {mark} | {e['val_loss']:.4f} |"
        for name, mark, e in named
    ]
    advice = "No candidate is feasible: try larger ones where mu is above, smaller where below."
    if metrics["alpha"] is not None:
        chosen = f"alpha={metrics['alpha']:g} (mu={metrics['mu']:.2f})"
        advice = f"Recommended: {chosen}, farthest from both bounds."
    return "\n".join([*lines, "", advice])


def freeze_search(composed: Any) -> DecaySearch:
    """The `DecaySearch` of a composed `find_decay.yaml`."""
    config, values = freeze(composed), plain(composed, "candidates")["candidates"]
    if not isinstance(values, list) or not all(
        isinstance(v, int | float) and 0 <= v < math.inf for v in values or [None]
    ):
        raise UserError(f"candidates={values}; it must be a list of numbers, like [6e-5,2e-4]")
    return DecaySearch(config, tuple(sorted({*map(float, values)})))


load = partial(composed, "find_decay", freeze_search)
main = driver("find_decay", freeze_search)(run)


if __name__ == "__main__":
    main()
