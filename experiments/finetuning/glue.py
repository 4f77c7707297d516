"""The nine tasks of GLUE (Wang et al., arXiv 1804.07461): files, labels and metrics.

Examples come from a local folder in GLUE's own layout (`CoLA/train.tsv`, `SST-2/dev.tsv`, ...), or
from the hub (`nyu-mll/glue`). The files have no quoting: a quotation mark is a character, and a
tab always separates. Test splits have no public labels; results are those of the dev splits, and
predictions of the test splits that are there go into the files that GLUE's server takes.

Each task has one main metric, `score`, as in Devlin et al. (arXiv 1810.04805, table 1): F1 for MRPC
and QQP, Spearman's correlation for STS-B, Matthews' for CoLA, and accuracy for the others, for MNLI
on the matched split. SLoPe's GLUE table (arXiv 2405.16325) also uses F1: its dense MRPC, 81.2, is
the F1 of always answering yes on the dev split (279 of 408 pairs are positive), whose accuracy is
68.4. FST's code reports accuracy and F1, Pearson and Spearman; all of them are recorded.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from experiments.support.errors import UserError
from experiments.support.hashes import file_hash
from experiments.support.hub import load_dataset

HUB = "nyu-mll/glue"
REVISION = "bcdcba79d07bc864c1c254ccfcedcce55bcc9a8c"  # of HUB
MAX_BROKEN = 0.01  # largest share of short lines in a file where these are left out


@dataclass(frozen=True)
class Task:
    """A task: where its examples are, and what its labels are.

    texts, label: names of the columns in the files.
    labels: possible values of the label column, in the order of the classes; none for STS-B, whose
        label is a number from 0 to 5.
    header: names of the columns, if the files have no header.
    dev: the name of each dev split and of its file.
    hub_texts: names of the columns on the hub, if they differ.
    broken_lines: leave out and count short lines of the training file, at most 1 % of it, because
        the published file has some.
    """

    folder: str
    texts: tuple[str, ...]
    labels: tuple[str, ...]
    label: str = "label"
    header: tuple[str, ...] = ()
    dev: tuple[tuple[str, str], ...] = (("dev", "dev.tsv"),)
    hub_texts: tuple[str, ...] = ()
    broken_lines: bool = False

    @property
    def n_labels(self) -> int:
        """The number of classes; 1 if the label is a number."""
        return len(self.labels) or 1

    @property
    def tests(self) -> dict[str, str]:
        """The files of the test splits, by the names that GLUE's server gives their predictions."""
        if self.folder != "MNLI":
            return {self.folder: "test.tsv"}
        files = {"MNLI-m": "test_matched.tsv", "MNLI-mm": "test_mismatched.tsv"}
        return files | {"AX": "../diagnostic/diagnostic.tsv"}


_PAIR = ("sentence1", "sentence2")
_BINARY = ("0", "1")
_ENTAILMENT = ("entailment", "not_entailment")

TASKS = {
    "cola": Task("CoLA", ("sentence",), _BINARY, header=("source", "label", "mark", "sentence")),
    "sst2": Task("SST-2", ("sentence",), _BINARY),
    "mrpc": Task("MRPC", ("#1 String", "#2 String"), _BINARY, label="Quality", hub_texts=_PAIR),
    "stsb": Task("STS-B", _PAIR, (), label="score"),
    "qqp": Task(
        "QQP", ("question1", "question2"), _BINARY, label="is_duplicate", broken_lines=True
    ),
    "mnli": Task(
        "MNLI",
        _PAIR,
        ("entailment", "neutral", "contradiction"),
        label="gold_label",
        dev=(("dev", "dev_matched.tsv"), ("dev_mismatched", "dev_mismatched.tsv")),
        hub_texts=("premise", "hypothesis"),
    ),
    "qnli": Task("QNLI", ("question", "sentence"), _ENTAILMENT),
    "rte": Task("RTE", _PAIR, _ENTAILMENT),
    "wnli": Task("WNLI", _PAIR, _BINARY),
}


@dataclass(frozen=True)
class Examples:
    """The examples of a split.

    texts: one or two of each example. labels [n]: classes (int64) or numbers (float64). left_out:
    number of broken lines of the file.
    """

    texts: list[tuple[str, ...]]
    labels: np.ndarray
    left_out: int = 0

    def __len__(self) -> int:
        return len(self.texts)


# ------------------------------------------------------------------ reading


def load(task: str, data: str) -> dict[str, Examples]:
    """The splits `train`, `dev` and, of MNLI, `dev_mismatched`.

    Args:
        data: a folder in GLUE's layout, or the id of GLUE on the hub.
    Raises:
        UserError: a missing folder, file or column, an empty split, a short line (in QQP's training
            file, too many of them), or a label that the task does not have; it names the file and
            the line.
    """
    if not is_folder(data):
        return _from_hub(TASKS[task], task, data)
    spec, folder = TASKS[task], _folder(task, data)
    if task == "mrpc" and not (folder / "train.tsv").is_file():
        return _split_mrpc(spec, folder)
    splits = {"train": _examples(spec, folder / "train.tsv", spec.broken_lines)}
    return splits | {name: _examples(spec, folder / file) for name, file in spec.dev}


