"""The user's own texts and labels: CSV or JSON files in a folder.

The files are `train.csv`, `dev.csv` and optionally `test.csv` without labels, or the same with the
endings `.jsonl` (one object per line) and `.json` (a list of objects). One or two columns hold
texts and another the label, which names a class: a text, a number, true or false.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from experiments.finetuning.glue import Examples
from experiments.support.errors import UserError

ENDINGS = (".csv", ".jsonl", ".json")
LONGEST = 2**31 - 1  # characters per field; Python's default limit is 131,072


def files(data: str | None) -> dict[str, Path]:
    """The files of the splits `train`, `dev` and, where it is there, `test`.

    Raises:
        UserError: no folder is given, or a split has no file or two.
    """
    if data is None or not Path(data).is_dir():
        raise UserError(
            f"data.source={data or 'null'}; task=own needs a folder with train and dev files, out "
            f"of {', '.join(ENDINGS)}"
        )
    found: dict[str, Path] = {}
    for split in ("train", "dev", "test"):
        paths = [path for end in ENDINGS if (path := Path(data) / f"{split}{end}").is_file()]
        if len(paths) > 1 or (not paths and split != "test"):
            there = " and ".join(path.name for path in paths)
            what = f"has {there}; keep one of them" if paths else f"has no {split}.csv"
            raise UserError(
                f"data.source={data} {what}: each split is one file, out of {', '.join(ENDINGS)}"
            )
        if paths:
            found[split] = paths[0]
    return found


def load(
    data: str, texts: tuple[str, ...], label: str
) -> tuple[dict[str, Examples], dict[str, list[tuple[str, ...]]], tuple[str, ...]]:
    """(`train` and `dev`; the texts of `test`, if it is there; the names of the classes).

    The classes are those of the training file, in the order of their names.

    Raises:
        UserError: a file cannot be read, a row has too few or too many columns, or a label is empty
            or occurs only in the dev file. The message names the file and the row.
    """
    paths, read, names = files(data), {}, {}
    for split in ("train", "dev"):
        rows = list(_rows(paths[split], (*texts, label)))
        if not rows:
            raise UserError(f"{paths[split]} has no rows")
        for place, row in rows:
            if not row[-1].strip():
                raise UserError(f"{place}: the {label} is empty; leave the row out or give it one")
        read[split] = [tuple(row[:-1]) for _, row in rows]
        names[split] = [(place, row[-1]) for place, row in rows]
    classes = tuple(sorted({name for _, name in names["train"]}))
    if len(classes) < 2:
        raise UserError(
            f"{paths['train']}: all rows have the {label} {classes[0]!r}; it takes two classes"
        )
    for place, name in names["dev"]:
        if name not in classes:
            raise UserError(
                f"{place}: the {label} {name!r} is not in {paths['train'].name}, which has "
                f"{', '.join(classes[:20])}"
            )
    numbers = {name: number for number, name in enumerate(classes)}
    splits = {
        split: Examples(read[split], np.array([numbers[name] for _, name in names[split]]))
        for split in read
    }
    tests = {
        split: [tuple(row) for _, row in _rows(path, texts)]
        for split, path in paths.items()
        if split == "test"
    }
    return splits, tests, classes


def metrics(predicted: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Accuracy, which is also `score`, and the macro-averaged F1, in percent."""
    from sklearn.metrics import f1_score

    accuracy = 100.0 * float((predicted == labels).mean())
    f1 = 100.0 * float(f1_score(labels, predicted, average="macro", zero_division=0.0))
    return {"score": accuracy, "accuracy": accuracy, "f1_macro": f1}


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
    """(file and number of the row, its values in these columns)."""
    for place, row in _records(path):
        if None in row:  # of CSV
            raise UserError(
                f"{place} has more values than columns; texts with commas go in double quotes"
            )
        values = []
        for column in columns:
            if (value := row.get(column)) is None:
                there = ", ".join(row)
                raise UserError(f"{place}: no {column!r} among {there}; set data.text, data.label")
            values.append(value if isinstance(value, str) else json.dumps(value))
        yield place, values


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (file and number of the row, the row's values by column) of a file. A JSON row that is
    not an object is an error."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if path.suffix == ".csv":
                csv.field_size_limit(LONGEST)
                reader = csv.DictReader(file, strict=True)
                names = reader.fieldnames or ()
                if twice := [name for name in names if names.count(name) > 1]:
                    raise UserError(f"{path} has two columns {twice[0]!r}; rename one")
                for row in reader:
                    yield f"{path}, line {reader.line_num}", row
                return
            if path.suffix == ".json":
                content = json.load(file)
                if not isinstance(content, list):
                    raise UserError(f"{path} is no list of objects; give it the ending .jsonl?")
                numbered = ((f"{path}, object {i}", row) for i, row in enumerate(content, 1))
            else:
                lines = enumerate(file, 1)
                numbered = (
                    (f"{path}, line {i}", json.loads(line)) for i, line in lines if line.strip()
                )
            for place, row in numbered:
                if not isinstance(row, dict):
                    raise UserError(f"{place} is no object with columns, but {row!r:.40}")
                yield place, row
    except (csv.Error, ValueError) as error:  # no JSON, no UTF-8
        raise UserError(f"{path} cannot be read: {error}") from error
