"""GLUE, SQuAD and the user's own tasks as sequences with targets, heads and metrics for a
trainer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.config.settings import EpochConfig
from experiments.data.source import Batch, Request
from experiments.finetuning import glue, inputs, own, squad
from experiments.finetuning.config import OWN, SQUAD, FinetuneConfig
from experiments.support import checkpoint
from experiments.support.errors import UserError
from experiments.training.trainer import Trainer
from models.heads import Classifier, Head, SpanPredictor

EVAL_BATCH = 64  # sequences per forward pass, unless impl.micro_batch says


@dataclass(frozen=True)
class Encoded:
    """One sequence. ids: int32 [T]. second: index of the first token of type 1. target: class,
    number or span, as the head takes it."""

    ids: np.ndarray
    second: int
    target: Any


def _encoded(ids: list[int], second: int, target: Any) -> Encoded:
    return Encoded(np.array(ids, dtype=np.int32), second, target)


Logits = dict[str, list[np.ndarray]]  # the logits of each sequence, by split


@dataclass(frozen=True)
class Problem:
    """A task: its sequences, its metrics and its head.

    tests: test splits, whose unknown targets are 0.
    examples: number of examples by split (SQuAD has more sequences, its windows), for QQP also the
        number of `broken_lines` left out.
    pad: token id that fills shorter sequences.
    metrics: function from the logits of the dev splits, [..., outputs] per sequence, to metrics.
    files: function from the logits of dev and test splits to the texts of prediction files by name.
    head: function that adds the task's head to a pretrained model.
    labels: the names of the head's outputs, if they are classes.
    """

    train: list[Encoded]
    dev: dict[str, list[Encoded]]
    tests: dict[str, list[Encoded]]
    examples: dict[str, int]
    pad: int
    metrics: Callable[[Logits], dict[str, float]]
    files: Callable[[Logits], dict[str, str]]
    head: Callable[[Any], Head]
    labels: tuple[str, ...] = ()


def load_problem(config: FinetuneConfig, encoding: inputs.Encoding) -> Problem:
    """Read and encode the data of one task.

    Raises:
        UserError: files are missing or wrong.
    """
    make = {SQUAD: _squad, OWN: _own}.get(config.task, _glue)
    return make(config, encoding, inputs.Frame.of(encoding))


def _glue(config: FinetuneConfig, encoding: inputs.Encoding, frame: inputs.Frame) -> Problem:
    task, recipe = config.task, config.recipe
    splits = glue.load(task, config.data)
    encoded = partial(_classified, encoding, frame, recipe.max_length)
    sequences = {split: encoded(each.texts, each.labels) for split, each in splits.items()}
    tests = {name: encoded(texts) for name, texts in glue.load_tests(task, config.data).items()}

    def predicted(logits: Logits) -> dict[str, np.ndarray]:
        return {k: glue.predictions(task, np.stack(rows)) for k, rows in logits.items()}

    def files(logits: Logits) -> dict[str, str]:
        texts = {}
        for split, values in predicted(logits).items():
            columns = {"prediction": glue.written(task, values)}
            if split in splits:
                columns["label"] = glue.written(task, splits[split].labels)
            texts[f"{split}.tsv"] = _tsv(columns)
        return texts

    sizes = {split: len(examples) for split, examples in splits.items()}
    if glue.TASKS[task].broken_lines:
        sizes["broken_lines"] = splits["train"].left_out
    return Problem(
        train=sequences.pop("train"),
        dev=sequences,
        tests=tests,
        examples=sizes,
        pad=frame.pad,
        metrics=lambda logits: glue.metrics(task, predicted(logits), splits),
        files=files,
        head=lambda model: Classifier(model, glue.TASKS[task].n_labels, recipe.dropout),
        labels=glue.TASKS[task].labels,
    )


def _own(config: FinetuneConfig, encoding: inputs.Encoding, frame: inputs.Frame) -> Problem:
    recipe, columns = config.recipe, config.columns
    splits, tests, classes = own.load(config.data, columns.text, columns.label)
    encoded = partial(_classified, encoding, frame, recipe.max_length)
    labels = splits["dev"].labels

    def files(logits: Logits) -> dict[str, str]:
        texts = {}
        for split, rows in logits.items():
            table = [{"prediction": classes[row.argmax()]} for row in rows]
            if split == "dev":
                pairs = zip(table, labels, strict=True)
                table = [{**row, "label": classes[label]} for row, label in pairs]
            texts[f"{split}.csv"] = checkpoint.csv_text(table)
        return texts

    return Problem(
        train=encoded(splits["train"].texts, splits["train"].labels),
        dev={"dev": encoded(splits["dev"].texts, labels)},
        tests={name: encoded(texts) for name, texts in tests.items()},
        examples={split: len(each) for split, each in splits.items()},
        pad=frame.pad,
        metrics=lambda logits: own.metrics(np.stack(logits["dev"]).argmax(1), labels),
        files=files,
        head=lambda model: Classifier(model, len(classes), recipe.dropout),
        labels=classes,
    )


def _classified(
    encoding: inputs.Encoding,
    frame: inputs.Frame,
    max_length: int,
    texts: Sequence[tuple[str, ...]],
    labels: np.ndarray | None = None,
) -> list[Encoded]:
    """Sequences with their labels, or 0 where these are not known."""
    found = inputs.encode(encoding, frame, texts, max_length)
    targets = [0] * len(found) if labels is None else labels.tolist()
    return [_encoded(*each, target) for each, target in zip(found, targets, strict=True)]


def _squad(config: FinetuneConfig, encoding: inputs.Encoding, frame: inputs.Frame) -> Problem:
    recipe, questions = config.recipe, squad.load(config.data)

    def windows(split: str) -> list[squad.Window]:
        lengths = recipe.max_length, recipe.stride, recipe.stride_is
        return squad.windows(encoding, frame, questions[split], *lengths)

    dev = windows("dev")

    def answers(logits: Logits) -> dict[str, str]:
        return squad.best_answers(questions["dev"], dev, logits["dev"])

    return Problem(
        train=[_encoded(w.ids, w.second, w.answer) for w in windows("train")],
        dev={"dev": [_encoded(w.ids, w.second, w.answer) for w in dev]},
        tests={},
        examples={split: len(asked) for split, asked in questions.items()},
        pad=frame.pad,
        metrics=lambda logits: squad.metrics(questions["dev"], answers(logits)),
        files=lambda logits: {"dev.json": json.dumps(answers(logits), indent=1) + "\n"},
        head=SpanPredictor,
    )


def _tsv(columns: dict[str, list[str]]) -> str:
    """Columns preceded by a running number, in the form that GLUE's server accepts."""
    rows = enumerate(zip(*columns.values(), strict=True))
    lines = [("index", *columns), *((str(number), *row) for number, row in rows)]
    return "".join("\t".join(line) + "\n" for line in lines)


