"""Grey images in memory: the batches are those of the transforms."""

import numpy as np
import pytest
import torch

from experiments.images.dataset import Arrays, ImageConfig
from experiments.images.memory import GreyImages, mixed
from experiments.images.multicrop import crop_transform
from experiments.images.source import ImageSource
from models.dino import DinoConfig
from models.vit import ViTConfig

SIZE = 8
PLAIN = {
    "image_size": SIZE, "mean": (0.3, 0.4, 0.5), "std": (0.2, 0.3, 0.4), "crop_pct": 1.0,
    "crop_scale": None, "flip": 0.0, "rand_augment": None, "color_jitter": 0.0,
    "random_erasing": 0.0, "mixup": 0.0, "cutmix": 0.0, "label_smoothing": 0.0, "repeats": 1,
}  # fmt: skip
SHAPE = ViTConfig(8, 1, 1, image_size=SIZE, patch_size=4, n_classes=3)


@pytest.fixture
def folder(tmp_path, write_idx):
    return write_idx(tmp_path / "idx", SIZE)


def source_of(folder, batch_size=6, seed=0, **settings):
    config = ImageConfig("mine", str(folder), **{**PLAIN, **settings})
    return ImageSource(config, SHAPE, seed, batch_size)


def test_what_needs_no_more_is_that_of_the_transforms(folder):
    held, read = source_of(folder), source_of(folder)
    assert held.memory
    read.memory = {}
    requests = [(step, range(6)) for step in range(5)]  # 2.5 epochs
    for ours, theirs in (
        (held.batches(requests), read.batches(requests)),
        (held.eval_batches(5, 2), read.eval_batches(5, 2)),
    ):
        for a, b in zip(ours, theirs, strict=True):
            assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    for settings in (
        {"rotate": 5.0}, {"crop_scale": (0.5, 1.0)}, {"random_erasing": 0.1}, {"crop_pct": 0.9},
        {"rand_augment": "rand-m9"},
    ):  # fmt: skip
        assert not source_of(folder, **settings).memory


def numbered(**settings):
    """Two images of 3 x 3 pixels, 1 to 9 and 11 to 19; neither mean nor deviation."""
    pixels = np.arange(9, dtype=np.uint8).reshape(1, 3, 3) + np.array([[[1]], [[11]]], np.uint8)
    plain = {"image_size": 3, "mean": (0.0,) * 3, "std": (1.0,) * 3}
    config = ImageConfig("mine", "unused", **{**PLAIN, **plain, **settings})
    return GreyImages(Arrays(pixels, np.array([4, 5])), config, "cpu")


def pixels_of(images, down, right, mirrored):
    """The pixels of image 1, moved and mirrored so."""
    made, labels = images._batch(*(np.array([x]) for x in (1, down, right, mirrored)))
    assert labels.tolist() == [5] and torch.equal(made[:, 0], made[:, 2])
    return (made[0, 0] * 255).round().int().tolist()


def test_shifts_and_mirroring_by_hand():
    images = numbered(shift=0.4)  # 1.2 pixels: by at most one
    assert images.margin == 1
    assert pixels_of(images, 0, 0, 0) == [[11, 12, 13], [14, 15, 16], [17, 18, 19]]
    assert pixels_of(images, 0, 0, 1) == [[13, 12, 11], [16, 15, 14], [19, 18, 17]]
    assert pixels_of(images, 1, 0, 0) == [[0, 0, 0], [11, 12, 13], [14, 15, 16]]
    assert pixels_of(images, 0, -1, 0) == [[12, 13, 0], [15, 16, 0], [18, 19, 0]]
    # As in the transforms, what is shifted is mirrored afterwards.
    assert pixels_of(images, 0, 1, 1) == [[12, 11, 0], [15, 14, 0], [18, 17, 0]]


def test_every_shift_and_both_sides_are_drawn_at_their_rates(monkeypatch):
    images = numbered(shift=0.5, flip=0.25)  # 1.5 pixels: 1/6 each of -2 and 2 at the ends
    seen = []
    monkeypatch.setattr(images, "_batch", lambda *moves: seen.append(moves))
    count = 20_000
    images.augmented(np.zeros(count, dtype=np.int64), 3, 7, range(count))
    [(_, down, right, mirrored)] = seen
    # np.rint takes -1.5 and 1.5, of probability 0, to even numbers.
    for moves in (down, right):
        shares = [(moves == k).mean() for k in (-1, 0, 1)]
        assert set(moves.tolist()) == {-1, 0, 1}
        # Four standard deviations of a share of 1/3.
        assert shares == pytest.approx([1 / 3] * 3, abs=4 * (2 / 9 / count) ** 0.5)
    assert mirrored.mean() == pytest.approx(0.25, abs=4 * (3 / 16 / count) ** 0.5)
    assert abs(np.corrcoef([down, right, mirrored])[np.triu_indices(3, 1)]).max() < 4 / count**0.5


def test_neighbours_are_mixed_by_their_shares():
    """80 images whose pixels tell which they are and where: mixup is a weighted mean, CutMix
    exchanges a rectangle, whose share is that of its area."""
    x = torch.arange(80 * 64.0).view(80, 1, 8, 8).expand(-1, 3, -1, -1)
    labels, neighbour = torch.arange(80) % 3, x[torch.arange(80) ^ 1]
    one, other = torch.eye(3)[labels], torch.eye(3)[labels[torch.arange(80) ^ 1]]
    for settings in ({"mixup": 0.8}, {"cutmix": 1.0, "label_smoothing": 0.3}):
        config = ImageConfig("mine", "unused", **{**PLAIN, **settings})
        made, target = mixed(x, labels, 3, config, 0, 5, 0)
        if config.mixup:
            share = (target * one).sum(1)  # neighbours have different classes
            weight = share[:, None, None, None]
            torch.testing.assert_close(made, weight * x + (1 - weight) * neighbour)
        else:
            cut = made != x
            assert torch.equal(made[cut], neighbour[cut])
            assert torch.equal(cut, cut.any(3, keepdim=True) & cut.any(2, keepdim=True))
            share = 1 - cut.float().mean((1, 2, 3))
        assert torch.equal(share[::2], share[1::2]) and len(share.unique()) > 5
        off = config.label_smoothing / 3
        expected = share[:, None] * one + (1 - share)[:, None] * other
        torch.testing.assert_close(target, off + (1 - config.label_smoothing) * expected)


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
