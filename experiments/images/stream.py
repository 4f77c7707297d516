"""The base of the sources of image batches: the random order of training images, seeds for their
augmentation, and worker processes."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from experiments.data.source import Batch, Request
from experiments.images.dataset import (
    SPLITS,
    CorruptImage,
    ImageConfig,
    Images,
    Split,
    load_images,
)
from experiments.images.memory import hold
from experiments.support.errors import UserError
from models.vit import ViTConfig

if TYPE_CHECKING:
    from PIL.Image import Image

_MOST_NAMED = 100  # corrupt images that are listed by name


@lru_cache(maxsize=4)
def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """The order of `count` images in one epoch: a permutation that depends only on seed and
    epoch."""
    key = np.array([seed, epoch], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")


@contextmanager
def own_draws() -> Iterator[Callable[..., None]]:
    """A context in which Python's, NumPy's and torch's CPU generators may be reseeded; afterwards
    they are restored.

    timm and torchvision draw from these three. Yields a function `seed(*key)` that reseeds all of
    them. Use one context per batch: saving NumPy's state takes longer than augmenting an image.
    """
    before = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield _seed
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.default_generator.set_state(before[2])


def _seed(*key: int) -> None:
    word = int(np.random.SeedSequence(key).generate_state(1)[0])
    random.seed(word)
    np.random.seed(word)
    torch.default_generator.manual_seed(word)


@dataclass
class Stream:
    """The training images as an endless sequence, epoch after epoch, each in its own random order.

    advice: text to add to the message about a corrupt image. skipped: indices in the split of
    corrupt images, which were replaced by the next image in the epoch's order.
    """

    split: Split
    seed: int
    skip_corrupt: bool = False
    advice: str = ""
    skipped: set[int] = field(default_factory=set)

    @classmethod
    def of_training(cls, images: Images, config: ImageConfig, seed: int) -> Stream:
        """The stream of a training split, which skips or reports corrupt images as
        `config` says."""
        advice = "; set data.on_corrupt=skip to go on without it"
        return cls(images.train, seed, config.on_corrupt == "skip", advice)

    def open(self, number: int) -> tuple[Image, int]:
        """(image, label) of image number `number` since the beginning of training."""
        count = len(self.split.labels)
        epoch, position = divmod(number, count)
        order = epoch_order(count, self.seed, epoch)
        for offset in range(count if self.skip_corrupt else 1):
            index = int(order[(position + offset) % count])
            try:
                return self.split.open(index), int(self.split.labels[index])
            except CorruptImage as error:
                if not self.skip_corrupt:
                    raise CorruptImage(f"{error}{self.advice}") from error
                self.skipped.add(index)
        raise UserError(f"none of the {count} training images can be decoded")

    def indices(self, numbers: np.ndarray) -> np.ndarray:
        """The indices in the split of the images with these numbers, int64 [B]; only for splits in
        memory, which have no corrupt images."""
        epochs, positions = np.divmod(numbers, len(self.split.labels))
        found = np.empty_like(positions)
        for epoch in np.unique(epochs):
            of_it = epochs == epoch
            order = epoch_order(len(self.split.labels), self.seed, int(epoch))
            found[of_it] = order[positions[of_it]]
        return found

    def describe(self) -> dict[str, Any]:
        """The number of corrupt images that were left out, and the first of their names, for
        `result.json`."""
        files = [self.split.where(index) for index in sorted(self.skipped)[:_MOST_NAMED]]
        return {"skipped": len(self.skipped), "skipped_files": files}


R = TypeVar("R")


def read_ahead(
    make: Callable[[R], Batch], requests: Iterable[R], workers: int, skipped: set[int]
) -> Iterator[Batch]:
    """Yield `make(request)` for each request in order; `workers` processes compute them ahead.

    skipped: the attribute of the `Stream` that `make` reads from; what the processes skip is added.
    """
    if not workers:
        yield from map(make, requests)
        return
    loader: Iterable[Any] = torch.utils.data.DataLoader(
        _Made(make, skipped),
        batch_size=None,
        sampler=requests,
        num_workers=workers,
        collate_fn=_as_it_is,
        worker_init_fn=_ignore_signals,
        generator=torch.Generator(),  # so that workers do not draw from the global generator
    )
    for made, seen in loader:
        if isinstance(made, UserError):
            raise made
        skipped |= seen
        yield made


class _Made(torch.utils.data.Dataset):
    def __init__(self, make: Callable[[Any], Batch], skipped: set[int]) -> None:
        self.make, self.skipped = make, skipped

    def __getitem__(self, request: Any) -> tuple[Batch | UserError, set[int]]:
        try:
            return self.make(request), set(self.skipped)
        except UserError as error:  # if raised here, the loader would wrap it in a traceback
            return error, set(self.skipped)


def _ignore_signals(_: int) -> None:
    """Make a worker process ignore Ctrl-C and SIGTERM, which reach the whole process group; the
    driver ends its workers itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _as_it_is(made: Any) -> Any:
    return made


class ImageBatches:
    """Base class of the sources of image batches (see experiments/data/source.py). A subclass makes
    a batch in `_train_batch` and `_eval_batch`.

    memory: each split on the model's device if batches can be made there, else {}; workers are not
        used then.

    Raises:
        UserError: the data set cannot be used, or does not fit the model.
    """

    unit, one_shape = "images", True

    def __init__(
        self,
        config: ImageConfig,
        shape: ViTConfig,
        seed: int,
        batch_size: int,
        workers: int,
        device: torch.device | str,
        splits: Sequence[str] = SPLITS,
    ) -> None:
        self.images = load_images(config, splits)
        if shape.image_size != config.image_size:
            raise UserError(
                f"data.image_size={config.image_size}, but model.image_size={shape.image_size}"
            )
        self.config, self.seed, self.batch_size = config, seed, batch_size
        self.memory = hold(self.images, config, device)
        self.workers = 0 if self.memory else workers
        self.directory, self.fingerprint = self.images.directory, self.images.fingerprint
        self.tokens_per_sample = shape.tokens

    @cached_property
    def stream(self) -> Stream:
        """The training images in their random order."""
        return Stream.of_training(self.images, self.config, self.seed)

    @property
    def skipped(self) -> set[int]:
        """Indices in the training split of the corrupt images that were left out."""
        return self.stream.skipped

    def batches(self, requests: Iterable[Request]) -> Iterator[Batch]:
        return read_ahead(self._train_batch, requests, self.workers, self.skipped)

    @property
    def eval_size(self) -> int:
        return len(self.images.val.labels)

    def eval_batches(self, count: int, batch_size: int) -> Iterator[Batch]:
        """Batches of `count` validation images, evenly spaced over the split, which is sorted by
        class.

        Raises:
            UserError: the split has fewer images.
        """
        if not 1 <= count <= self.eval_size:
            raise UserError(
                f"{count} evaluation images asked for, but the validation split of "
                f"{self.directory} holds {self.eval_size}: set train.eval_samples to 1 to "
                f"{self.eval_size}"
            )
        indices = np.arange(count) * self.eval_size // count
        parts = [indices[first : first + batch_size] for first in range(0, count, batch_size)]
        return read_ahead(self._eval_batch, parts, self.workers, set())

    def describe(self) -> dict[str, Any]:
        return {"name": self.config.name, **self.images.describe(), **self.stream.describe()}

    def _train_batch(self, request: Request) -> Batch:
        raise NotImplementedError

    def _eval_batch(self, indices: np.ndarray) -> Batch:
        raise NotImplementedError
