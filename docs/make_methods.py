"""Write what was measured into the pages of docs/methods/, and their curves, from the committed
records: `python docs/make_methods.py`."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from experiments.runs.stats import mean, paired_interval  # noqa: E402
from reproduce.execute.blocks import EVIDENCE, read_block  # noqa: E402
from reproduce.execute.packed import read_packed  # noqa: E402
from reproduce.judge.claims import read_claims  # noqa: E402
from reproduce.render.report.figures import COLOURS, STYLE, standalone, svg  # noqa: E402

PAGES = ROOT / "docs" / "methods"
# The block and the variant of each method; `naive` is one_shot by magnitude.
SHOWN = {name: ("a", name) for name in ("bi_mask", "fst", "s_ste", "semi_sparse", "slope")}
SHOWN |= {name: ("a", name) for name in ("sr_ste", "ste", "step")}
SHOWN |= {name: ("b", name) for name in ("ast", "gmp", "imp")} | {"one_shot": ("b", "naive")}
SHOWN |= {"act24": ("e41a", "act24"), "cast": ("e41", "cast"), "projected": ("e41", "projected")}
DENSE = {"a": "dense", "b": "dense_trained_on", "e41": "dense_trained_on", "e41a": "dense"}
AGAINST = {"a": "that of dense training", "e41a": "that of dense training with squared ReLU"}
PRUNED = {
    "slope": "all linears but the first",
    "act24": "2:4 activations",
    "a": "feed-forward layers",
}
BEGIN, END = "<!-- measured: python docs/make_methods.py -->", "<!-- end -->"


@cache
def records(block: str) -> dict[tuple[str, int], dict[str, Any]]:
    """The records of a block, by variant and seed."""
    return dict(sorted(read_packed(EVIDENCE, block).items()))


def above(block: str, variant: str, without: int | None = None) -> tuple[str, int]:
    """How far the validation loss ends above that of the block's dense variant, in words, and the
    number of seeds: those of both variants that started from the same weights."""
    by_seed = {seed: record for (of, seed), record in records(block).items() if of == variant}
    differences = []
    for seed, record in by_seed.items():
        dense = records(block)[DENSE[block], seed]
        if seed != without and record.get("init") == dense.get("init"):
            differences.append(record["metrics"]["val_loss"] - dense["metrics"]["val_loss"])
    low, high = paired_interval(differences)
    return f"{mean(differences):+.4f} [{low:+.4f}, {high:+.4f}]", len(differences)


def drawing(block: str, variant: str) -> str:
    """An SVG of the mean validation loss over the seeds at each step but the first four, that of
    dense training first."""
    with rc_context(fname=STYLE):
        figure = Figure(figsize=(6.4, 3.3), dpi=72)
        axes = figure.add_axes((0.14, 0.17, 0.83, 0.79))
        for name, colour in zip((DENSE[block], variant), ("soft", "mark"), strict=True):
            by_step: dict[float, list[float]] = defaultdict(list)
            for (of, _), record in records(block).items():
                for step, value in record["curves"]["val_loss"] if of == name else ():
                    by_step[step].append(value)
            steps = sorted(by_step)[4:]
            means = [mean(by_step[step]) for step in steps]
            label = name.replace("_trained_on", ", trained on")
            axes.plot(steps, means, color=COLOURS[colour][0], label=label)
        axes.set(xlabel="step", ylabel="validation loss (nats)")
        axes.legend(frameon=False)
        title = f"Loss of {variant} and of dense training"
        return standalone(svg(figure, title, "Mean validation loss over the seeds, by step."))


def by_dense_columns() -> str:
    """An SVG of how far SparseGPT's loss ends above dense training by the share of dense columns,
    with 95 % intervals over the seeds of block e41."""
    with rc_context(fname=STYLE):
        figure = Figure(figsize=(6.4, 2.8), dpi=72)
        axes = figure.add_axes((0.14, 0.2, 0.83, 0.75))
        for share in (0, 0.125, 0.25, 0.5, 0.75):
            variant = f"sparsegpt_{1000 * share:.0f}" if share else "sparsegpt"
            value, low, high = map(float, re.findall(r"[-+][\d.]+", above("e41", variant)[0]))
            reach = [[value - low], [high - value]]
            axes.errorbar(share, value, yerr=reach, fmt="o", color=COLOURS["mark"][0], capsize=3)
        axes.set(xlabel="share of dense columns", ylabel="loss above dense (nats)", ylim=(0, None))
        title = "Loss of SparseGPT with dense columns"
        return standalone(svg(figure, title, "Validation loss above dense, by their share."))


def measured(name: str) -> str:
    """The paragraph on what was measured, and the method's other variants."""
    block, variant = SHOWN[name]
    effect, seeds = above(block, variant)
    pruned = PRUNED.get(variant) or PRUNED.get(block, "all linears")
    own = [o[7:] for o in read_block(block).variants[variant] if o.startswith("method.")]
    chosen = f", `{' '.join(own)}`" if own else ""
    said = f"**Measured** (GPT-2, 5M parameters, {seeds} seeds, {pruned}{chosen}). "
    said += f"The loss ends {effect} nats above {AGAINST.get(block, 'further dense training')}"
    evidence = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    if block == "a" and (
        row := re.search(rf"^\| `{variant}` \|.*\| (\S+) \[.*\] \|$", evidence, re.M)
    ):
        said += f", which has this loss after {float(row[1]):.0%} of the tokens"
    said += unstable(block, variant)
    table = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    rows = re.findall(
        rf"^\| (GPT-2 774M|6 blocks.*?), .*linears \| {name}(, fp8)? \| \S+ \| (\S+)", table, re.M
    )
    speeds = [f"{speed} ({model}{', FP8' * bool(fp8)})" for model, fp8, speed in rows]
    said += (
        f". Speed of a whole step over dense, on an H200 with all linears: {', '.join(speeds)}"
        * bool(speeds)
    )
    picture = f"![Loss of {name} and of dense training](curves/{name}.svg)"
    return f"{BEGIN}\n{picture}\n\n{said}.\n{others(name)}{END}"