def collate(sequences: list[Encoded], pad: int, length: int | None) -> dict[str, Tensor]:
    """A batch padded on the right to its longest sequence, or to `length`."""
    length = length or max(len(s.ids) for s in sequences)
    ids = np.full((len(sequences), length), pad)
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence.ids)] = sequence.ids
    positions = np.arange(length)
    mask = positions < np.array([[len(s.ids)] for s in sequences])
    types = (positions >= np.array([[s.second] for s in sequences])) & mask
    return {
        "input": torch.from_numpy(ids),
        "token_types": torch.from_numpy(types.astype(np.int64)),
        "attention_mask": torch.from_numpy(mask),
        "target": torch.tensor([s.target for s in sequences]),
    }


class TaskSource:
    """The training sequences of a task, in an order that depends on the seed and the epoch.

    data, data_hash: the folder or the hub's id, and the hash of the files in a folder.
    length: the length to which batches are padded; None: each to its longest sequence.
    """

    unit = "tokens"

    def __init__(
        self,
        problem: Problem,
        train: EpochConfig,
        seed: int,
        data: str,
        data_hash: str | None,
        length: int | None,
    ) -> None:
        self.problem, self.train, self.seed, self.length = problem, train, seed, length
        self.directory, self.fingerprint = Path(data), data_hash or data
        self.one_shape = length is not None

    @property
    def tokens_per_sample(self) -> int:
        """The mean number of tokens of a sequence without padding."""
        return round(sum(len(s.ids) for s in self.problem.train) / len(self.problem.train))

    def batches(self, requests: Iterable[Request]) -> Iterator[Batch]:
        """One batch for each request, in order."""
        sequences, size = self.problem.train, self.train.batch_size
        for step, indices in requests:
            epoch, within = divmod(step, self.train.epoch_steps)
            order = _order(self.seed, epoch + 1, len(sequences))
            chosen = [sequences[order[within * size + index]] for index in indices]
            yield collate(chosen, self.problem.pad, self.length)