def load_tests(task: str, data: str) -> dict[str, list[tuple[str, ...]]]:
    """The texts of the available test splits, by the names of `Task.tests`.

    Raises:
        UserError: a column is missing, or a line is short.
    """
    spec = TASKS[task]
    if not is_folder(data):
        return _tests_from_hub(spec, task, data)
    paths = {name: _folder(task, data) / file for name, file in spec.tests.items()}
    found = {}
    for name, path in paths.items():
        if path.is_file():
            found[name] = [tuple(row) for _, row in _rows(path, spec.texts)]
    return found


def is_folder(data: str) -> bool:
    """True if `data` is a local folder, False if it is an id on the hub.

    Raises:
        UserError: it is neither.
    """
    if Path(data).is_dir():
        return True
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", data):
        raise UserError(f"data.source={data} is missing: there is no such folder")
    return False


def files(task: str, data: str) -> list[Path]:
    """The existing files that `load` and `load_tests` read from a folder.

    Raises:
        UserError: the task's own folder is missing.
    """
    spec = TASKS[task]
    names = ["train.tsv", *(file for _, file in spec.dev), *_MRPC_FILES, *spec.tests.values()]
    paths = [_folder(task, data) / name for name in names]
    return [path for path in paths if path.is_file()]


def check_present(tasks: Sequence[str], data: str) -> None:
    """Raise a UserError that names the tasks whose folders are not in `data`, if there are any."""
    present = [task for task in tasks if (Path(data) / TASKS[task].folder).is_dir()]
    if absent := [f"{t} ({TASKS[t].folder})" for t in tasks if t not in present]:
        remedy = (
            f"set recipe.tasks=[{','.join(present)}] to run those that are there"
            if present
            else "it must have GLUE's own layout"
        )
        raise UserError(
            f"data.source={data} lacks the folders of {len(absent)} of {len(tasks)} tasks: "
            f"{', '.join(absent)}; {remedy}"
        )


def content_hash(paths: Sequence[Path]) -> str:
    """Hash of the content of files, 16 hex digits."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(bytes.fromhex(file_hash(path)))
    return digest.hexdigest()[:16]


def _folder(task: str, data: str) -> Path:
    folder = Path(data) / TASKS[task].folder
    if not folder.is_dir():
        raise UserError(
            f"{folder} is missing: data.source={data} must have GLUE's own layout, with the folder "
            f"{TASKS[task].folder} for task={task}"
        )
    return folder


# Microsoft's original file of MRPC, and GLUE's list of its pairs that form the dev split.
_MRPC_FILES = ("msr_paraphrase_train.txt", "dev_ids.tsv")


def _split_mrpc(spec: Task, folder: Path) -> dict[str, Examples]:
    full, ids = (folder / name for name in _MRPC_FILES)
    if not full.is_file() or not ids.is_file():
        raise UserError(f"{folder} has neither train.tsv nor {full.name} with {ids.name}")
    in_dev = {tuple(pair) for _, pair in _rows(ids, ("0", "1"), ("0", "1"))}
    rows: dict[str, list[tuple[int, list[str]]]] = {"train": [], "dev": []}
    for number, fields in _rows(full, ("#1 ID", "#2 ID", *spec.texts, spec.label)):
        pair = fields[0], fields[1]
        rows["dev" if pair in in_dev else "train"].append((number, fields[2:]))
    return {name: _parse(spec, full, own) for name, own in rows.items()}


def _examples(spec: Task, path: Path, broken_lines: bool = False) -> Examples:
    broken: list[int] | None = [] if broken_lines else None
    examples = _parse(spec, path, _rows(path, (*spec.texts, spec.label), spec.header, broken))
    lines = len(examples) + len(broken or [])
    if broken and len(broken) > MAX_BROKEN * lines:
        raise UserError(
            f"{path}: {len(broken)} of {lines} lines have too few fields, the first of them line "
            f"{broken[0]}; more than {MAX_BROKEN:.0%} means that the file is damaged"
        )
    return replace(examples, left_out=len(broken or []))


def _parse(spec: Task, path: Path, rows: Iterable[tuple[int, list[str]]]) -> Examples:
    """The examples of rows that consist of the texts and the label."""
    texts, labels = [], []
    for number, (*text, label) in rows:
        texts.append(tuple(text))
        labels.append(_label(spec, label, f"{path}, line {number}"))
    if not texts:
        raise UserError(f"{path} has no examples")
    return Examples(texts, np.array(labels))


def _label(spec: Task, text: str, where: str) -> int | float:
    if spec.labels:
        if text not in spec.labels:
            raise UserError(f"{where}: {text!r} is no label; it is one of {', '.join(spec.labels)}")
        return spec.labels.index(text)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 5:
        raise UserError(f"{where}: {text!r} is no label; it is a number from 0 to 5")
    return value


def _rows(
    path: Path,
    names: Sequence[str],
    header: Sequence[str] = (),
    broken: list[int] | None = None,
) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of each line with an example, and its fields in the columns `names`.

    header: the names of all columns, if the first line does not say them.
    broken: gets the numbers of short lines; without it they are errors.
    """
    if not path.is_file():
        raise UserError(f"{path} is missing")
    try:  # Microsoft's file starts with a byte order mark
        lines = path.read_bytes().decode("utf-8-sig").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: {error}") from error
    table = [line.rstrip("\r").split("\t") for line in lines]
    columns = list(header) or table[0]
    for name in names:
        if name not in columns:
            raise UserError(f"{path}, line 1: no column {name!r} among {', '.join(columns)}")
    places = [columns.index(name) for name in names]
    for number, fields in enumerate(table, 1):
        if number == 1 and not header:
            continue
        if len(fields) > max(places):
            yield number, [fields[place] for place in places]
        elif broken is not None:
            broken.append(number)
        else:
            raise UserError(
                f"{path}, line {number}: {len(fields)} fields, and column "
                f"{columns[max(places)]!r} is number {max(places) + 1}"
            )


