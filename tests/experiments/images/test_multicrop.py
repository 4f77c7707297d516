"""Crops of the digits and of an image folder for self-distillation."""

import torch

from experiments.images.dataset import ImageConfig
from experiments.images.multicrop import MultiCrops, crop_transform
from models.dino import DinoConfig
from models.vit import ViTConfig

SHAPE = ViTConfig(16, 1, 1, image_size=16, patch_size=4, n_classes=0, dynamic_image_size=True)
DINO = DinoConfig(total_steps=10, local_crops=3, local_size=8)


def digits(**settings):
    plain = {"mean": (0.0,) * 3, "std": (1.0,) * 3, "flip": 0.0, "rotate": 10.0, "shift": 0.1}
    return ImageConfig("digits", "digits", image_size=16, **(plain | settings))


def source(data=None, dino=DINO, seed=0, batch_size=6, workers=0):
    return MultiCrops(data or digits(), dino, SHAPE, seed, batch_size, workers)


def whole(source, *requests):
    batches = list(source.batches(requests))
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def equal(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def test_two_large_and_n_small_crops():
    batch = whole(source(), (0, range(6)))
    assert batch["global_crops"].shape == (6, 2, 3, 16, 16)
    assert batch["local_crops"].shape == (6, 3, 3, 8, 8)
    # Every crop of an image is drawn by itself.
    first, second = batch["global_crops"].unbind(1)
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    none = source(dino=DinoConfig(total_steps=10, local_crops=0, local_size=8))
    assert whole(none, (0, range(6)))["local_crops"].shape == (6, 0, 3, 8, 8)


def names(transform):
    return [type(step).__name__ for step in transform.transforms]


def test_imagenet_s_augmentation_is_that_of_the_paper():
    data = ImageConfig("imagenet", "unused")
    dino = DinoConfig(total_steps=1)
    chains = {kind: crop_transform(data, dino, kind) for kind in ("first", "second", "local")}
    common = ["RandomResizedCrop", "RandomHorizontalFlip", "RandomApply", "RandomGrayscale"]
    assert names(chains["first"])[:5] == [*common, "RandomApply"]
    sizes = [chain.transforms[0].size for chain in chains.values()]
    assert sizes == [(224, 224), (224, 224), (96, 96)]
    scales = [tuple(chain.transforms[0].scale) for chain in chains.values()]
    assert scales == [(0.4, 1.0), (0.4, 1.0), (0.05, 0.4)]
    assert [chain.transforms[4].p for chain in chains.values()] == [1.0, 0.1, 0.5]  # blur
    solarized = {kind: "RandomSolarize" in names(chain) for kind, chain in chains.items()}
    assert solarized == {"first": False, "second": True, "local": False}
    jitter = chains["local"].transforms[2]
    assert jitter.p == 0.8
    color = jitter.transforms[0]
    assert (color.brightness, color.saturation, color.hue) == ((0.6, 1.4), (0.8, 1.2), (-0.1, 0.1))
    grey = crop_transform(data, DinoConfig(total_steps=1, color=False), "local")
    color = grey.transforms[2].transforms[0]
    assert (color.brightness, color.saturation, color.hue) == ((0.6, 1.4), None, None)
    assert "RandomGrayscale" not in names(grey)


def test_digits_are_turned_and_shifted_but_never_mirrored():
    dino = DinoConfig(total_steps=1, blur=False, solarize=0.0)
    chain = crop_transform(digits(), dino, "first")
    assert names(chain)[:2] == ["RandomAffine", "RandomResizedCrop"]
    turned = crop_transform(digits(shift=0.0), dino, "first")
    assert names(turned)[:2] == ["RandomRotation", "RandomResizedCrop"]
    assert "RandomHorizontalFlip" not in names(chain)
