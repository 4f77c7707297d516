"""Sources of image batches: the random order of training images, their augmentation by timm, or on
the device for images in memory, and worker processes.

Shapes: B images, S = image_size pixels a side, K classes; images are RGB, normalised.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from experiments.data.source import Batch, Request, evenly_spaced, random_words
from experiments.images.dataset import SPLITS, ImageConfig, Split, load_images
from experiments.images.memory import hold, mixed
from experiments.support.errors import UserError
from models.vit import ViTConfig

if TYPE_CHECKING:
    from PIL import Image

Transform = Callable[["Image.Image"], torch.Tensor]


@lru_cache(maxsize=4)
def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """The order of `count` images in one epoch: a permutation that seed and epoch determine."""
    return np.argsort(random_words((seed, epoch), (0, 0, 0, 0), count), kind="stable")


R = TypeVar("R")


def augmented(
    split: Split,
    indices: np.ndarray,
    keys: Iterable[tuple[int, ...]],
    augment: Callable[[Image.Image], R],
) -> list[R]:
    """`augment` of each image of these indices, with random choices that depend on its key alone.
    Python's, NumPy's and torch's CPU generators are seeded for each image and restored after the
    last: saving NumPy's state takes longer than augmenting an image."""
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
    """Ignore Ctrl-C and SIGTERM, which reach all processes; the driver ends its workers itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def eval_transform(config: ImageConfig) -> Transform:
    """timm's validation transform: bicubic resize and centre crop, RGB image -> [3, S, S]."""
    from timm.data import create_transform

    usual: Any = {"interpolation": "bicubic", "mean": config.mean, "std": config.std}
    return create_transform(config.image_size, crop_pct=config.crop_pct, **usual)


class ImageBatches:
    """Base class of the sources of image batches; a subclass makes those of `_train_batch`.

    shape: of the model. batch_size: samples per optimizer step. device: that of the model.
    workers: processes that decode and augment; 0 = this process. They change no batch.
    splits: the splits to read; ("val",) for evaluation only.
    memory: each split on the device if batches can be made there, without workers; else {}.
    """

    unit, one_shape, in_memory = "images", True, True

    def __init__(
        self,
        config: ImageConfig,
        shape: ViTConfig,
        seed: int,
        batch_size: int,
        workers: int = 0,
        device: torch.device | str = "cpu",
        splits: Sequence[str] = SPLITS,
    ) -> None:
        self.images = load_images(config, splits)
        if shape.image_size != config.image_size:
            raise UserError(
                f"data.image_size={config.image_size}, but model.image_size={shape.image_size}"
            )
        self.config, self.seed, self.batch_size = config, seed, batch_size
        self.memory = hold(self.images, config, device) if self.in_memory else {}
        self.shape, self.workers = shape, 0 if self.memory else workers
        self.directory, self.fingerprint = self.images.directory, self.images.fingerprint
        self.tokens_per_sample = shape.tokens
        self.prepare = eval_transform(config)

    def plain(self, split: str, indices: np.ndarray) -> Batch:
        """The images with these indices, not augmented (`input`), and their classes (`target`)."""
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
        """Batches of `count` validation images, evenly spaced over the split (sorted by class)."""
        parts = evenly_spaced(count, batch_size, self.eval_size, self.directory)
        return read_ahead(self._eval_batch, parts, self.workers)

    def describe(self) -> dict[str, Any]:
        return {"name": self.config.name, **self.images.describe()}

    def _train_batch(self, request: Request) -> Batch:
        raise NotImplementedError

    def _eval_batch(self, indices: np.ndarray) -> Batch:
        return self.plain("val", indices)


_AUGMENT = 0  # a part of a random key: the purpose of the numbers
_ODD = "{}: mixup and cutmix mix neighbours, so batches and micro-batches must be even"


