"""Batches of images and classes, augmented by timm, or on the device for images in memory.

Shapes: B images, S = image_size pixels a side, K classes; images are RGB, normalised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from experiments.data.source import Batch, Request
from experiments.images.dataset import SPLITS, ImageConfig
from experiments.images.memory import mixed
from experiments.images.stream import ImageBatches, augmented
from experiments.support.errors import UserError
from models.vit import ViTConfig

if TYPE_CHECKING:
    from PIL.Image import Image

    from experiments.images.stream import Transform

_AUGMENT = 0  # a part of a random key: the purpose of the numbers
_ODD = "{}: mixup and cutmix mix neighbours, so batches and micro-batches must be even"


def train_transform(config: ImageConfig) -> Transform:
    """The training augmentation, from an RGB image of any size to [3, S, S]. It draws from the
    global random generators."""
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
    """The transforms that rotate and shift an RGB image, which come first in every augmentation; []
    if neither is on."""
    from torchvision import transforms as T

    bilinear = T.InterpolationMode.BILINEAR
    if config.shift:
        shift = (config.shift, config.shift)
        return [T.RandomAffine(config.rotate, shift, interpolation=bilinear)]
    return [T.RandomRotation(config.rotate, interpolation=bilinear)] if config.rotate else []


def _posterize(image: Image, bits: int, **_: Any) -> Image:
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
    without workers.

    Args:
        shape: of the model.
        batch_size: samples per optimizer step.
        workers: processes that decode and augment; 0 = this process. They change no batch.
        device: that of the model.
        splits: the splits to read; ("val",) for evaluation only.
    """

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
        super().__init__(config, shape, seed, batch_size, workers, device, splits)
        if shape.n_classes != (classes := len(self.images.classes)):
            raise UserError(
                f"{self.directory} has {classes} classes, the model has {shape.n_classes}: set "
                f"model.n_classes={classes}"
            )
        if config.mixes and batch_size % 2:
            raise UserError(_ODD.format(f"train.batch_size={batch_size}"))
        repeats = range(config.repeats)
        self.order = np.concatenate([np.arange(i, batch_size, config.repeats) for i in repeats])
        self.augment = train_transform(config)

    def score(self, output: Tensor, loss: Tensor, batch: Batch) -> tuple[dict[str, Tensor], int]:
        """(sums over the batch of the loss, and of top-1 and top-5 accuracy in percent; B). output:
        logits [B, K]."""
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
            train, keys = (
                self.images.splits["train"],
                ((self.seed, _AUGMENT, step, i) for i in samples),
            )
            input = torch.stack(augmented(train, indices, keys, self.augment))
            target = torch.from_numpy(train.labels[indices])
        if self.config.mixes:
            input, target = mixed(
                input, target, classes, self.config, self.seed, step, samples.start
            )
        elif self.config.label_smoothing:
            target = mixup_target(target, classes, 1.0, self.config.label_smoothing)
        return {"input": input, "target": target}