@lru_cache(maxsize=1)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    """The order of `count` sequences in an epoch, the first 1."""
    return np.random.default_rng([seed, epoch]).permutation(count)


class TaskMetrics:
    """The metrics of a task on its dev splits, as a trainer's `evaluation`. Ranks share the work.

    batch: sequences per forward pass; None: `EVAL_BATCH`. length: as for `TaskSource`. `logits` and
    `losses` hold those of the last evaluation, by split.
    """

    def __init__(self, problem: Problem, batch: int | None, length: int | None) -> None:
        self.problem, self.batch, self.length = problem, batch or EVAL_BATCH, length
        self.logits: Logits = {}
        self.losses: dict[str, float] = {}

    def __call__(self, trainer: Trainer) -> dict[str, float]:
        """The metrics of the trainer's model, equal on all ranks.

        Raises:
            UserError: logits are NaN.
        """
        for split, sequences in self.problem.dev.items():
            self.logits[split], self.losses[split] = self._run(trainer, split, sequences)
        return self.problem.metrics({split: self.logits[split] for split in self.problem.dev})

    @torch.no_grad()
    def files(self, trainer: Trainer) -> dict[str, str]:
        """The texts of the prediction files: for dev splits from the last evaluation, for test
        splits computed now with the same model."""
        trainer.model.eval()
        tests = {
            name: self._run(trainer, name, sequences)[0]
            for name, sequences in self.problem.tests.items()
        }
        return self.problem.files(self.logits | tests)

    def _run(
        self, trainer: Trainer, split: str, sequences: list[Encoded]
    ) -> tuple[list[np.ndarray], float]:
        """(logits of each sequence, mean loss)."""
        parts = [sequences[i : i + self.batch] for i in range(0, len(sequences), self.batch)]
        here = trainer.world
        turns = -(-len(parts) // here.size)
        # Every rank runs the model equally often; batches that are run twice count once.
        mine = [min(turn * here.size + here.rank, len(parts) - 1) for turn in range(turns)]
        found: dict[int, tuple[list[np.ndarray], float]] = {}
        for index in mine:
            batch = collate(parts[index], self.problem.pad, self.length)
            output, loss, _ = trainer.forward(batch)
            if output.isnan().any():
                raise UserError(
                    f"the model's logits on {split} are NaN after step {trainer.step}; lower "
                    "recipe.learning_rate, or choose recipe.dtype=fp32"
                )
            logits = list(output.float().cpu().numpy())
            found[index] = logits, float(loss) * len(parts[index])
        found = {i: each for own in here.all_gather(found) for i, each in own.items()}
        ordered = [found[index] for index in range(len(parts))]
        total = sum(loss for _, loss in ordered)
        return [row for logits, _ in ordered for row in logits], total / max(1, len(sequences))