def _from_hub(spec: Task, task: str, data: str) -> dict[str, Examples]:
    # The hub's names of our splits.
    names = {"train": "train", "dev": "validation"}
    if task == "mnli":
        names |= {"dev": "validation_matched", "dev_mismatched": "validation_mismatched"}
    dataset = load_dataset(data, task, REVISION if data == HUB else None)
    texts = spec.hub_texts or spec.texts
    splits = {}
    for ours, theirs in names.items():
        if theirs not in dataset or not {*texts, "label"} <= {*dataset[theirs].column_names}:
            raise UserError(
                f"data.source={data} has no split {theirs!r} of {task} with columns "
                f"{', '.join(texts)}, label"
            )
        split = dataset[theirs]
        labels = np.array(split["label"])
        if spec.labels and not ((labels >= 0) & (labels < len(spec.labels))).all():
            raise UserError(
                f"data.source={data}, {task}, {theirs}: a label is none of 0 to "
                f"{len(spec.labels) - 1}"
            )
        columns = [split[name] for name in texts]
        splits[ours] = Examples(list(zip(*columns, strict=True)), labels)
    return splits


def _tests_from_hub(spec: Task, task: str, data: str) -> dict[str, list[tuple[str, ...]]]:
    names = {"MNLI-m": "test_matched", "MNLI-mm": "test_mismatched"}
    dataset = load_dataset(data, task, REVISION if data == HUB else None)
    splits = {name: dataset.get(names.get(name, "test")) for name in spec.tests if name != "AX"}
    if "AX" in spec.tests and data == HUB:
        splits["AX"] = load_dataset(data, "ax", REVISION)["test"]
    texts = spec.hub_texts or spec.texts
    return {
        name: list(zip(*(split[column] for column in texts), strict=True))
        for name, split in splits.items()
        if split is not None
    }


# ------------------------------------------------------------------ predictions and metrics


def predictions(task: str, logits: np.ndarray) -> np.ndarray:
    """The predicted classes (STS-B: numbers) [n] of logits [n, n_labels]."""
    return logits.argmax(axis=1) if TASKS[task].labels else logits[:, 0]


def written(task: str, predicted: np.ndarray) -> list[str]:
    """Predictions in the form that GLUE's server accepts."""
    labels = TASKS[task].labels
    if not labels:
        return [f"{value:.3f}" for value in predicted.clip(0.0, 5.0)]
    return [labels[int(value)] for value in predicted]


def metrics(
    task: str, predicted: dict[str, np.ndarray], examples: dict[str, Examples]
) -> dict[str, float]:
    """All metrics of a task in percent, by dev split, and `score`, the task's main metric.

    A correlation is undefined if predictions or labels are all equal; it then counts as 0.
    """
    labels = examples["dev"].labels
    if task == "cola":
        from sklearn.metrics import matthews_corrcoef

        result = {"matthews": matthews_corrcoef(labels, predicted["dev"])}
    elif task == "stsb":
        from scipy.stats import pearsonr, spearmanr

        constant = np.ptp(predicted["dev"]) == 0 or np.ptp(labels) == 0
        both = {"spearman": spearmanr, "pearson": pearsonr}
        result = {
            name: 0.0 if constant else statistic(predicted["dev"], labels).statistic
            for name, statistic in both.items()
        }
    elif task in ("mrpc", "qqp"):
        from sklearn.metrics import f1_score

        result = {
            "f1": f1_score(labels, predicted["dev"], zero_division=0.0),
            "accuracy": (predicted["dev"] == labels).mean(),
        }
    else:
        result = {"accuracy": (predicted["dev"] == labels).mean()}
        if task == "mnli":
            other = predicted["dev_mismatched"] == examples["dev_mismatched"].labels
            result["accuracy_mismatched"] = other.mean()
    percent = {name: 100.0 * float(value) for name, value in result.items()}
    return {"score": next(iter(percent.values())), **percent}