def train_transform(config: ImageConfig) -> Transform:
    """The training augmentation, RGB image -> [3, S, S], which draws from the global generators."""
    from timm.data import auto_augment, create_transform
    from torchvision.transforms import Compose

    uncropped = config.crop_scale is None
    augment: Any = create_transform(
        config.image_size,
        is_training=True,
        scale=(1.0, 1.0) if uncropped else config.crop_scale,
        ratio=(1.0, 1.0) if uncropped else None,
        hflip=config.flip,
        color_jitter=config.color_jitter or None,  # type: ignore[arg-type]
        auto_augment=config.rand_augment,
        interpolation="bicubic",
        mean=config.mean,
        std=config.std,
        re_prob=config.random_erasing,
        re_mode="pixel",
    )
    for step in augment.transforms:
        for operation in step.ops if isinstance(step, auto_augment.RandAugment) else ():
            if operation.aug_fn is auto_augment.posterize:
                operation.aug_fn = _posterize
    return Compose([*turn_and_shift(config), augment])


def turn_and_shift(config: ImageConfig) -> list[Any]:
    """The transforms that rotate and shift an image, first in every augmentation; [] without."""
    from torchvision import transforms as T

    bilinear = T.InterpolationMode.BILINEAR
    if config.shift:
        shift = (config.shift, config.shift)
        return [T.RandomAffine(config.rotate, shift, interpolation=bilinear)]
    return [T.RandomRotation(config.rotate, interpolation=bilinear)] if config.rotate else []


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """The image with only the `bits` highest bits of each value; black for 0 bits, which
    RandAugment uses at full strength and Pillow 13 and later reject."""
    from PIL import Image, ImageOps

    if bits >= 8:
        return image
    return ImageOps.posterize(image, bits) if bits else Image.new(image.mode, image.size)


class ImageSource(ImageBatches):
    """Batches of images and classes: `input` [B, 3, S, S] and `target`.

    In training `target` is the class, int64 [B], or with mixup, cutmix or label smoothing a
    distribution, fp32 [B, K]; in evaluation always the class.

    With `repeats` r, a batch of b samples has b/r images, r times each (if r does not divide b, the
    last one continues in the next batch); neighbours in the batch are different images. The random
    choices of a sample are keyed by (seed, step, index in the batch).

    Images in memory for which `experiments.images.memory` suffices are augmented on the device,
    without workers. The arguments are those of `ImageBatches`.
    """

    def __init__(self, config: ImageConfig, *others: Any, **named: Any) -> None:
        super().__init__(config, *others, **named)
        if self.shape.n_classes != (classes := len(self.images.classes)):
            raise UserError(
                f"{self.directory} has {classes} classes, the model has {self.shape.n_classes}: "
                f"set model.n_classes={classes}"
            )
        if config.mixes and self.batch_size % 2:
            raise UserError(_ODD.format(f"train.batch_size={self.batch_size}"))
        firsts, every = range(config.repeats), config.repeats
        self.order = np.concatenate([np.arange(i, self.batch_size, every) for i in firsts])
        self.augment = train_transform(config)

    def score(self, output: Tensor, loss: Tensor, batch: Batch) -> tuple[dict[str, Tensor], int]:
        """(sums of loss and of top-1 and top-5 accuracy in percent; B). output: logits [B, K]."""
        target = batch["target"]
        best = output.topk(min(5, output.shape[-1])).indices == target[:, None]
        hits = {"top1": best[:, 0].sum() * 100.0, "top5": best.sum() * 100.0}
        return {"loss": loss * len(target), **hits}, len(target)

    def _train_batch(self, request: Request) -> Batch:
        from timm.data.mixup import mixup_target

        step, samples = request
        if self.config.mixes and (samples.start % 2 or len(samples) % 2):
            raise UserError(_ODD.format(f"a micro-batch of {len(samples)} samples"))
        numbers = (step * self.batch_size + self.order[samples]) // self.config.repeats
        indices = self.indices(numbers)
        classes = len(self.images.classes)
        if self.memory:
            input, target = self.memory["train"].augmented(indices, self.seed, step, samples)
        else:
            train = self.images.splits["train"]
            keys = ((self.seed, _AUGMENT, step, i) for i in samples)
            input = torch.stack(augmented(train, indices, keys, self.augment))
            target = torch.from_numpy(train.labels[indices])
        if self.config.mixes:
            input, target = mixed(
                input, target, classes, self.config, self.seed, step, samples.start
            )
        elif self.config.label_smoothing:
            target = mixup_target(target, classes, 1.0, self.config.label_smoothing)
        return {"input": input, "target": target}
