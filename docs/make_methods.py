"""Write what was measured into the pages of docs/methods/, and their curves, from the committed
records: `python docs/make_methods.py`."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from experiments.runs.stats import mean, paired_interval  # noqa: E402
from reproduce.execute.blocks import EVIDENCE  # noqa: E402
from reproduce.execute.packed import read_packed  # noqa: E402
from reproduce.render.report.figures import COLOURS, STYLE, standalone, svg  # noqa: E402

PAGES = ROOT / "docs" / "methods"
# The block and the variant of each method; `naive` is one_shot by magnitude.
SHOWN = {name: ("a", name) for name in ("bi_mask", "fst", "s_ste", "semi_sparse", "slope")}
SHOWN |= {name: ("a", name) for name in ("sr_ste", "ste", "step")}
SHOWN |= {name: ("b", name) for name in ("ast", "gmp", "imp")} | {"one_shot": ("b", "naive")}
DENSE = {"a": "dense", "b": "dense_trained_on"}
BEGIN, END = "<!-- measured: python docs/make_methods.py -->", "<!-- end -->"


def losses(block: str) -> dict[str, list[float]]:
    """The validation loss of each seed, by variant."""
    found: dict[str, list[float]] = defaultdict(list)
    for (variant, _), (_, record) in sorted(read_packed(EVIDENCE, block).items()):
        found[variant].append(record["metrics"]["val_loss"])
    return found


def drawing(block: str, variant: str) -> str:
    """An SVG of the mean validation loss over the seeds at each step but the first four, that of
    dense training first."""
    with rc_context(fname=STYLE):
        figure = Figure(figsize=(6.4, 3.3), dpi=72)
        axes = figure.add_axes((0.12, 0.17, 0.85, 0.79))
        for name, colour in zip((DENSE[block], variant), ("soft", "mark"), strict=True):
            by_step: dict[float, list[float]] = defaultdict(list)
            for (of, _), (_, record) in read_packed(EVIDENCE, block).items():
                for step, value in record["curves"]["val_loss"] if of == name else ():
                    by_step[step].append(value)
            steps = sorted(by_step)[4:]
            means = [mean(by_step[step]) for step in steps]
            axes.plot(steps, means, color=COLOURS[colour][0], label=name)
        axes.set(xlabel="step", ylabel="validation loss (nats)")
        axes.legend(frameon=False)
        title = f"Loss of {variant} and of dense training"
        return standalone(svg(figure, title, "Mean validation loss over the seeds, by step."))


def measured(name: str) -> str:
    """The paragraph on what was measured."""
    block, variant = SHOWN[name]
    known = losses(block)
    pairs = zip(known[variant], known[DENSE[block]], strict=True)
    differences = [own - dense for own, dense in pairs]
    low, high = paired_interval(differences)
    pruned = "feed-forward layers" if block == "a" else "all linears"
    pruned = "all linears but the first" if variant == "slope" else pruned
    said = f"**Measured** (GPT-2, 5M parameters, {len(differences)} seeds, {pruned}). "
    said += f"The loss ends {mean(differences):+.4f} [{low:+.4f}, {high:+.4f}] nats "
    said += "above that of dense training" if block == "a" else "above further dense training"
    evidence = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    if block == "a" and (
        row := re.search(rf"^\| `{variant}` \|.*\| (\S+) \[.*\] \|$", evidence, re.M)
    ):
        said += f", which has this loss after {float(row[1]):.0%} of the tokens"
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
    return f"{BEGIN}\n{picture}\n\n{said}.\n{END}"


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


if __name__ == "__main__":
    main()
