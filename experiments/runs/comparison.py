"""Compares finished trainings, grouped into variants of runs of several seeds, with a baseline."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.config.yaml_files import as_typed
from experiments.runs.curves import Point, points
from experiments.runs.finished import RETIRED, FinishedRun
from experiments.runs.stats import decimals, difference_form, mean, paired_interval, std
from experiments.support import results
from experiments.support.errors import UserError

METRIC = "metrics.val_loss"
LONGEST = 80  # largest number of characters in a label; folder names are about as long at most
QUANTITIES = ("val_loss", "loss", "flip_rate")  # shown as curves
# Keys that do not distinguish variants: they do not change the result, or differ between seeds.
_APART = {"seed", "runs", "tier", "impl", "data.root", "data.source", "model.path", "method.seed"}
_APART |= {f"data.{key}" for key in RETIRED}


@dataclass(frozen=True)
class Variant:
    """Runs of one config by seed. config: the config's values by dotted key."""

    label: str
    config: dict[str, str]
    runs: dict[int, FinishedRun]

    @property
    def folder(self) -> str:
        """The name of the folder that holds its runs, seed by seed."""
        return next(iter(self.runs.values())).directory.parent.name

    def numbers(self, metric: str) -> dict[int, float]:
        """The values of `metric` by seed, in ascending order of the seeds."""
        return {seed: results.number(self.runs[seed].result, metric) for seed in sorted(self.runs)}


@dataclass(frozen=True)
class Summary:
    """A row of the comparison. difference: mean difference to the run `against` over the `pairs`
    seeds that both have on equal data and for equally many samples, with its 95 % interval from
    `low` to `high`; nan for the baseline itself and without pairs."""

    label: str
    n: int
    mean: float
    std: float
    pairs: int = 0
    difference: float = math.nan
    low: float = math.nan
    high: float = math.nan
    against: str = ""

    @classmethod
    def of(cls, label: str, own: list[float], paired: list[float], against: str = "") -> Summary:
        """The row of these values and of their differences to those of `against`."""
        row = cls(label, len(own), mean(own), std(own), against=against)
        if not paired:
            return row
        low, high = paired_interval(paired)
        return replace(row, pairs=len(paired), difference=mean(paired), low=low, high=high)


def find(paths: Iterable[Path]) -> tuple[list[FinishedRun], list[Path]]:
    """(finished runs at or below these paths, each once; directories of unfinished ones)."""
    asked = list(paths)
    directories: dict[Path, Path] = {}
    for path in asked:
        # The path itself, or the nearest level of folders below it that has runs. Results inside a
        # run, such as evaluations, do not count.
        for below in (".", "*", "*/*", "*/*/*"):
            places = (f"{below}/{name}" for name in ("config.json", results.FILE))
            if found := {file.parent for place in places for file in path.glob(place)}:
                directories |= {run.resolve(): run for run in sorted(found)}
                break
    runs, unfinished = [], []
    for directory in directories.values():
        try:
            result = results.read_training(directory, diverged=True)
            runs.append(FinishedRun(directory, result))
        except results.NoResult as reason:
            if reason.why not in ("missing", "unfinished"):
                raise
            unfinished.append(directory)
    if not runs:
        raise UserError(f"no finished run at {', '.join(map(str, asked)) or 'no path'}")
    return runs, unfinished


def variants(runs: Iterable[FinishedRun]) -> list[Variant]:
    """The runs grouped by config, in the order in which they were given."""
    found: dict[str, Variant] = {}
    for run in runs:
        config = flat(run.result)
        variant = found.setdefault(json.dumps(config), Variant("", config, {}))
        variant.runs.setdefault(run.seed, run)
    return _labelled(list(found.values()))


def flat(result: dict[str, Any]) -> dict[str, str]:
    """A run's config without seed and paths, flattened to dotted keys with values as typed on the
    command line, plus the hash of its data as `corpus`."""
    config = json.loads(json.dumps(result["config"]))  # turns tuples into lists, as in a file
    values: dict[str, str] = {}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key in value:
                add(f"{prefix}.{key}".strip("."), value[key])
        elif prefix != "method.total_steps" or value != config["train"]["steps"]:
            values[prefix] = as_typed(value)

    add("", {key: value for key, value in config.items() if key not in _APART})
    kept = {key: value for key, value in sorted(values.items()) if key not in _APART}
    if (own := config["method"].get("seed", config["seed"])) != config["seed"]:
        kept["method.seed"] = as_typed(own)
    return {**kept, "corpus": str(result.get("corpus_hash"))[:12]}


