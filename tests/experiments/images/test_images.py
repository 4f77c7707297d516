"""Images: folders and the digits, order, augmentation, mixing, workers, scores, bad input."""

import io
import os
import signal
from collections import Counter
from shutil import rmtree

import numpy as np
import pytest
import torch
from PIL import Image

from experiments.images import dataset as images
from experiments.images.dataset import CorruptImage, ImageConfig, load_images
from experiments.images.source import ImageSource, train_transform
from experiments.images.stream import read_ahead
from experiments.support.errors import UserError
from models.vit import ViTConfig

PLAIN = {
    "crop_scale": None,
    "flip": 0.0,
    "rand_augment": None,
    "color_jitter": 0.0,
    "random_erasing": 0.0,
    "mixup": 0.0,
    "cutmix": 0.0,
    "label_smoothing": 0.0,
    "repeats": 1,
    "mean": (0.0, 0.0, 0.0),
    "std": (1.0, 1.0, 1.0),
    "crop_pct": 1.0,
}
TRAIN, VAL = 5, 2  # images per class


def write_folder(root, classes=("cat", "dog", "owl")):
    """ImageNet's layout; an image is grey throughout, its level tells which one it is."""
    level = 0
    for split, count in (("train", TRAIN), ("val", VAL)):
        for name in classes:
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                level += 5
                path = root / split / name / f"{name}_{i}.png"
                Image.new("RGB", (12, 10), (level, level, level)).save(path)
    return root


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "pets")


def source_of(folder, *, batch_size=6, seed=0, workers=0, **settings):
    config = ImageConfig("pets", str(folder), image_size=8, **{**PLAIN, **settings})
    return ImageSource(config, shape(), seed, batch_size, workers)


def shape(n_classes=3, image_size=8):
    return ViTConfig(8, 1, 1, image_size=image_size, patch_size=4, n_classes=n_classes)


def levels(batch):
    return (batch["input"].mean((1, 2, 3)) * 255).round().int().tolist()


def requests(steps, batch_size, parts=1):
    size = batch_size // parts
    return [(s, range(p * size, (p + 1) * size)) for s in range(steps) for p in range(parts)]


def joined(batches):
    batches = list(batches)
    return {key: torch.cat([b[key] for b in batches]) for key in batches[0]}


# ---- Data sets


def test_a_folder_in_imagenets_layout_is_known_by_names_sizes_and_content(folder, tmp_path):
    def load(root):
        return load_images(ImageConfig("pets", str(root)))

    data = load(folder)
    assert data.classes == ("cat", "dog", "owl")
    assert data.train.labels.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert data.val.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert data.train.where(6) == str(folder / "train" / "dog" / "dog_1.png")
    image = data.train.open(6)
    assert (image.mode, image.size, image.getpixel((0, 0))) == ("RGB", (12, 10), (35, 35, 35))
    again = write_folder(tmp_path / "elsewhere")
    assert load(again).fingerprint == data.fingerprint
    (folder / "val" / "cat" / "cat_0.png").rename(folder / "val" / "cat" / "cat_9.png")
    assert load(folder).fingerprint != data.fingerprint
    path = again / "train" / "owl" / "owl_0.png"
    content = path.read_bytes()
    for changed in (content[:-1] + bytes([content[-1] ^ 1]), content + b"\0"):
        path.write_bytes(changed)
        assert load(again).fingerprint != data.fingerprint


def test_the_digits_hold_out_400_of_1797_by_class():
    data = load_images(ImageConfig("digits", "digits", image_size=32))
    train, val = data.train.labels, data.val.labels
    assert (len(train), len(val), len(data.classes)) == (1397, 400, 10)
    counts = np.bincount(np.concatenate([train, val]))
    # Stratified: each class gives its share of 400, rounded up or down.
    assert (np.abs(np.bincount(val) - 400 * counts / 1797) < 1).all()
    image = data.val.open(0)
    assert (image.mode, image.size) == ("RGB", (32, 32))
    assert np.ptp(np.asarray(image)) > 200  # ink on paper
    # The 17 levels of the digits, which are 8 pixels wide, fill the range of bytes.
    levels = np.unique(load_images(ImageConfig("digits", "digits", image_size=8)).train.pixels)
    assert len(levels) == 17 and np.abs(levels - 255 * np.arange(17) / 16).max() <= 0.5


def test_a_data_set_of_the_hub(monkeypatch):
    datasets, asked = pytest.importorskip("datasets"), []
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    made = {}
    for name, first, labels in (("train", 1, [0, 1, 0]), ("validation", 4, [0, 1])):
        pictures = [Image.new("L", (9, 9), first + i) for i in range(len(labels))]
        rows = {"image": pictures, "label": labels}
        made[name] = datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))
        url = f"hf://datasets/some/pets@{'c' * 40}/{name}.parquet"
        made[name].info.download_checksums = {url: {}}

    def load_dataset(name, config, revision):
        asked.append((name, config, revision))
        return datasets.DatasetDict(made)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = load_images(ImageConfig("pets", "some/pets"))
    assert (data.classes, data.train.labels.tolist()) == (("cat", "dog"), [0, 1, 0])
    assert data.val.open(1).getpixel((0, 0)) == (5, 5, 5)
    assert data.val.where(1) == "some/pets, validation, row 1"
    assert data.describe()["revisions"] == ["c" * 40]
    load_images(ImageConfig("pets", "some/pets@0a1b2c"))
    assert asked == [("some/pets", None, None), ("some/pets", None, "0a1b2c")]
    del made["validation"]
    with pytest.raises(UserError, match=r"some/pets has the splits train; it needs"):
        load_images(ImageConfig("pets", "some/pets"))


