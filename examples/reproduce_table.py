"""Reproduce Table 2 of S-STE's paper (how its scale is chosen) from the committed records.

    python examples/reproduce_table.py               # nothing is trained: five seeds, small models
    python examples/reproduce_table.py --tier smoke  # trains tiny ones, on a CPU

It is `python -m reproduce table2 paper=sste tier=mini`, whose numbers are then read from the CSV.
The `full` tier is the paper's own setting and needs its GPUs and data.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from reproduce.__main__ import main as reproduce


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tier", default="mini", choices=("smoke", "mini", "full"))
    tier = parser.parse_args().tier
    reproduce(["table2", "paper=sste", f"tier={tier}"])
    with Path(f"runs/tables/sste_table2-{tier}.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row.get("validation loss: mean")]
    print("\nBest first:")
    for row in sorted(rows, key=lambda row: float(row["validation loss: mean"])):
        mean, std = (float(row[f"validation loss: {part}"]) for part in ("mean", "std"))
        print(f"  {row['method']:24} {mean:.4f} ± {std:.4f}")


if __name__ == "__main__":
    main()
