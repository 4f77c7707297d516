"""Compare finished runs: `python -m experiments.compare runs/gpt2-stdlib`.

Takes run directories, or folders that contain runs. Runs that differ only in
the seed are averaged. Each group is compared with the baseline seed by
seed, because runs with the same seed share initial weights and batches. In a
sweep that is the baseline at the same learning rate (or whatever else is
swept), or where there is none the best one; the table says which.

    baseline=NAME  what to compare with: a method (default: dense, or else the
                   first), or one group by its name in the table or the folder
                   of its runs (ste-steps_60-8cdc4f70)
    metric=PATH    number in result.json (default: metrics.val_loss)
    out=FOLDER     folder for compare.md, compare.csv (a row for each run) and
                   compare.png with the curves (default: runs/compare)
"""

import sys
from functools import partial
from pathlib import Path

from experiments.config.driver import parse
from experiments.runs import comparison, curves
from experiments.support.checkpoint import csv_text, write_atomic, write_text
from experiments.support.errors import UserError, exit_with_one_line
from experiments.support.progress import say


def compare(paths: list[Path], baseline: str, metric: str, out: Path) -> None:
    """Print the comparison of finished runs and write its files."""
    runs, unfinished = comparison.find(paths)
    variants = comparison.variants(runs)
    baselines = comparison.choose(variants, baseline or None)
    text = comparison.text(variants, baselines, metric)
    print(text)
    for directory in unfinished:
        say(f"left out, not finished: {directory}")
    stem = out / "compare"
    write_text(stem.with_suffix(".md"), text)
    keys = comparison.differing(variants)
    single = [
        {
            "label": variant.label,
            "seed": seed,
            metric: found,
            **{key: variant.config.get(key, "") for key in keys},
            "directory": variant.runs[seed].directory,
        }
        for variant in variants
        for seed, found in variant.numbers(metric).items()
    ]
    write_text(stem.with_suffix(".csv"), csv_text(single))
    points = comparison.curves(variants, baselines)
    panels = {
        curves.NAMES[quantity]: partial(curves.draw, quantity=quantity, data=points)
        for quantity in dict.fromkeys(point.quantity for point in points)
    }
    if panels:  # there are none if every run diverged at once
        write_atomic(stem.with_suffix(".png"), lambda p: curves.figure(panels, curves.SPREAD, p))
    say(f"written: {stem}.md, .csv, .png")


def main(arguments: list[str]) -> None:
    """The command line with `arguments`."""
    with exit_with_one_line("begins it anew"):
        found = parse(arguments, ("baseline", "metric", "out"))
        if found.help or not arguments:
            print(__doc__)
            return
        for path in found.overrides:
            if not Path(path).exists():
                raise UserError(
                    f"there is no {path}; give the directories of runs, and baseline=, metric= or "
                    "out="
                )
        metric, out = found.metric or comparison.METRIC, Path(found.out or "runs/compare")
        compare([*map(Path, found.overrides)], found.baseline or "", metric, out)


if __name__ == "__main__":
    main(sys.argv[1:])