def _labelled(found: list[Variant]) -> list[Variant]:
    """The variants labelled by what differs in their method or in any; if long, by folder."""
    labelled, folders = [], [variant.folder for variant in found]
    for variant in found:
        method = variant.config["method.name"]
        own = differing([other for other in found if other.config["method.name"] == method])
        keys = sorted(variant.config.keys() & {*own, *_swept(found)})
        words = [method]
        for key in keys:
            # The name without its group, unless another group has a setting of this name.
            last = key.rpartition(".")[2]
            same = sum(other.rpartition(".")[2] == last for other in variant.config)
            name = last if last != "seed" and same == 1 else key.replace(".", " ")
            words.append(f"{name.replace('_', ' ')} {variant.config[key]}")
        label = ", ".join(words)
        if len(label) > LONGEST and folders.count(variant.folder) == 1:
            label = variant.folder
        labelled.append(replace(variant, label=label))
    return labelled


def _swept(found: list[Variant]) -> list[str]:
    """The config keys, apart from the method and its options, in which variants differ."""
    return [key for key in differing(found) if not key.startswith("method.")]


def differing(found: list[Variant]) -> list[str]:
    """The config keys, apart from the method's name, in which variants differ. An option that only
    some methods have counts only if its values differ among these."""
    methods = {variant.config["method.name"] for variant in found}
    keys = sorted({key for variant in found for key in variant.config} - {"method.name"})
    without = {None} if len(methods) > 1 else set()
    return [
        key for key in keys if len({variant.config.get(key) for variant in found} - without) > 1
    ]


def choose(found: list[Variant], baseline: str | None) -> list[Variant]:
    """The variants to compare with: that of this label or folder, or all of a method."""
    exact = [variant for variant in found if baseline in (variant.label, variant.folder)]
    if len(exact) == 1:
        return exact
    for method in (baseline,) if baseline else ("dense", found[0].config["method.name"]):
        if of_method := [variant for variant in found if variant.config["method.name"] == method]:
            return of_method
    choices = dict.fromkeys(variant.folder for variant in found)
    raise UserError(f"baseline={baseline} is none of the runs; choose one of {', '.join(choices)}")


def table(found: list[Variant], baselines: list[Variant], metric: str = METRIC) -> list[Summary]:
    """A row for each variant, the baselines first, compared with the baseline that has the same
    values of whatever else is swept, or with the best one."""
    values = [value for variant in found for value in variant.numbers(metric).values()]
    if all(map(math.isnan, values)):
        first = next(iter(found[0].runs.values()))
        known = ", ".join(f"metrics.{name}" for name in first.result["metrics"])
        raise UserError(f"metric={metric}: no run has it; there is {known}")
    swept, best = _swept(found), _best(baselines, metric)
    rows = []
    for variant in [*baselines, *(variant for variant in found if variant not in baselines)]:
        equal = [
            b for b in baselines if all(b.config.get(k) == variant.config.get(k) for k in swept)
        ]
        to_best = variant in baselines or len(equal) != 1
        rows.append(_summary(variant, best if to_best else equal[0], metric))
    return rows


def bests(found: list[Variant], baselines: list[Variant], metric: str = METRIC) -> list[Summary]:
    """A row for the best variant of each method, if any has several, beside the best baseline."""
    methods = dict.fromkeys(variant.config["method.name"] for variant in [*baselines, *found])
    if not 1 < len(methods) < len(found):
        return []
    rows = []
    for name in methods:
        best = _best(
            [variant for variant in found if variant.config["method.name"] == name], metric
        )
        row = _summary(best, _best(baselines, metric), metric)
        rows.append(replace(row, label=f"best {row.label}"))
    return rows


def _best(found: list[Variant], metric: str) -> Variant:
    """The variant with the best mean: the highest of a score, the lowest of anything else."""
    sign = -1 if re.search(r"top\d|acc|bleu|score|f1|mcc", metric.rpartition(".")[2]) else 1
    means = {variant.label: sign * mean([*variant.numbers(metric).values()]) for variant in found}
    return min(found, key=lambda variant: (math.isnan(means[variant.label]), means[variant.label]))


def _summary(variant: Variant, other: Variant, metric: str) -> Summary:
    """The row of a variant, compared with another one unless it is this one."""
    numbers, reference = variant.numbers(metric), other.numbers(metric)
    if variant is other:
        return Summary.of(variant.label, [*numbers.values()], [])
    paired = [
        numbers[s] - reference[s]
        for s in numbers
        if s in reference and _kind(variant.runs[s]) == _kind(other.runs[s])
    ]
    return Summary.of(variant.label, [*numbers.values()], paired, other.label)