def unstable(block: str, variant: str) -> str:
    """The effect without a run that became unstable, in words; "" if none did."""
    for seed in read_block(block).seeds:
        if f"{block} {variant} {seed}" in read_claims().diverged:
            calm, _ = above(block, variant, without=seed)
            return f"; without seed {seed}, which became unstable, {calm}"
    return ""


def others(name: str) -> str:
    """A table of the block's other variants of the method, the best first; "" if there is none."""
    block, shown = SHOWN[name]
    variants = read_block(block).variants
    found = []
    for variant, overrides in variants.items():
        own = [o.removeprefix("method.") for o in overrides if o not in variants[shown]]
        told = " ".join(o for o in own if not re.match(r"train\.(warm|cool)|impl\.", o))
        if variant != shown and f"method={name}" in overrides:
            effect, _ = above(block, variant)
            effect += unstable(block, variant)
            told = f"`{told}`" if told else "the defaults"
            found.append((float(effect.split()[0]), f"| {told} | {effect} |"))
    head = "\n| other options | loss above |\n|---|--:|\n"
    return head + "".join(f"{row}\n" for _, row in sorted(found)) if found else ""


def main() -> None:
    """Write pages and curves."""
    (PAGES / "curves").mkdir(exist_ok=True)
    for name, (block, variant) in SHOWN.items():
        page = PAGES / f"{name}.md"
        text = page.read_text(encoding="utf-8")
        kept = re.escape(BEGIN), re.escape(END)
        page.write_text(
            re.sub(rf"{kept[0]}.*?{kept[1]}", measured(name), text, flags=re.S), "utf-8"
        )
        drawn = drawing(block, variant)
        (PAGES / "curves" / f"{name}.svg").write_text(drawn, encoding="utf-8")
    (PAGES / "curves" / "dense_columns.svg").write_text(by_dense_columns(), encoding="utf-8")


if __name__ == "__main__":
    main()
