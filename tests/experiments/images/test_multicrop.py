"""Crops of the digits and of an image folder for self-distillation."""

import numpy as np
import pytest
import torch
from PIL import Image

from experiments.images.dataset import ImageConfig, load_images
from experiments.images.multicrop import MultiCrops, crop_transform
from experiments.support.errors import UserError
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


def test_a_batch_does_not_depend_on_how_it_is_split():
    """Over micro-batches, ranks and worker processes, or taken up in the middle."""
    expected = whole(source(), (3, range(6)))
    parts = whole(source(), (3, range(1)), (3, range(1, 4)), (3, range(4, 6)))
    assert equal(parts, expected)
    workers = whole(source(workers=1), (3, range(3)), (3, range(3, 6)))
    assert equal(workers, expected)


def test_seed_and_step_choose_images_and_crops():
    expected = whole(source(), (3, range(6)))
    assert not equal(whole(source(seed=1), (3, range(6))), expected)
    assert not equal(whole(source(), (4, range(6))), expected)


def test_the_global_generators_are_left_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    whole(source(), (0, range(2)))
    assert torch.equal(torch.rand(3), expected)


def test_an_epoch_shows_every_image_once(tmp_path):
    root = folder(tmp_path)
    data = ImageConfig("two", str(root), image_size=16, mean=(0.0,) * 3, std=(1.0,) * 3, flip=0.0)
    plain = DinoConfig(
        total_steps=9,
        local_crops=0,
        global_scale=(1.0, 1.0),
        jitter=0.0,
        color=False,
        blur=False,
        solarize=0.0,
    )
    crops = source(data, plain, batch_size=2)
    seen = whole(crops, *((step, range(2)) for step in range(4)))["global_crops"]
    # An image is grey throughout, its level tells which one it is.
    levels = (seen.flatten(1).mean(1) * 255).round().int().tolist()
    assert sorted(levels) == [10, 20, 30, 40, 110, 120, 130, 140]


def test_evaluation_crops_are_fixed():
    def evaluation(batch_size, seed=0):
        batches = list(source(seed=seed).eval_batches(5, batch_size))
        return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}

    assert equal(evaluation(2), evaluation(5))
    assert equal(evaluation(5, seed=1), evaluation(5))
    held_out = len(load_images(digits()).val.labels)
    assert held_out == 400
    for count in (0, 401):
        with pytest.raises(UserError, match=r"set train\.eval_samples to 1 to 400"):
            source().eval_batches(count, 5)


def test_the_score_is_the_sum_of_the_loss():
    crops = source()
    batch = next(crops.eval_batches(4, 4))
    assert crops.score(None, torch.tensor(2.5), batch) == ({"loss": torch.tensor(10.0)}, 4)
    assert crops.tokens_per_sample == 2 * (16 + 1) + 3 * (4 + 1)
    assert crops.describe()["splits"] == {"train": {"images": 1397}, "val": {"images": 400}}


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


@pytest.mark.parametrize(("kind", "size"), [("first", 16), ("local", 8)])
def test_crops_are_resized_by_bicubic_interpolation(kind, size):
    still = DinoConfig(
        total_steps=1, local_size=8, global_scale=(1.0, 1.0), local_scale=(1.0, 1.0), jitter=0.0,
        color=False, blur=False, solarize=0.0,
    )  # fmt: skip
    pixels = np.random.default_rng(0).integers(0, 256, (12, 12, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    expected = np.asarray(image.resize((size, size), Image.Resampling.BICUBIC)) / 255
    crop = crop_transform(digits(rotate=0.0, shift=0.0), still, kind)(image)
    torch.testing.assert_close(crop, torch.from_numpy(expected).permute(2, 0, 1).float())


def test_digits_are_turned_and_shifted_but_never_mirrored():
    dino = DinoConfig(total_steps=1, blur=False, solarize=0.0)
    chain = crop_transform(digits(), dino, "first")
    assert names(chain)[:2] == ["RandomAffine", "RandomResizedCrop"]
    turned = crop_transform(digits(shift=0.0), dino, "first")
    assert names(turned)[:2] == ["RandomRotation", "RandomResizedCrop"]
    assert "RandomHorizontalFlip" not in names(chain)


def folder(root):
    """ImageNet's layout, two classes of four images, one image each for validation."""
    for number, name in enumerate(("cat", "dog")):
        for split, count in (("train", 4), ("val", 1)):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                level = 100 * number + 10 * (i + 1)
                pixels = np.full((12, 12, 3), level, np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{i}.png")
    return root


def test_corrupt_images_are_an_error_or_counted(tmp_path):
    root = folder(tmp_path)
    broken = root / "train" / "cat" / "2.png"
    broken.write_bytes(b"\x89PNG\r\n\x1a\n")
    data = {"name": "two", "source": str(root), "image_size": 16}
    with pytest.raises(UserError, match=r"2\.png is"):
        whole(source(ImageConfig(**data)), (0, range(6)), (1, range(6)))
    lenient = source(ImageConfig(**data, on_corrupt="skip"))
    whole(lenient, (0, range(6)), (1, range(6)))
    assert lenient.describe()["skipped"] == 1


def test_a_model_of_another_image_size_is_refused():
    with pytest.raises(UserError, match=r"data\.image_size=32, but model\.image_size=16"):
        source(ImageConfig("digits", "digits", image_size=32))
