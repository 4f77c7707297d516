"""The base of the sources of image batches: the random order of training images, seeds for their
augmentation, and worker processes."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from experiments.data.source import Batch, Request, evenly_spaced
from experiments.images.dataset import SPLITS, ImageConfig, Split, load_images
from experiments.images.memory import hold
from experiments.support.errors import UserError
from models.vit import ViTConfig

if TYPE_CHECKING:
    from PIL.Image import Image

    Transform = Callable[[Image], torch.Tensor]


@lru_cache(maxsize=4)
def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """The order of `count` images in one epoch: a permutation that depends only on seed and
    epoch."""
    key = np.array([seed, epoch], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")


R = TypeVar("R")


def augmented(
    split: Split,
    indices: np.ndarray,
    keys: Iterable[tuple[int, ...]],
    augment: Callable[[Image], R],
) -> list[R]:
    """`augment` of each image of these indices, with random choices that depend on its key alone.

    timm and torchvision draw from Python's, NumPy's and torch's CPU generators, which are seeded
    for each image and restored after the last: saving NumPy's state takes longer than augmenting
    an image.
    """
    before = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    made = []
    try:
        for index, key in zip(indices, keys, strict=True):
            image = split.open(index)
            word = int(np.random.SeedSequence(key).generate_state(1)[0])
            random.seed(word)
            np.random.seed(word)
            torch.default_generator.manual_seed(word)
            made.append(augment(image))
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.default_generator.set_state(before[2])
    return made


def read_ahead(make: Callable[[R], Batch], requests: Iterable[R], workers: int) -> Iterator[Batch]:
    """Yield `make(request)` for each request in order; `workers` processes compute them ahead."""
    if not workers:
        yield from map(make, requests)
        return
    loader: Iterable[Any] = torch.utils.data.DataLoader(
        _Made(make),
        batch_size=None,
        sampler=requests,
        num_workers=workers,
        worker_init_fn=_ignore_signals,
        generator=torch.Generator(),  # so that workers do not draw from the global generator
    )
    for made in loader:
        if isinstance(made, UserError):
            raise made
        yield made


class _Made(torch.utils.data.Dataset):
    def __init__(self, make: Callable[[Any], Batch]) -> None:
        self.make = make

    def __getitem__(self, request: Any) -> Batch | UserError:
        try:
            return self.make(request)
        except UserError as error:  # if raised here, the loader would wrap it in a traceback
            return error


def _ignore_signals(_: int) -> None:
    """Make a worker process ignore Ctrl-C and SIGTERM, which reach the whole process group; the
    driver ends its workers itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def eval_transform(config: ImageConfig) -> Transform:
    """timm's validation transform: bicubic resize and centre crop, RGB image -> [3, S, S]."""
    from timm.data import create_transform

    return create_transform(
        config.image_size,
        is_training=False,
        crop_pct=config.crop_pct,
        interpolation="bicubic",
        mean=config.mean,
        std=config.std,
    )


class ImageBatches:
    """Base class of the sources of image batches (see experiments/data/source.py). A subclass makes
    the batches of `_train_batch`.

    memory: each split on the model's device if batches can be made there, else {}; workers are not
        used then.
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
        self.prepare = eval_transform(config)

    def plain(self, split: str, indices: np.ndarray) -> Batch:
        """The images with these indices in a split, without augmentation (`input`), and their
        classes (`target`)."""
        if self.memory:
            input, target = self.memory[split].plain(indices)
            return {"input": input, "target": target}
        images = self.images.splits[split]
        input = torch.stack([self.prepare(images.open(index)) for index in indices])
        return {"input": input, "target": torch.from_numpy(images.labels[indices])}

    def indices(self, numbers: np.ndarray) -> np.ndarray:
        """The indices in the training split, int64 [B], of the images with these numbers since the
        beginning of training, in which each epoch has its own random order."""
        count = len(self.images.splits["train"].labels)
        epochs, positions = np.divmod(numbers, count)
        found = np.empty_like(positions)
        for epoch in np.unique(epochs):
            of_it = epochs == epoch
            found[of_it] = epoch_order(count, self.seed, int(epoch))[positions[of_it]]
        return found

    def batches(self, requests: Iterable[Request]) -> Iterator[Batch]:
        return read_ahead(self._train_batch, requests, self.workers)

    @property
    def eval_size(self) -> int:
        return len(self.images.splits["val"].labels)

    def eval_batches(self, count: int, batch_size: int) -> Iterator[Batch]:
        """Batches of `count` validation images, evenly spaced over the split, which is sorted by
        class."""
        indices = evenly_spaced(count, self.eval_size, self.directory)
        parts = [indices[first : first + batch_size] for first in range(0, count, batch_size)]
        return read_ahead(self._eval_batch, parts, self.workers)

    def describe(self) -> dict[str, Any]:
        return {"name": self.config.name, **self.images.describe()}

    def _train_batch(self, request: Request) -> Batch:
        raise NotImplementedError

    def _eval_batch(self, indices: np.ndarray) -> Batch:
        return self.plain("val", indices)
