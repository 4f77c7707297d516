"""Grey images in memory, of which whole batches are shifted, mirrored and mixed on the device.

Values and probabilities are those of the transforms in `experiments.images.source`, but the random
draws differ. Mixing is timm's, except that the boxes of CutMix have even sides, as in its released
code; newer versions of timm also draw odd ones, which take 1 % more of an image of 28 pixels.

Shapes: B images, K classes, H and W pixels of an image, S pixels a side of what the model sees.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from experiments.data.source import sample_words, send
from experiments.images.dataset import Arrays, ImageConfig, Images

_DRAWS = 3  # random numbers of a training image: shift down, shift right, mirroring
_PAIR_DRAWS = 4  # of a mixed pair: mixup or cutmix, weight, row and column of the cut's centre
_IMAGES, _PAIRS = 1, 2  # the part of a random key that says its purpose; 0 is the images' order


def hold(images: Images, config: ImageConfig, device: torch.device | str) -> dict[str, GreyImages]:
    """Each split as `GreyImages` on `device`; {} if a split is not in memory in the model's image
    size, or if augmentation needs more than shifts, mirroring and mixing."""
    held = {
        name: GreyImages(split, config, device)
        for name, split in images.splits.items()
        if isinstance(split, Arrays) and split.pixels.shape[1:] == (config.image_size,) * 2
    }
    other = config.rotate or config.color_jitter or config.random_erasing or config.rand_augment
    uncropped = config.crop_scale is None and config.crop_pct == 1
    return held if uncropped and not other and len(held) == len(images.splits) else {}


class GreyImages:
    """A split on `device`, uint8, with a black margin as wide as the largest shift."""

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
        """(normalised images [B, 3, S, S], classes [B]) of these indices."""
        return self._batch(indices, *np.zeros((_DRAWS, len(indices)), dtype=np.int64))

    def augmented(
        self, indices: np.ndarray, seed: int, step: int, samples: range
    ) -> tuple[Tensor, Tensor]:
        """`plain`, shifted and mirrored at random, by seed, step and position in `samples`."""
        draws = _uniform(_IMAGES, seed, step, samples, _DRAWS)
        down, right = np.rint((2 * draws[:, :2].T - 1) * self.reach).astype(np.int64)
        return self._batch(indices, down, right, (draws[:, 2] < self.flip).astype(np.int64))

    def _batch(
        self, indices: np.ndarray, down: np.ndarray, right: np.ndarray, mirrored: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        choices = torch.from_numpy(np.stack([indices, down, right, mirrored]))
        choices = send(choices, self.pixels.device)
        chosen, down_by, right_by, flipped = choices[:, :, None]
        at = torch.arange(self.size, device=chosen.device) + self.margin
        rows, columns = at - down_by, torch.where(flipped == 1, at.flip(0), at) - right_by
        x = self.pixels[chosen[:, :, None], rows[:, :, None], columns[:, None, :]]
        return (x[:, None] / 255 - self.mean) / self.std, self.labels[chosen[:, 0]]


def mixed(
    x: Tensor, labels: Tensor, classes: int, config: ImageConfig, seed: int, step: int, first: int
) -> tuple[Tensor, Tensor]:
    """The batch x [B, 3, S, S] with neighbours mixed (mixup or cutmix), and its targets [B, K]. The
    random choices of a pair depend on seed, step and its position in the step's batch, where the
    first image of x has position `first`."""
    from scipy.special import betaincinv

    size = x.shape[-1]
    places = range(first // 2, (first + len(x)) // 2)
    which, rank, *middle = _uniform(_PAIRS, seed, step, places, _PAIR_DRAWS).T
    both = config.mixup and config.cutmix
    cuts = which < 0.5 if both else np.full(len(which), not config.mixup)
    alpha = np.where(cuts, config.cutmix, config.mixup)
    share = betaincinv(alpha, alpha, rank)  # the share of the first image in the mixture
    reach = (size * np.sqrt(1 - share)).astype(np.int64) // 2
    middles = (size * np.stack(middle)).astype(np.int64)
    low, high = (np.clip(middles + way, 0, size) for way in (-reach, reach))
    share = np.where(cuts, 1 - np.prod(high - low, axis=0) / size**2, share)

    box = send(torch.from_numpy(np.stack([low, high])), x.device)[..., None]  # [2, 2, B / 2, 1]
    at = torch.arange(size, device=x.device)
    down, right = (at >= box[0]) & (at < box[1])
    own = send(torch.from_numpy(share).to(x.dtype), x.device)[:, None, None]
    outside = ~(down[:, :, None] & right[:, None, :])
    cut = send(torch.from_numpy(cuts), x.device)[:, None, None]
    weight = torch.where(cut, outside.to(x), own)
    off = config.label_smoothing / classes
    target = torch.full((len(x), classes), off, device=x.device)
    target.scatter_(1, labels[:, None], 1 - config.label_smoothing + off)
    return _blend(x, weight[:, None, None]), _blend(target, own)


def _blend(values: Tensor, weight: Tensor) -> Tensor:
    """Each row times `weight`, plus the other row of its pair times 1 - weight."""
    pairs = values.unflatten(0, (-1, 2))
    return (pairs * weight + pairs.flip(1) * (1 - weight)).flatten(0, 1)


def _uniform(kind: int, seed: int, step: int, places: range, count: int) -> np.ndarray:
    """Uniform random numbers [places, count] in [0, 1), by (seed, step, kind, place)."""
    words = sample_words((seed, 0), step, np.array(places), count, kind)
    return (words >> np.uint64(11)) * 2.0**-53
