"""The user's own texts and labels: CSV or JSON files in a folder.

The files are `train.csv` and `dev.csv`, or the same with the endings `.jsonl` (one object per line)
and `.json` (a list of objects). One or two columns hold texts and another the label, which names a
class: a text, a number, true or false.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np

from experiments.finetuning.glue import Examples
from experiments.support.errors import UserError

ENDINGS = (".csv", ".jsonl", ".json")
SPLITS = ("train", "dev")
LONGEST = 2**31 - 1  # characters per field; Python's default limit is 131,072


def files(data: str | None) -> dict[str, Path]:
    """The files of the splits `train` and `dev`.

    Raises:
        UserError: no folder is given, or a split has no file or two.
    """
    found = {split: [Path(data or "", f"{split}{end}") for end in ENDINGS] for split in SPLITS}
    there = {split: [path for path in paths if path.is_file()] for split, paths in found.items()}
    if data is None or any(len(paths) != 1 for paths in there.values()):
        raise UserError(
            f"data.source={data or 'null'}; task=own needs a folder with one train and one dev "
            f"file, out of {', '.join(ENDINGS)}"
        )
    return {split: paths[0] for split, paths in there.items()}


def load(
    data: str, texts: tuple[str, ...], label: str
) -> tuple[dict[str, Examples], tuple[str, ...]]:
    """(`train` and `dev`; the names of the classes, which are those of the training file in the
    order of their names).

    Raises:
        UserError: a file cannot be read, a row lacks a column, or there are no two classes. The
            message names the file and the row.
    """
    read = {split: _rows(path, (*texts, label)) for split, path in files(data).items()}
    classes = tuple(sorted({row[-1] for row in read["train"]}))
    if len(classes) < 2 or not read["dev"]:
        raise UserError(
            f"data.source={data}: the {label} must name two classes or more in the training file, "
            f"which has {len(classes)}, and the dev file must have rows"
        )
    if unknown := {row[-1] for row in read["dev"]}.difference(classes):
        raise UserError(
            f"data.source={data}: the {label} {min(unknown)!r} of the dev file is not in the "
            f"training file, which has {', '.join(classes[:20])}"
        )
    splits = {
        split: Examples([row[:-1] for row in rows], np.array([classes.index(r[-1]) for r in rows]))
        for split, rows in read.items()
    }
    return splits, classes


def metrics(predicted: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Accuracy, which is also `score`, and the macro-averaged F1, in percent."""
    from sklearn.metrics import f1_score

    accuracy = 100.0 * float((predicted == labels).mean())
    f1 = 100.0 * float(f1_score(labels, predicted, average="macro", zero_division=0.0))
    return {"score": accuracy, "accuracy": accuracy, "f1_macro": f1}


def _rows(path: Path, columns: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The values of each row in these columns; other values than texts as JSON writes them."""
    rows: list[Any]
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if path.suffix == ".csv":
                csv.field_size_limit(LONGEST)
                rows = list(csv.DictReader(file, strict=True))
            elif path.suffix == ".json":
                rows = json.load(file)
            else:
                rows = [json.loads(line) for line in file if line.strip()]
    except (csv.Error, ValueError) as error:  # no JSON, no UTF-8
        raise UserError(f"{path} cannot be read: {error}") from error
    found = []
    for number, row in enumerate(rows, 1):
        # A CSV row with too many values has the rest under the name None.
        values = [row.get(name) for name in columns] if isinstance(row, dict) else [None]
        if None in values or None in row or values[-1] == "":
            raise UserError(
                f"{path}, row {number}: it must have values for {', '.join(columns)} (data.text, "
                f"data.label), and texts with commas in double quotes: {row!r:.200}"
            )
        found.append(tuple(v if isinstance(v, str) else json.dumps(v) for v in values))
    return found
