"""Writes the lines above a table: what was run, on what, and what differs from the paper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from experiments.bench.timing import load_text
from reproduce.cells import MARK, OTHER, compared, measured, published_cell
from reproduce.engine import PlacedRun
from reproduce.records import setting
from reproduce.spec import BENCH, Table

Facts = dict[str, Any]  # on the runs of a table, as `facts` gives them


def header(table: Table, tier: str, known: Facts, unknown: set[str]) -> list[str]:
    """The lines above a table. known: the facts on its runs. unknown: labels of the columns for
    which there is neither a value of the paper's nor one of ours."""
    lines = [f"Tier {tier}: {table.tiers[tier].setting}"]
    variants = [variant.label for variant in table.variants_of(tier) if variant.label]
    if len(variants) == 1:
        lines.append(f"All rows: {variants[0]}.")
    if table.paper:
        lines += _on_the_paper(table, tier)
        lines += _absent(table, tier)
    lines += _not_measured(table, tier, unknown)
    lines += _on_the_runs(table, tier, known)
    return lines + [f"{name}: {text}." for name, text in known.items() if name in NAMED and text]


def _on_the_paper(table: Table, tier: str) -> list[str]:
    """The paper's setting and how far its values can be compared with ours."""
    chosen, lines = table.tiers[tier], []
    if any(override.startswith("shrink=") for override in chosen.overrides):
        lines.append("Sizes in labels and in the notes below are those of the tier full.")
    lines.append(f"The paper: {table.published_setting}.")
    lines += table.notes
    if table.driver == BENCH:
        lines.append(
            "The device named below is not the paper's, so no difference to the paper is computed."
        )
    elif tier != "full":
        lines.append(
            "This tier is not the paper's setting, so no difference to the paper is computed."
        )
        if tier == "smoke":
            n = len(chosen.seeds)
            lines.append(
                f"Its rows cannot be ranked: after so few steps, with {n} seed{'s' * (n > 1)}, "
                "chance orders them as much as the methods do. It shows that everything runs."
            )
    elif chosen.incomparable:
        lines.append(f"No difference to the paper is computed: {chosen.incomparable}.")
    if compared(table, tier):
        lines.append(_marking(len(chosen.seeds)))
    if tier != "smoke":  # the smoke tier shows no published value
        lines += _reservations(table, tier)
    return lines


def _marking(n: int) -> str:
    """A sentence on the meaning of a marked value. n: number of seeds."""
    if n < 2:
        return "One seed has no interval: no difference to the paper is marked."
    return (
        f"Ours is marked {MARK} where the paper's value lies outside the 95 % interval of our mean "
        "over the seeds (Student's t)."
    )


def _reservations(table: Table, tier: str) -> list[str]:
    """Lines on the published values that are second-hand or doubtful: which values, their source
    and the reason."""
    rows: dict[str, list[str]] = {}
    for variant in table.variants_of(tier):
        for row in table.rows_of(tier):
            for column in table.columns:
                cell = None if row.stage else published_cell(table, variant, row, column)
                if cell is not None and cell.reservation:
                    rows.setdefault(cell.reservation, []).append(row.label)
    return [
        f"Published values of {'; '.join(dict.fromkeys(labels))}: {reservation}."
        for reservation, labels in rows.items()
    ]


def _absent(table: Table, tier: str) -> list[str]:
    """The rows that are not run, and the rows and variants that this tier does not have."""
    lines = []
    not_run: dict[str, list[str]] = {}
    for row in table.rows_of(tier):
        not_run.setdefault(row.not_run, []).append(row.label)
    for reason, labels in not_run.items():
        if reason:
            lines.append(f"Not run: {'; '.join(labels)}: {reason}.")
    absent = {
        "rows": [r.label for r in table.rows if r not in table.rows_of(tier) and not r.stage],
        "rows of": [v.label for v in table.variants if v not in table.variants_of(tier)],
    }
    for what, labels in absent.items():
        if labels:
            lines.append(f"This tier leaves out the {what} {'; '.join(labels)}.")
    return lines


def _not_measured(table: Table, tier: str, unknown: set[str]) -> list[str]:
    """A line on the columns that this tier does not measure; [] if it measures all."""
    lacking = [c.label for c in table.columns if not measured(table, tier, c)]
    if not lacking:
        return []
    line = f"Not measured in this tier: {'; '.join(lacking)}."
    if unknown:
        left_out = [label for label in lacking if label in unknown]
        which = "all of them" if left_out == lacking else "; ".join(left_out)
        line += f" Left out, because the paper's values are not available either: {which}."
    return [line]