def markdown(found: list[Variant], rows: list[Summary], metric: str = METRIC) -> str:
    """The rows as a Markdown table, preceded by a warning if runs differ in length or data, and
    followed by one if an interval rests on two pairs."""
    several = {row.against for row in rows if row.against}
    shown = f"minus {min(several)}" if len(several) == 1 else "compared with | difference"
    heads = [f"run | {metric.rpartition('.')[2]} | seeds", f"{shown} | 95 % interval | pairs"]
    lines = [f"| {' | '.join(heads[: 1 + bool(several)])} |"]
    lines.append("|---|--:|--:|" + ("--:|" * (3 + (len(several) > 1)) if several else ""))
    for row in rows:
        line = f"| {row.label} | {with_spread(row.mean, row.std)} | {row.n} |"
        if several:
            form = difference_form(row.difference, row.low, row.high)
            interval = "-" if math.isnan(row.low) else f"{row.low:{form}} to {row.high:{form}}"
            less = f"{row.difference:{form}}" if row.pairs else "-"
            line += f" {row.against or '-'} |" if len(several) > 1 else ""
            line += f" {less} | {interval} | {row.pairs or '-'} |"
        lines.append(line)
    warning = caution(found)
    few = "An interval of two pairs is often narrow by chance: run three seeds or more."
    below = ["", few] if any(row.pairs == 2 for row in rows) else []
    return "\n".join([*([warning, ""] if warning else []), *lines, *below]) + "\n"


def caution(found: list[Variant]) -> str:
    """A warning if runs differ in length, data or tokenizer; "" otherwise."""
    kinds = zip(*(_kind(run) for variant in found for run in variant.runs.values()), strict=True)
    said = [
        f"of different {what} ({'; '.join(dict.fromkeys(values))})"
        for what, values in zip(("length", "data or tokenizer"), kinds, strict=True)
        if len({*values}) > 1
    ]
    less = "no differences are shown between such runs"
    return f"Careful: these runs are {', and '.join(said)}; {less}." if said else ""


def _kind(run: FinishedRun) -> tuple[str, str]:
    """The length of a run, and its data with their tokenizer; only equal ones are compared."""
    tokens, config = run.result.get("tokens"), run.result["config"]
    length = f"{config['train']['steps']:,} steps"
    length += f", {tokens:,} tokens" if isinstance(tokens, int) else ""
    tokenizer = (run.result.get("corpus") or {}).get("tokenizer")
    size = f", {tokenizer.get('kind')} of {tokenizer.get('vocab_size')}" if tokenizer else ""
    return length, f"{config['data']['name']} {str(run.result.get('corpus_hash'))[:12]}{size}"


def with_spread(center: float, spread: float) -> str:
    """A mean with its standard deviation, which is nan where there is none."""
    if not math.isfinite(center):
        return "not finite"
    places = decimals(center, center - spread, center + spread)
    shown = f"{center:.{places}f}"
    return shown if math.isnan(spread) else f"{shown} ± {spread:.{places}f}"


def curves(found: list[Variant], baselines: list[Variant]) -> list[Point]:
    """The curves of each variant, averaged over its seeds, the baselines' first."""
    ordered = [*baselines, *(variant for variant in found if variant not in baselines)]
    logs = [
        (variant.label, results.read_metrics(run.directory / "metrics.jsonl"), run.result)
        for variant in ordered
        for run in variant.runs.values()
    ]
    return points(logs, QUANTITIES)


def text(found: list[Variant], baselines: list[Variant], metric: str = METRIC) -> str:
    """The table of the variants and of the best one of each method as Markdown."""
    rows = [*table(found, baselines, metric), *bests(found, baselines, metric)]
    return markdown(found, rows, metric)


def of_sweep(runs: list[FinishedRun], metric: str = METRIC) -> str:
    """The table printed at the end of a sweep, with the command that prints it with curves."""
    found = variants(runs)
    folders = dict.fromkeys(str(run.directory.parent) for run in runs)
    arguments = [*folders, *([] if metric == METRIC else [f"metric={metric}"])]
    command = shlex.join(["python", "-m", "experiments.compare", *arguments])
    return f"\n{text(found, choose(found, None), metric)}\nwith curves: {command}"
