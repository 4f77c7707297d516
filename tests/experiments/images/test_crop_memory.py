"""Crops of grey images in memory, each step by hand or as torchvision has it; and of files."""

import math
from dataclasses import replace

import pytest
import torch
from torchvision.transforms import functional as TF

from experiments.images import memory as cm
from experiments.images.dataset import ImageConfig
from experiments.images.memory import GreyCrops, blurred, uniform
from experiments.images.multicrop import crop_transform, grey_crops
from models.dino import DinoConfig

S = 8
PLAIN = GreyCrops(S, (1.0, 1.0), flip=0.0, jitter=0.0, blur=(0.0,), solarize=(0.0,))
# Bicubic weights and places are rounded to fp32, and values are in [0, 1].
CLOSE = {"atol": 1e-5, "rtol": 0}


@pytest.fixture(scope="module")
def images():
    """[5, 8, 8] in [0, 1]."""
    return torch.rand(5, S, S, generator=torch.Generator().manual_seed(0))


def draws(**values):
    """The draws for one crop of each of 5 images: 0.5 but for what is given."""
    found = torch.full((5, 1, cm._CROP_DRAWS), 0.5)
    for name, value in values.items():
        found[..., getattr(cm, f"_{name.upper()}")] = value
    return found


def crop(recipe, images, **values):
    return recipe.of(images, draws(**values))[:, 0]


def test_the_whole_image_its_mirror_image_and_a_quarter(images):
    torch.testing.assert_close(crop(PLAIN, images), images, **CLOSE)
    flipped = replace(PLAIN, flip=0.6)
    torch.testing.assert_close(crop(flipped, images), images.flip(-1), **CLOSE)
    torch.testing.assert_close(crop(flipped, images, flip=0.6), images, **CLOSE)
    # Half as wide and as high, in as many pixels: nothing is interpolated.
    quarter = replace(PLAIN, size=4, scale=(0.25, 0.25))
    for left, top in ((0.0, 0.0), (1.0, 0.0), (0.5, 1.0)):
        x, y = int(4 * left), int(4 * top)
        expected = images[:, y : y + 4, x : x + 4]
        torch.testing.assert_close(crop(quarter, images, left=left, top=top), expected, **CLOSE)


def test_crops_have_their_area_and_shape_and_lie_inside():
    some = replace(PLAIN, scale=(0.1, 1.0), flip=0.5)
    drawn = uniform(500, 3, 1, 2)
    width, a, x, b, height, y = some.places(drawn).flatten(-2).unbind(-1)
    assert not a.any() and not b.any()
    assert torch.equal(width < 0, drawn[..., cm._FLIP] < 0.5)
    width, eps = width.abs(), 1e-6
    torch.testing.assert_close(width * height, 0.1 + 0.9 * drawn[..., cm._AREA])
    assert (width / height).log().abs().max() <= math.log(4 / 3) + eps
    for place, side in ((x, width), (y, height)):
        assert (place.abs() + side).max() <= 1 + eps and side.max() <= 1 + eps


def test_jitter_and_solarization_are_torchvision_s(images):
    jittered, solarized = replace(PLAIN, jitter=0.4), replace(PLAIN, solarize=(0.2,))
    drawn = {"brightness": 1.0, "contrast": 0.25}  # 1.4 and 0.8
    jitter = TF.adjust_contrast(TF.adjust_brightness(images[:, None], 1.4), 0.8)[:, 0]
    solar = TF.solarize(images[:, None], 128 / 255)[:, 0]
    for recipe, values, expected in (
        (jittered, {"jitter": 0.79, **drawn}, jitter),
        (jittered, {"jitter": 0.8, **drawn}, images),
        (solarized, {"solarize": 0.19}, solar),
        (solarized, {"solarize": 0.2}, images),
    ):
        torch.testing.assert_close(crop(recipe, images, **values), expected, **CLOSE)


def test_a_blurred_point_is_a_gaussian_and_a_constant_stays():
    point = torch.zeros(2, 31, 31)
    point[:, 15, 15] = 1
    sigma = torch.tensor([1.5, 0.0])
    found = blurred(point, sigma)
    at = torch.arange(31.0) - 15
    bell = (-at.square() / (2 * 1.5**2)).exp()
    bell = bell / bell.sum()
    torch.testing.assert_close(found[0], bell[:, None] * bell, **CLOSE)
    assert torch.equal(found[1], point[1])
    level = torch.full((1, S, S), 0.7)
    torch.testing.assert_close(blurred(level, torch.tensor([2.0])), level, **CLOSE)


def test_blur_is_drawn_by_kind_of_crop(images):
    data = ImageConfig("mine", "unused", image_size=S)
    config = DinoConfig(total_steps=1, local_crops=3, local_size=4)
    large = grey_crops(data, config, "first", "second")
    assert large == GreyCrops(S, (0.4, 1.0), 0.5, 0.4, (1.0, 0.1), (0.0, 0.2))
    small = grey_crops(data, config, *["local"] * 3)
    assert small == GreyCrops(4, (0.05, 0.4), 0.5, 0.4, (0.5,) * 3, (0.0,) * 3)
    assert grey_crops(data, replace(config, blur=False), "first").blur == (0.0,)
    some = replace(PLAIN, blur=(0.2,))
    for draw, pixels in ((1.0, 2.0), (0.5, 1.05)):
        found = crop(some, images, blur=0.1, sigma=draw)
        torch.testing.assert_close(found, blurred(images, torch.full((5,), pixels)), **CLOSE)
    torch.testing.assert_close(crop(some, images, blur=0.2, sigma=1.0), images, **CLOSE)


def test_the_augmentation_of_files_is_that_of_the_paper():
    data, dino = ImageConfig("imagenet", "unused"), DinoConfig(total_steps=1)
    common = ["RandomResizedCrop", "RandomHorizontalFlip", "RandomApply", "RandomGrayscale",
              "RandomApply"]  # fmt: skip
    rest = ["ToTensor", "Normalize"]
    for kind, size, scale, blur, more in (
        ("first", 224, (0.4, 1.0), 1.0, []),
        ("second", 224, (0.4, 1.0), 0.1, ["RandomSolarize"]),
        ("local", 96, (0.05, 0.4), 0.5, []),
    ):
        steps = crop_transform(data, dino, kind).transforms
        assert [type(step).__name__ for step in steps] == [*common, *more, *rest]
        assert (steps[0].size, tuple(steps[0].scale)) == ((size, size), scale)
        assert (steps[2].p, steps[4].p) == (0.8, blur)
        color = steps[2].transforms[0]
        found = color.brightness, color.saturation, color.hue
        assert found == ((0.6, 1.4), (0.8, 1.2), (-0.1, 0.1))
    grey = DinoConfig(total_steps=1, color=False, blur=False, solarize=0.0)
    for shift, first in ((0.1, "RandomAffine"), (0.0, "RandomRotation")):
        digits = ImageConfig("digits", "digits", flip=0.0, rotate=10.0, shift=shift)
        steps = crop_transform(digits, grey, "second").transforms
        names = [type(step).__name__ for step in steps]
        assert names == [first, "RandomResizedCrop", "RandomApply", *rest]
        assert steps[2].transforms[0].saturation is None
