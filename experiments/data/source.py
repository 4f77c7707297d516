"""The data source that the trainer takes its batches from: text, masked text, images or crops.

A batch is a dict of tensors, the keyword arguments of the model, whose first dim is the sample, on
the CPU or where the model is: `model(**batch)` returns (output, loss), the loss a mean over the
batch's targets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

Batch = dict[str, Tensor]
# Optimizer step, and the indices of samples in that step's batch over all ranks and micro-batches.
Request = tuple[int, range]


class TrainingSource(Protocol):
    """Training batches of one data set, for one shape of sample.

    A source that may leave out samples has one attribute more, `skipped`: a set of int, the indices
    in the training split of those that `batches` has met so far and left out. A trainer keeps them
    in its checkpoints, and joins those of all ranks, with `update`.
    """

    @property
    def tokens_per_sample(self) -> int:
        """Rows that a sample gives to a linear layer of the model; a mean where they differ."""

    @property
    def directory(self) -> Path:
        """The folder of the data, for messages."""

    @property
    def fingerprint(self) -> str:
        """Hash of the data. Checkpoints and results of other data are not used."""

    @property
    def unit(self) -> str:
        """The unit of a training's speed: `tokens`, or `images` for samples."""

    @property
    def one_shape(self) -> bool:
        """True if all batches of as many samples have the same shapes."""

    def batches(self, requests: Iterable[Request]) -> Iterator[Batch]:
        """One batch for each request, in order.

        A batch is a pure function of the seed and its request, so ranks, micro-batches and a
        resumed run that ask for their share see exactly what one process would see. Requests may be
        read ahead.
        """


class Source(TrainingSource, Protocol):
    """Training batches, and held-out ones to evaluate on."""

    @property
    def eval_size(self) -> int:
        """Number of evaluation samples in the data."""

    def eval_batches(self, count: int, batch_size: int) -> Iterator[Batch]:
        """The fixed `count` evaluation samples, at most `eval_size`, whatever `batch_size` is."""

    def score(self, output: Any, loss: Tensor, batch: Batch) -> tuple[dict[str, Tensor], int]:
        """(sums over the counted targets by metric, their number) of one evaluation batch.

        `loss` is always among the metrics; a sum of it is `loss * number`.
        """

    def describe(self) -> dict[str, Any]:
        """The data's entry in `result.json`, under `corpus`: `name`, `splits`, hashes, and how many
        samples were left out."""
