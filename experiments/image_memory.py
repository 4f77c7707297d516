"""Grey images in memory, shifted and mirrored a whole batch at once on the model's device.

Values and chances are those of the transforms in `experiments.image_source`; only the draws are
others. Shapes: B images, S pixels a side.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from experiments.images import Arrays, ImageConfig, Images

_DRAWS = 3  # of a training image: down, to the right, mirrored


def hold(images: Images, config: ImageConfig, device: torch.device | str) -> dict[str, GreyImages]:
    """The splits on `device`; none unless they are in memory, at the size that the model sees, and
    nothing but shifts, mirroring and mixing is asked for."""
    held = {
        name: GreyImages(split, config, device)
        for name, split in images.splits.items()
        if isinstance(split, Arrays) and split.pixels.shape[1:] == (config.image_size,) * 2
    }
    other = config.rotate or config.color_jitter or config.random_erasing or config.rand_augment
    whole = config.crop_scale is None and config.crop_pct == 1
    return held if whole and not other and len(held) == len(images.splits) else {}


class GreyImages:
    """The images of a split on `device`, one byte a pixel, with a black margin as wide as shifts
    reach."""

    def __init__(self, split: Arrays, config: ImageConfig, device: torch.device | str) -> None:
        self.flip, self.size = config.flip, config.image_size
        self.reach = config.shift * self.size
        margin = self.margin = round(self.reach)
        pixels = np.pad(split.pixels, ((0, 0), (margin, margin), (margin, margin)))
        self.pixels = torch.from_numpy(pixels).to(device)
        self.labels = torch.from_numpy(split.labels).to(device)
        self.mean, self.std = (
            torch.tensor(x, device=device)[:, None, None] for x in (config.mean, config.std)
        )

    def plain(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """(normalised images [B, 3, S, S], classes [B])."""
        return self._batch(indices, *np.zeros((_DRAWS, len(indices)), dtype=np.int64))

    def augmented(
        self, indices: np.ndarray, seed: int, step: int, samples: range
    ) -> tuple[Tensor, Tensor]:
        """As `plain`, each image by the draws of its place `samples` in the batch of the step."""
        key = np.array([seed, 0], dtype=np.uint64)
        counter = np.array([0, step, 1, 0], dtype=np.uint64)  # the order has those of 0, 0, 0
        words = np.random.Philox(key=key, counter=counter).random_raw(_DRAWS * samples.stop)
        draws = (words[_DRAWS * samples.start :] >> np.uint64(11)).reshape(-1, _DRAWS) * 2.0**-53
        down, right = np.rint((2 * draws[:, :2].T - 1) * self.reach).astype(np.int64)
        return self._batch(indices, down, right, (draws[:, 2] < self.flip).astype(np.int64))

    def _batch(
        self, indices: np.ndarray, down: np.ndarray, right: np.ndarray, mirrored: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        choices = torch.from_numpy(np.stack([indices, down, right, mirrored]))
        chosen, down_by, right_by, flipped = choices.to(self.pixels.device)[:, :, None]
        at = torch.arange(self.size, device=chosen.device) + self.margin
        rows, columns = at - down_by, torch.where(flipped == 1, at.flip(0), at) - right_by
        x = self.pixels[chosen[:, :, None], rows[:, :, None], columns[:, None, :]]
        return (x[:, None] / 255 - self.mean) / self.std, self.labels[chosen[:, 0]]