def _on_the_runs(table: Table, tier: str, known: Facts) -> list[str]:
    """The number of runs, the meaning of spreads and intervals, and the rows with a baseline of
    their own."""
    chosen, lines = table.tiers[tier], []
    if chosen.block:
        lines.append(
            f"Nothing is trained for this tier: it shows the records of block {chosen.block} "
            f"({known.get('scale') or 'none yet'}); `python -m reproduce run {chosen.block}` makes "
            "what is missing."
        )
    wanted = len(list(table.trainings(tier)))
    several = len(chosen.seeds) > 1
    seeds = ", ".join(map(str, chosen.seeds))
    of_seeds = f"seeds {seeds}" if several else f"one seed ({seeds})"
    line = f"Runs: {known['runs']} of {wanted}, {of_seeds}."
    if several and table.driver != BENCH:
        line += (
            " ± is the standard deviation over seeds; square brackets give the 95 % interval of "
            "the difference at equal seeds, that is, with equal initial weights and data."
        )
    if several and any(column.show == "interval" for column in table.columns):
        line += " Square brackets give the 95 % interval of the mean (Student's t)."
    lines.append(line)
    for row in table.rows_of(tier):
        if row.against:
            lines.append(
                f'Marked {OTHER}: "{row.label}" is compared with "{row.against}", not with the '
                "first row."
            )
    return lines


# --- facts on the runs ---------------------------------------------------------------------------


NAMED = ("Corpus", "Device", "Code", "Products", "Clocks")  # the facts that have lines


def facts(table: Table, tier: str, runs: list[PlacedRun]) -> Facts:
    """The facts on the runs that the header tells: their number, data, device and code."""
    known: Facts = {
        "runs": len(runs),
        "Corpus": _common(lambda r: _corpus(r["corpus"]) if "corpus" in r else "", runs),
        "Device": _common(_device, runs),
        "Code": _common(lambda r: revision(r["environment"]), runs),
    }
    if table.tiers[tier].block:
        known["scale"] = setting(run.result for run in runs)
    if table.driver == BENCH and runs:
        first, *others = {run.result["backend"] for run in runs}
        several = "not the same for all runs; the column backend of -runs.csv names them"
        known["Products"] = several if others else first
        if runs[0].result["config"]["sustained_s"] is not None:  # on a GPU
            metrics = [run.result["metrics"] for run in runs]
            mhz, watts = ([values[name] for values in metrics] for name in ("sm_mhz", "watts"))
            known["Clocks"] = load_text(mhz, watts)
    return known


def _common(fact: Callable[[dict[str, Any]], str], runs: list[PlacedRun]) -> str:
    """A fact on the runs' results; "" if no result has it. If it is not the same for all runs, that
    of most runs comes last, and the rows of the others are named."""
    rows: dict[str, Counter[str]] = {}
    for run in runs:
        if text := fact(run.result):
            rows.setdefault(text, Counter())[run.place.row] += 1
    if len(rows) < 2:
        return "".join(rows)
    *fewer, most = sorted(rows, key=lambda text: rows[text].total())
    others = [
        f"{text} ({', '.join(f'{n} of {row}' for row, n in rows[text].items())})" for text in fewer
    ]
    total = rows[most].total()
    return f"not the same for all runs: {'; '.join(others)}; {most} (the other {total})"


def _corpus(manifest: dict[str, Any]) -> str:
    train, val = manifest["splits"]["train"], manifest["splits"]["val"]
    unit = "images" if "images" in train else "tokens"
    whole = [manifest["sha256"]] if unit == "images" else [train["sha256"], val["sha256"]]
    hashes = ", ".join(digest[:12] for digest in whole)
    return (
        f"{manifest['name']}, {train[unit]:,} training and {val[unit]:,} validation {unit} "
        f"(sha256 {hashes})"
    )


def _device(result: dict[str, Any]) -> str:
    environment = result["environment"]
    several = f"{result.get('world_size', 1)} x " * (result.get("world_size", 1) > 1)
    parts = [several + environment["device"]]
    if "config" not in result:  # the record of a block
        return f"{parts[0]}, torch {environment['versions']['torch']}"
    threads = environment["threads"]
    parts.append(f"{threads} thread" + "s" * (threads != 1))
    impl = result["config"].get("impl")
    if impl is not None:
        parts += [
            result["config"]["train"]["dtype"],
            "compiled" if impl["compile"] else "",
            f"micro-batch {impl['micro_batch']}" if impl["micro_batch"] else "",
            f"backend {result['backend']}",
        ]
    parts.append(f"torch {environment['versions']['torch']}")
    return ", ".join(part for part in parts if part)


def revision(environment: dict[str, Any]) -> str:
    """The revision of the code in words. environment: with the entries of `git_state`."""
    if environment["git_revision"] is None:
        return "unknown revision (no git checkout)"
    changed = " with uncommitted changes" if environment["git_dirty"] else ""
    return f"revision {environment['git_revision'][:12]}{changed}"
