"""GLUE and SQuAD as sequences with targets, heads and metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.finetuning import glue, squad
from experiments.finetuning.config import SQUAD, FinetuneConfig
from models.heads import Classifier, Head, SpanPredictor


@dataclass(frozen=True)
class Encoded:
    """ids [T]: int32. second: where tokens of type 1 begin. target: as the head takes it."""

    ids: np.ndarray
    second: int
    target: Any


def _encoded(ids: list[int], second: int, target: Any) -> Encoded:
    return Encoded(np.array(ids, dtype=np.int32), second, target)


@dataclass(frozen=True)
class Problem:
    """A task as sequences.

    examples: their numbers by split, which for SQuAD are not those of the windows, and with QQP
    that of the `broken_lines` that were left out. metrics: of the logits [..., outputs] of each
    sequence, by dev split. head: makes the model of a pretrained one.
    """

    train: list[Encoded]
    dev: dict[str, list[Encoded]]
    examples: dict[str, int]
    pad: int
    metrics: Callable[[dict[str, list[np.ndarray]]], dict[str, float]]
    head: Callable[[Any], Head]


def load_problem(config: FinetuneConfig, encoding: glue.Encoding) -> Problem:
    """Read and encode the data of one task.

    Raises:
        UserError: files are missing or wrong.
    """
    make = _squad if config.task == SQUAD else _glue
    return make(config, encoding, glue.Frame.of(encoding))


def _glue(config: FinetuneConfig, encoding: glue.Encoding, frame: glue.Frame) -> Problem:
    task, recipe = config.task, config.recipe
    splits = glue.load(task, config.data)
    sequences = {}
    for split, own in splits.items():
        encoded = glue.encode(encoding, frame, own.texts, recipe.max_length)
        labels = own.labels.tolist()
        sequences[split] = [_encoded(*e, y) for e, y in zip(encoded, labels, strict=True)]

    def metrics(logits: dict[str, list[np.ndarray]]) -> dict[str, float]:
        predicted = {k: glue.predictions(task, np.stack(rows)) for k, rows in logits.items()}
        return glue.metrics(task, predicted, splits)

    sizes = {split: len(examples) for split, examples in splits.items()}
    if glue.TASKS[task].broken_lines:
        sizes["broken_lines"] = splits["train"].left_out
    return Problem(
        train=sequences.pop("train"),
        dev=sequences,
        examples=sizes,
        pad=frame.pad,
        metrics=metrics,
        head=lambda model: Classifier(model, glue.TASKS[task].n_labels, recipe.dropout),
    )


def _squad(config: FinetuneConfig, encoding: glue.Encoding, frame: glue.Frame) -> Problem:
    recipe, questions = config.recipe, squad.load(config.data)

    def windows(split: str) -> list[squad.Window]:
        lengths = recipe.max_length, recipe.stride, recipe.stride_is
        return squad.windows(encoding, frame, questions[split], *lengths)

    dev = windows("dev")

    def metrics(logits: dict[str, list[np.ndarray]]) -> dict[str, float]:
        return squad.metrics(
            questions["dev"], squad.best_answers(questions["dev"], dev, logits["dev"])
        )

    return Problem(
        train=[_encoded(w.ids, w.second, w.answer) for w in windows("train")],
        dev={"dev": [_encoded(w.ids, w.second, w.answer) for w in dev]},
        examples={split: len(asked) for split, asked in questions.items()},
        pad=frame.pad,
        metrics=metrics,
        head=SpanPredictor,
    )


def collate(sequences: list[Encoded], pad: int, length: int | None) -> dict[str, Tensor]:
    """A batch of the longest sequence's length, or of `length`, padded on the right."""
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
