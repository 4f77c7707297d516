"""Write what was measured into the pages of docs/methods/, and their curves, from the committed
records: `python docs/make_methods.py`."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from experiments.runs.stats import mean, paired_interval  # noqa: E402

PAGES = ROOT / "docs" / "methods"
EVIDENCE = ROOT / "reproduce" / "evidence"
# The block and the variant of each method; `naive` is one_shot by magnitude.
SHOWN = {name: ("a", name) for name in ("bi_mask", "fst", "s_ste", "semi_sparse", "slope")}
SHOWN |= {name: ("a", name) for name in ("sr_ste", "ste", "step")}
SHOWN |= {name: ("b", name) for name in ("ast", "gmp", "imp")} | {"one_shot": ("b", "naive")}
DENSE = {"a": "dense", "b": "dense_trained_on"}
SIZE, EDGE = (460, 240), 44  # of a figure and of its margins, in pixels
BEGIN, END = "<!-- measured: python docs/make_methods.py -->", "<!-- end -->"


def losses(block: str) -> dict[str, list[float]]:
    """The validation loss of each seed, by variant."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for line in (EVIDENCE / f"{block}.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        found[record["variant"]][record["seed"]] = record["metrics"]["val_loss"]
    return {variant: [by[seed] for seed in sorted(by)] for variant, by in found.items()}


def curves(block: str, variants: tuple[str, ...]) -> dict[str, list[tuple[float, float]]]:
    """The mean validation loss over the seeds at each step but the first four, by variant."""
    found: dict[str, dict[float, list[float]]] = {v: defaultdict(list) for v in variants}
    with (EVIDENCE / f"{block}.curves.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            variant = row["run"].rpartition("-seed")[0]
            if row["quantity"] == "val_loss" and variant in found:
                found[variant][float(row["step"])].append(float(row["value"]))
    return {v: [(s, mean(by[s])) for s in sorted(by)[4:]] for v, by in found.items()}


def drawing(lines: dict[str, list[tuple[float, float]]]) -> str:
    """An SVG of one line each, dense training's first."""
    xs, ys = zip(*(point for line in lines.values() for point in line), strict=True)
    (width, height), parts = SIZE, []

    def at(x: float, y: float) -> str:
        right = EDGE + (x - min(xs)) / (max(xs) - min(xs)) * (width - 3 * EDGE)
        down = EDGE / 2 + (max(ys) - y) / (max(ys) - min(ys)) * (height - 2 * EDGE)
        return f"{right:.1f},{down:.1f}"

    for (name, line), colour in zip(lines.items(), ("#888", "#0b5cad"), strict=True):
        path = " ".join(at(*point) for point in line)
        x, y = at(*line[-1]).split(",")
        down = float(y) + (8 if name in DENSE.values() else 0)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{float(x) + 5}" y="{down:.1f}" fill="{colour}">{name}</text>')
    for y in (min(ys), max(ys)):
        parts.append(
            f'<text x="4" y="{float(at(min(xs), y).split(",")[1]) + 4:.1f}">{y:.2f}</text>'
        )
    for x in (min(xs), max(xs)):
        left, _ = at(x, min(ys)).split(",")
        parts.append(f'<text x="{left}" y="{height - 22}" text-anchor="middle">{x:.0f}</text>')
    said = (
        f'<text x="{EDGE}" y="{height - 5}">validation loss (nats) over steps, mean of seeds</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="12" '
        f'font-family="sans-serif" fill="#555">\n' + "\n".join([*parts, said]) + "\n</svg>\n"
    )


def measured(name: str) -> str:
    """The paragraph on what was measured."""
    block, variant = SHOWN[name]
    known = losses(block)
    pairs = zip(known[variant], known[DENSE[block]], strict=True)
    differences = [own - dense for own, dense in pairs]
    low, high = paired_interval(differences)
    pruned = "feed-forward layers" if block == "a" else "all linears"
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
        lines = curves(block, (DENSE[block], variant))
        (PAGES / "curves" / f"{name}.svg").write_text(drawing(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