def test_a_file_that_a_program_would_draw_is_no_image(monkeypatch):
    """Pillow knows a format by its first bytes, and gives EPS to Ghostscript."""
    from PIL import EpsImagePlugin

    started, file = [], io.BytesIO()
    Image.new("RGB", (6, 6)).save(file, "EPS")
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *a, **_: started.append(a))
    with pytest.raises(CorruptImage, match=r"x\.png is no image: it is none of JPEG, PNG"):
        images.decode(file.getvalue(), "x.png")
    assert not started


# ---- Order


def test_an_epoch_shows_every_image_once_and_epochs_differ(folder):
    source = source_of(folder, batch_size=5)
    epochs = [levels(joined(source.batches(requests(9, 5)[i : i + 3]))) for i in (0, 3, 6)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(5, 80, 5))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    other = levels(joined(source_of(folder, batch_size=5, seed=1).batches(requests(3, 5))))
    assert other != epochs[0]


def test_repeated_augmentation_shows_an_image_three_times_in_a_batch(folder):
    source = source_of(folder, batch_size=6, repeats=3)
    epoch = [levels(batch) for batch in source.batches(requests(8, 6))][:7]
    for batch in epoch:
        assert sorted(Counter(batch).values()) == [3, 3]
        assert all(a != b for a, b in zip(batch[::2], batch[1::2], strict=True))  # mixed pairs
    counts = Counter(level for batch in epoch for level in batch)
    assert len(counts) == 14 and set(counts.values()) == {3}  # 7 steps of 2 of the 15 images


# ---- Targets and scores


def test_mixing_mixes_neighbours_with_complementary_shares(folder):
    plain = joined(source_of(folder, batch_size=8).batches(requests(6, 8)))
    level, of_class = plain["input"].mean((1, 2, 3)), torch.eye(3)[plain["target"]]
    other = torch.arange(48) ^ 1  # the neighbour
    for kind in ({"mixup": 0.8}, {"cutmix": 1.0}, {"mixup": 0.8, "cutmix": 1.0}):
        mixed = joined(source_of(folder, batch_size=8, **kind).batches(requests(6, 8)))
        shares = (mixed["input"].mean((1, 2, 3)) - level[other]) / (level - level[other])
        expected = shares[:, None] * of_class + (1 - shares)[:, None] * of_class[other]
        torch.testing.assert_close(mixed["target"], expected, rtol=0, atol=2e-5)
        torch.testing.assert_close(shares, shares[other], rtol=0, atol=2e-5)
        assert len({round(share, 4) for share in shares.tolist()}) > 8  # each pair has its own
        # Every image here is of one level: mixup leaves it so, cutmix shows two.
        found = {bool(levels) for levels in mixed["input"].flatten(1).std(1) > 1e-3}
        assert found == {{"mixup": False, "cutmix": True}[name] for name in kind}


def test_scores_by_hand(folder):
    source = source_of(folder)
    logits = torch.tensor(
        [
            [6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0],  # right: first
            [6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0],  # right: fifth
            [6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0],  # right: sixth
            [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0],  # right: first
        ]
    )
    batch = {"input": torch.zeros(4), "target": torch.tensor([0, 4, 5, 6])}
    sums, number = source.score(logits, torch.tensor(0.5), batch)
    assert number == 4
    assert {k: v.item() for k, v in sums.items()} == {"loss": 2.0, "top1": 200.0, "top5": 300.0}
    few, _ = source.score(logits[:, :3], torch.tensor(0.5), {"target": torch.tensor([0, 2, 1, 1])})
    assert (few["top1"].item(), few["top5"].item()) == (100.0, 400.0)


def test_evaluation_images_are_evenly_spaced(folder):
    source, first = source_of(folder), 3 * TRAIN * 5
    assert levels(joined(source.eval_batches(3, 2))) == [first + 5, first + 15, first + 25]
    assert joined(source.eval_batches(6, 4))["target"].tolist() == [0, 0, 1, 1, 2, 2]


def test_evaluation_resizes_and_crops_the_centre(folder):
    pixels = np.zeros((40, 40, 3), dtype=np.uint8)
    pixels[10:30, 10:30] = 200
    Image.fromarray(pixels).save(folder / "val" / "cat" / "cat_0.png")
    source = source_of(folder, crop_pct=0.5)  # resized to 16, the middle 8 of it kept
    image = next(source.eval_batches(1, 1))["input"][0]
    assert image.shape == (3, 8, 8)
    torch.testing.assert_close(image[:, 2:6, 2:6], torch.full((3, 4, 4), 200 / 255))


