"""The nine tasks of GLUE (Wang et al., arXiv 1804.07461): files, labels and metrics.

Examples come from a local folder in GLUE's own layout (`CoLA/train.tsv`, `SST-2/dev.tsv`, ...), or
from the hub (`nyu-mll/glue`). The files have no quoting: a quotation mark is a character, and a
tab always separates. Test splits have no public labels; results are those of the dev splits.

Each task has one main metric, `score`, as in Devlin et al. (arXiv 1810.04805, table 1): F1 for MRPC
and QQP, Spearman's correlation for STS-B, Matthews' for CoLA, and accuracy for the others, for MNLI
on the matched split. SLoPe's GLUE table (arXiv 2405.16325) also uses F1: its dense MRPC, 81.2, is
the F1 of always answering yes on the dev split (279 of 408 pairs are positive), whose accuracy is
68.4. FST's code reports accuracy and F1, Pearson and Spearman; all of them are recorded.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.support.errors import UserError
from experiments.support.hub import load_dataset

HUB = "nyu-mll/glue"
REVISION = "bcdcba79d07bc864c1c254ccfcedcce55bcc9a8c"  # of HUB


@dataclass(frozen=True)
class Task:
    """A task. texts, label: names of the columns in the files. hub_texts: those on the hub, if they
    differ. header: names of all columns, if the files have none.

    labels: values of the label column, by class; none for STS-B, whose label is from 0 to 5.
    """

    folder: str
    texts: tuple[str, ...]
    labels: tuple[str, ...]
    label: str = "label"
    header: tuple[str, ...] = ()
    hub_texts: tuple[str, ...] = ()

    @property
    def splits(self) -> dict[str, str]:
        """The name of each split's file, without .tsv."""
        if self.folder != "MNLI":
            return {"train": "train", "dev": "dev"}
        matched = {"train": "train", "dev": "dev_matched"}
        return {**matched, "dev_mismatched": "dev_mismatched"}


_PAIR = ("sentence1", "sentence2")
_BINARY = ("0", "1")
_ENTAILMENT = ("entailment", "not_entailment")

TASKS = {
    "cola": Task("CoLA", ("sentence",), _BINARY, header=("source", "label", "mark", "sentence")),
    "sst2": Task("SST-2", ("sentence",), _BINARY),
    "mrpc": Task("MRPC", ("#1 String", "#2 String"), _BINARY, label="Quality", hub_texts=_PAIR),
    "stsb": Task("STS-B", _PAIR, (), label="score"),
    "qqp": Task("QQP", ("question1", "question2"), _BINARY, label="is_duplicate"),
    "mnli": Task(
        "MNLI",
        _PAIR,
        ("entailment", "neutral", "contradiction"),
        label="gold_label",
        hub_texts=("premise", "hypothesis"),
    ),
    "qnli": Task("QNLI", ("question", "sentence"), _ENTAILMENT),
    "rte": Task("RTE", _PAIR, _ENTAILMENT),
    "wnli": Task("WNLI", _PAIR, _BINARY),
}


@dataclass(frozen=True)
class Examples:
    """The examples of a split: one or two texts of each; labels [n], int64 or (STS-B) float64."""

    texts: list[tuple[str, ...]]
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.texts)


# ------------------------------------------------------------------ reading


def load(task: str, data: str) -> dict[str, Examples]:
    """The splits `train`, `dev` and, of MNLI, `dev_mismatched`, from a folder or the hub."""
    if is_folder(data):
        return {split: _read(task, path) for split, path in files(task, data).items()}
    spec = TASKS[task]
    dataset = load_dataset(data, task, REVISION if data == HUB else None)
    splits = {}
    for split, file in spec.splits.items():
        rows = dataset[file.replace("dev", "validation")]
        columns = [rows[name] for name in spec.hub_texts or spec.texts]
        splits[split] = Examples([*zip(*columns, strict=True)], np.array(rows["label"]))
    return splits


def is_folder(data: str) -> bool:
    """True if `data` is a local folder, False if it is an id on the hub."""
    if Path(data).is_dir():
        return True
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", data):
        raise UserError(f"data.source={data} is missing: there is no such folder")
    return False


def files(task: str, data: str) -> dict[str, Path]:
    """The file of each split in a folder."""
    spec = TASKS[task]
    paths = {name: Path(data, spec.folder, f"{file}.tsv") for name, file in spec.splits.items()}
    for path in paths.values():
        if not path.is_file():
            raise UserError(f"{path} is missing: data.source={data} must have GLUE's own layout")
    return paths


def _read(task: str, path: Path) -> Examples:
    """The examples of a file. Short lines of QQP, as the published file has some, are left out."""
    spec, texts, labels = TASKS[task], [], []
    try:  # Microsoft's files start with a byte order mark
        lines = path.read_bytes().decode("utf-8-sig").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: {error}") from error
    table = [line.rstrip("\r").split("\t") for line in lines]
    columns = spec.header or table[0]
    if missing := {*spec.texts, spec.label}.difference(columns):
        raise UserError(f"{path}, line 1: no column {min(missing)!r} among {', '.join(columns)}")
    label, *places = (columns.index(name) for name in (spec.label, *spec.texts))
    first = 0 if spec.header else 1
    for number, fields in enumerate(table[first:], first + 1):
        if task == "qqp" and len(fields) <= max(label, *places):
            continue
        try:
            own = spec.labels.index(fields[label]) if spec.labels else float(fields[label])
            if not spec.labels and not 0 <= own <= 5:
                raise ValueError(own)
            labels.append(own)
            texts.append(tuple(fields[place] for place in places))
        except (IndexError, ValueError) as error:
            raise UserError(
                f"{path}, line {number}: {lines[number - 1]!r:.80} is no example of {task}, with "
                f"the label {', '.join(spec.labels) or 'from 0 to 5'}"
            ) from error
    return Examples(texts, np.array(labels))


# ------------------------------------------------------------------ metrics


def metrics(
    task: str, predicted: dict[str, np.ndarray], examples: dict[str, Examples]
) -> dict[str, float]:
    """All metrics of a task in percent, by dev split, and `score`, the main one. A correlation is
    undefined if predictions or labels are all equal; it then counts as 0."""
    labels = examples["dev"].labels
    accuracy = {"accuracy": (predicted["dev"] == labels).mean()}
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

        result = {"f1": f1_score(labels, predicted["dev"], zero_division=0.0), **accuracy}
    else:
        result = accuracy
        if task == "mnli":
            other = predicted["dev_mismatched"] == examples["dev_mismatched"].labels
            result["accuracy_mismatched"] = other.mean()
    percent = {name: 100.0 * float(value) for name, value in result.items()}
    return {"score": next(iter(percent.values())), **percent}
