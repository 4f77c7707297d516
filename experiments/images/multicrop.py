"""Crops for self-distillation (DINO, arXiv 2104.14294): two global and n local crops of each image.

The images and their order are those of supervised training; labels are not used. `flip`, `rotate`
and `shift` come from the data's settings (mirrored digits are no digits), the rest of the
augmentation from `DinoConfig`. Shapes: B images, S = image_size and s = local_size pixels a side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from experiments.data.source import Batch, Request
from experiments.images.dataset import ImageConfig
from experiments.images.source import ImageBatches, Transform, augmented, turn_and_shift
from models.dino import DinoConfig

if TYPE_CHECKING:
    from PIL import Image

_TRAIN, _EVAL = 2, 3  # in the key of a draw; 0 and 1 are those of supervised training
# Rates of blur and of solarization (as a share of `DinoConfig.solarize`) by kind of crop.
_BLUR = {"first": 1.0, "second": 0.1, "local": 0.5}
_SOLARIZE = {"first": 0.0, "second": 1.0, "local": 0.0}


def crop_transform(data: ImageConfig, dino: DinoConfig, kind: str) -> Transform:
    """The augmentation of a `first` or `second` global crop or of a `local` crop, from an RGB image
    of any size to [3, S, S] or [3, s, s]. It draws from the global random generators."""
    from torchvision import transforms as T

    local = kind == "local"
    size, scale = (
        (dino.local_size, dino.local_scale) if local else (data.image_size, dino.global_scale)
    )
    bicubic = T.InterpolationMode.BICUBIC
    steps = [*turn_and_shift(data), T.RandomResizedCrop(size, scale, interpolation=bicubic)]
    if data.flip:
        steps.append(T.RandomHorizontalFlip(data.flip))
    if dino.jitter:
        color = (dino.jitter / 2, dino.jitter / 4) if dino.color else (0.0, 0.0)
        steps.append(T.RandomApply([T.ColorJitter(dino.jitter, dino.jitter, *color)], p=0.8))
    if dino.color:
        steps.append(T.RandomGrayscale(p=0.2))
    if dino.blur:
        steps.append(T.RandomApply([T.Lambda(_blur)], p=_BLUR[kind]))
    if dino.solarize and _SOLARIZE[kind]:
        steps.append(T.RandomSolarize(128, p=dino.solarize * _SOLARIZE[kind]))
    return T.Compose([*steps, T.ToTensor(), T.Normalize(data.mean, data.std)])


def _blur(image: Image.Image) -> Image.Image:
    """The image blurred by a Gaussian of 0.1 to 2 pixels, drawn at random."""
    from PIL import ImageFilter

    return image.filter(ImageFilter.GaussianBlur(torch.empty(1).uniform_(0.1, 2.0).item()))


class MultiCrops(ImageBatches):
    """Batches of crops: `global_crops` [B, 2, 3, S, S] and `local_crops` [B, n, 3, s, s].

    A training sample's choices are keyed by (seed, step, index in the batch), others by index. The
    arguments are those of `ImageBatches`, after `data` the settings of the crops.
    """

    in_memory = False  # workers cut the crops

    def __init__(self, data: ImageConfig, dino: DinoConfig, *others: Any, **named: Any) -> None:
        super().__init__(data, *others, **named)
        self.dino, shape = dino, self.shape
        self.globals = [crop_transform(data, dino, kind) for kind in ("first", "second")]
        self.local = crop_transform(data, dino, "local")
        # The student sees all crops.
        local_tokens = (dino.local_size // shape.patch_size) ** 2 + 1
        self.tokens_per_sample = 2 * shape.tokens + dino.local_crops * local_tokens

    def score(self, output: Tensor, loss: Tensor, batch: Batch) -> tuple[dict[str, Tensor], int]:
        """({"loss": the sum of the loss over the batch}, B)."""
        count = len(batch["global_crops"])
        return {"loss": loss * count}, count

    def _train_batch(self, request: Request) -> Batch:
        step, samples = request
        numbers = np.arange(samples.start, samples.stop)
        indices = self.indices(step * self.batch_size + numbers)
        return self._batch("train", indices, [(self.seed, _TRAIN, step, int(n)) for n in numbers])

    def _eval_batch(self, indices: np.ndarray) -> Batch:
        return self._batch("val", indices, [(_EVAL, int(index)) for index in indices])

    def _batch(self, split: str, indices: np.ndarray, keys: list[tuple[int, ...]]) -> Batch:
        """The crops of images, whose random choices depend on their keys."""
        found = augmented(self.images.splits[split], indices, keys, self._crops)
        large, small = zip(*found, strict=True)
        return {"global_crops": torch.stack(large), "local_crops": torch.stack(small)}

    def _crops(self, image: Image.Image) -> tuple[Tensor, Tensor]:
        large = torch.stack([crop(image) for crop in self.globals])
        small = [self.local(image) for _ in range(self.dino.local_crops)]
        size = self.dino.local_size
        return large, torch.stack(small) if small else torch.empty(0, 3, size, size)