# ---- Bad input


def corrupt(folder):
    """Cut off one training image, and put text in place of another."""
    first, second = folder / "train" / "dog" / "dog_1.png", folder / "train" / "cat" / "cat_2.png"
    rows = np.random.default_rng(0).integers(0, 256, (60, 60, 3), dtype=np.uint8)
    Image.fromarray(rows).save(first)
    first.write_bytes(first.read_bytes()[:4000])
    second.write_text("<html>not found</html>")
    return first, second


def under_fire(number):
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    return {"input": torch.tensor(number)}


def test_a_signal_to_all_processes_of_a_run_leaves_its_readers_at_work():
    batches = read_ahead(under_fire, [3, 4, 5], 1, set())
    assert [int(batch["input"]) for batch in batches] == [3, 4, 5]


@pytest.mark.parametrize("workers", [0, 2])
def test_corrupt_images_end_training_or_are_skipped_and_counted(folder, workers):
    before = levels(joined(source_of(folder, batch_size=5).batches(requests(3, 5))))
    names = corrupt(folder)
    with pytest.raises(UserError) as error:
        list(source_of(folder, workers=workers).batches(requests(3, 6)))
    message = str(error.value)
    assert any(str(name) in message for name in names)
    assert "corrupt" in message or "is no image" in message
    assert message.endswith("; set data.on_corrupt=skip to go on without it")
    assert "\n" not in message
    source = source_of(folder, batch_size=5, on_corrupt="skip", workers=workers)
    after = levels(joined(source.batches(requests(3, 5))))
    cycle = before * 2  # the next good one of the epoch's order; 35 and 15 are bad
    assert after == [next(x for x in cycle[i:] if x not in {35, 15}) for i in range(len(before))]
    assert source.describe()["skipped"] == 2
    assert source.skipped == {2, 6}  # cat_2 and dog_1


def test_a_folder_that_is_not_imagenets_layout_is_refused(tmp_path):
    for number, (damage, message) in enumerate((
        (lambda f: [rmtree(p) for p in (f / "train").iterdir()], "train has no classes"),
        (lambda f: rmtree(f / "val" / "dog"), "val/dog is missing"),
        (lambda f: rmtree(f / "train" / "owl"), "train/owl is missing"),
        (lambda f: [p.unlink() for p in (f / "train" / "dog").iterdir()], "train/dog holds no"),
        (lambda f: (f / "val").rename(f / "test"), "has no folder val"),
        (rmtree, "is no folder"),
    )):  # fmt: skip
        root = write_folder(tmp_path / str(number))
        damage(root)
        with pytest.raises(UserError) as error:
            load_images(ImageConfig("pets", str(root)))
        assert message in str(error.value) and str(root) in str(error.value)


def test_mixing_refuses_odd_batches(folder):
    with pytest.raises(UserError, match=r"batch_size=5.*must be even"):
        source_of(folder, batch_size=5, mixup=0.5)
    source = source_of(folder, batch_size=6, mixup=0.5)
    with pytest.raises(UserError, match=r"micro-batch of 3.*must be even"):
        next(source.batches([(0, range(3))]))


# ---- The files of conf/


def test_the_training_augmentation_is_deit_s():
    """Touvron et al. (arXiv 2012.12877, table 9); with RandAugment timm leaves out the jitter."""

    def steps(**settings):
        [chain] = train_transform(ImageConfig("imagenet", "unused", **settings)).transforms
        return {type(step).__name__: step for step in chain.transforms}

    found = steps()
    crop, erasing = found["RandomResizedCropAndInterpolation"], found["RandomErasing"]
    assert (crop.size, crop.scale, crop.ratio) == ((224, 224), (0.08, 1.0), (3 / 4, 4 / 3))
    assert found["RandomHorizontalFlip"].p == 0.5
    assert (erasing.probability, erasing.per_pixel) == (0.25, True)
    assert "RandAugment" in found and "ColorJitter" not in found
    found = steps(rand_augment=None, color_jitter=0.4, random_erasing=0.0, flip=0.0)
    color = found["ColorJitter"]
    assert color.brightness == color.contrast == color.saturation == (0.6, 1.4)
    assert not {"RandAugment", "RandomErasing", "RandomHorizontalFlip"} & found.keys()


def test_full_strength_leaves_no_bits_and_is_a_black_image():
    """RandAugment's strongest posterization keeps 0 of 8 bits, which Pillow 13 refuses."""
    from timm.data.auto_augment import RandAugment

    [chain] = train_transform(ImageConfig("imagenet", "unused", image_size=32)).transforms
    [random] = [step for step in chain.transforms if isinstance(step, RandAugment)]
    [posterize] = [op for op in random.ops if "Posterize" in op.name]
    posterize.prob, posterize.magnitude_std = 1.0, 0.0
    image = Image.fromarray(np.full((8, 8, 3), 200, dtype=np.uint8))
    for magnitude, level in (
        (10, 0),
        (5, 192),
        (0, 192),
    ):  # none, two and four of the bits are kept
        posterize.magnitude = magnitude
        assert np.asarray(posterize(image)).max() == level
