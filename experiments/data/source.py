"""The interface of data sources, from which the trainer takes batches of text or images.

A batch is a dict of tensors, the model's keyword arguments, on the CPU or on the model's device;
the first dim is the sample. `model(**batch)` returns (output, the mean loss over the targets).
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from experiments.support.errors import UserError

Batch = dict[str, Tensor]
# Optimizer step, and the indices of samples in that step's batch over all ranks and micro-batches.
Request = tuple[int, range]


def evenly_spaced(count: int, batch_size: int, available: int, directory: Path) -> list[np.ndarray]:
    """`count` of the numbers below `available`, the evaluation samples of the data in `directory`,
    in batches, int64 [batch_size]. Raises a `UserError` if there are fewer."""
    if not 1 <= count <= available:
        raise UserError(
            f"{count} evaluation samples asked for, but the validation split of {directory} holds "
            f"{available}: set train.eval_samples to 1 to {available}"
        )
    chosen = np.arange(count, dtype=np.int64) * available // count
    return [chosen[first : first + batch_size] for first in range(0, count, batch_size)]


def random_words(key: Sequence[int], counter: Sequence[int], count: Any) -> np.ndarray:
    """[count] uint64 words of Philox, a function of the key (two words), the counter (four, of
    which each gives four words) and their place."""
    at = {"key": key, "counter": counter}
    words = {name: np.array(own, dtype=np.uint64) for name, own in at.items()}
    return np.random.Philox(**words).random_raw(count)


def sample_words(
    key: Sequence[int], step: int, samples: np.ndarray, count: int, kind: int = 0
) -> np.ndarray:
    """[samples, count] words of Philox; a row depends only on key, step, kind and its sample."""
    low, high = int(samples.min()), int(samples.max()) + 1
    start, skipped = divmod(low * count, 4)  # each counter gives four words
    words = random_words(key, (start, step, kind, 0), high * count - 4 * start)
    return words[skipped:].reshape(-1, count)[samples - low]


def send(value: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on `device`. The call does not wait for the GPU to finish what was launched
    before: with several processes on one GPU, each wait also lasts for the others' work."""
    if torch.device(device).type == "cuda" and not value.is_cuda:
        value = value.pin_memory()  # from other memory the GPU copies only after what is queued
    return value.to(device, non_blocking=True)


class TrainingSource(Protocol):
    """Training batches of one data set, for one shape of sample."""

    directory: Path  # the folder of the data, for messages
    fingerprint: str  # hash of the data; checkpoints and results with another one are not used
    unit: str  # of a training's speed: `tokens`, or `images` for samples
    one_shape: bool  # all batches with equally many samples have the same shapes

    @property
    def tokens_per_sample(self) -> int:
        """The rows that a sample contributes to a linear layer's input; the mean if that varies."""

    def batches(self, requests: Iterable[Request]) -> Iterator[Batch]:
        """One batch for each request, in order.

        A batch depends only on the seed and its request, so ranks, micro-batches and a resumed run
        get exactly what one process would get. Requests may be read ahead.
        """


class Source(TrainingSource, Protocol):
    """Training batches, and held-out ones to evaluate on."""

    @property
    def eval_size(self) -> int:
        """Number of evaluation samples in the data."""

    def eval_batches(self, count: int, batch_size: int) -> Iterator[Batch]:
        """The fixed `count` evaluation samples, at most `eval_size`, whatever `batch_size` is."""

    def score(self, output: Any, loss: Tensor, batch: Batch) -> tuple[dict[str, Tensor], int]:
        """(sums over the counted targets by metric, number of targets) of one evaluation batch.

        One metric is always `loss`, whose sum is `loss * number`.
        """

    def describe(self) -> dict[str, Any]:
        """The data's entry `corpus` in `result.json`: `name`, `splits` and hashes."""
