"""Crops for self-distillation from grey images in memory, made on the device for a whole batch.

Probabilities, ranges and order are those of the transforms in `experiments.images.multicrop`,
except that crops lie at fractions of pixels, brightness always changes before contrast, and
intermediate values are not rounded to 8 bits. Areas above three quarters of the image are also as
likely as smaller ones; torchvision draws again if a crop of the drawn area and shape does not fit,
so that its global crops are smaller (with areas from 0.3 to 1 their mean is 0.59, here 0.65). Grey
images need no colour changes.

Shapes: B images, V crops of each, H and W pixels of an image, S pixels a side of a crop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.data.source import send

# Columns of the random numbers of a crop, each uniform in [0, 1).
_AREA, _RATIO, _LEFT, _TOP, _FLIP, _JITTER, _BRIGHTNESS, _CONTRAST = range(8)
_BLUR, _SIGMA, _SOLARIZE, _DRAWS = range(8, 12)
_RATIOS = (3 / 4, 4 / 3)  # least and largest aspect ratio, width to height, as torchvision's
_JITTERED = 0.8  # share of the crops whose brightness and contrast change
_SIGMAS = (0.1, 2.0)  # least and largest sigma of the blur, in pixels


def uniform(count: int, views: int, *key: int) -> Tensor:
    """Uniform random numbers in [0, 1) for `count` images, fp32 [count, views, 11] on the CPU,
    which depend only on `key`."""
    word = int(np.random.SeedSequence(key).generate_state(1)[0])
    return torch.rand(count, views, _DRAWS, generator=torch.Generator().manual_seed(word))


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
