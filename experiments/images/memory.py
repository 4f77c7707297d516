"""Grey images in memory, of which a whole batch is shifted, mirrored, mixed and cropped on the
model's device.

Supervised training: values and probabilities are those of the transforms in
`experiments.images.source`, but the random draws differ. Mixing is timm's, except that the boxes of
CutMix have even sides, as in its released code; newer versions of timm also draw odd ones, which
take 1 % more of an image of 28 pixels.

Self-distillation: probabilities, ranges and order are those of the transforms in
`experiments.images.multicrop`, except that crops lie at fractions of pixels, brightness always
changes before contrast, and intermediate values are not rounded to 8 bits. Areas above three
quarters of the image are also as likely as smaller ones; torchvision draws again if a crop of the
drawn area and shape does not fit, so that its global crops are smaller (with areas from 0.3 to 1
their mean is 0.59, here 0.65). Grey images need no colour changes.

Shapes: B images, V crops of each, K classes, H and W pixels of an image, S pixels a side of what
the model sees.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
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
    """The images of a split on `device`, uint8, with a black margin as wide as the
    largest shift."""

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
        """`plain`, shifted and mirrored. The random choices of an image depend on seed, step and
        its position in the batch, `samples`."""
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
    """Uniform random numbers [places, count] in [0, 1); each row depends only on (seed, step, kind,
    place)."""
    words = sample_words((seed, 0), step, np.array(places), count, kind)
    return (words >> np.uint64(11)) * 2.0**-53


# ---- crops


# Columns of the random numbers of a crop, each uniform in [0, 1).
_AREA, _RATIO, _LEFT, _TOP, _FLIP, _JITTER, _BRIGHTNESS, _CONTRAST = range(8)
_BLUR, _SIGMA, _SOLARIZE, _CROP_DRAWS = range(8, 12)
_RATIOS = (3 / 4, 4 / 3)  # least and largest aspect ratio, width to height, as torchvision's
_JITTERED = 0.8  # share of the crops whose brightness and contrast change
_SIGMAS = (0.1, 2.0)  # least and largest sigma of the blur, in pixels


def uniform(count: int, views: int, *key: int) -> Tensor:
    """Uniform random numbers in [0, 1) for `count` images, fp32 [count, views, 11] on the CPU,
    which depend only on `key`."""
    word = int(np.random.SeedSequence(key).generate_state(1)[0])
    return torch.rand(count, views, _CROP_DRAWS, generator=torch.Generator().manual_seed(word))


@dataclass(frozen=True)
class GreyCrops:
    """Cuts and augments V crops of each image. size: pixels a side. scale: least and largest share
    of the image's area. flip: rate. jitter: strength. blur, solarize: a rate for each of the V
    crops."""

    size: int
    scale: tuple[float, float]
    flip: float
    jitter: float
    blur: tuple[float, ...]
    solarize: tuple[float, ...]

    def of(self, images: Tensor, draws: Tensor) -> Tensor:
        """Crops [B, V, S, S] of images [B, H, W] with values in [0, 1]; `draws` [B, V, 11] are from
        `uniform`."""
        if not draws.shape[1]:  # affine_grid does not accept empty tensors
            return images.new_empty(len(images), 0, self.size, self.size)
        draw = draws.unbind(-1)
        x = self._cut(images, self.places(draws))
        if self.jitter:
            span = (max(0.0, 1 - self.jitter), 1 + self.jitter)
            brightness, contrast = (
                torch.where(draw[_JITTER] < _JITTERED, _between(draw[i], span), 1.0)
                for i in (_BRIGHTNESS, _CONTRAST)
            )
            x = (x * brightness[..., None, None]).clamp(0, 1)
            mean = x.mean((-2, -1), keepdim=True)
            x = torch.lerp(mean, x, contrast[..., None, None]).clamp(0, 1)
        if any(self.blur):
            which = draw[_BLUR] < send(torch.tensor(self.blur), draws.device)
            x = blurred(x, torch.where(which, _between(draw[_SIGMA], _SIGMAS), 0.0))
        if any(self.solarize):
            which = draw[_SOLARIZE] < send(torch.tensor(self.solarize), draws.device)
            x = torch.where(which[..., None, None] & (x >= 128 / 255), 1 - x, x)
        return x

    def places(self, draws: Tensor) -> Tensor:
        """Affine maps [B, V, 2, 3] from the coordinates of each crop to those of its image, both
        [-1, 1]^2."""
        draw = draws.unbind(-1)
        area = _between(draw[_AREA], self.scale)
        # The aspect ratios at which a crop of this area fits into the image.
        least, most = (math.log(ratio) for ratio in _RATIOS)
        low, high = area.log().clamp(min=least), (-area.log()).clamp(max=most)
        ratio = (low + draw[_RATIO] * (high - low)).exp()
        width, height = (area * ratio).sqrt(), (area / ratio).sqrt()
        x, y = (2 * draw[_LEFT] - 1) * (1 - width), (2 * draw[_TOP] - 1) * (1 - height)
        width = torch.where(draw[_FLIP] < self.flip, -width, width)
        zero = torch.zeros_like(x)
        return torch.stack([width, zero, x, zero, height, y], -1).unflatten(-1, (2, 3))

    def _cut(self, images: Tensor, places: Tensor) -> Tensor:
        shape = (*places.shape[:2], 1, self.size, self.size)
        grid = F.affine_grid(places.flatten(0, 1), [shape[0] * shape[1], *shape[2:]], False)
        repeated = images.repeat_interleave(shape[1], 0)[:, None]
        cut = F.grid_sample(repeated, grid, "bicubic", "border", False)
        return cut.clamp(0, 1).view(shape).squeeze(2)


def blurred(x: Tensor, sigma: Tensor) -> Tensor:
    """x [..., S, S] convolved with a Gaussian of `sigma` [...] pixels, renormalised at the borders;
    sigma 0 leaves x as it is."""
    at = torch.arange(x.shape[-1], device=x.device, dtype=x.dtype)
    # With sigma = 0.02 pixels the neighbours' weight, exp(-1250), is 0.
    exponents = (at[:, None] - at).square() / (-2 * sigma.clamp(min=0.02).square()[..., None, None])
    weights = exponents.softmax(-1)
    return weights @ x @ weights.mT


def _between(draw: Tensor, limits: tuple[float, float]) -> Tensor:
    low, high = limits
    return low + draw * (high - low)
