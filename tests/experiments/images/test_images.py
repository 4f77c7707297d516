"""Images: their four sources, order, augmentation, mixing, workers, scores, bad input."""

import gzip
import io
import os
import signal
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

from experiments.images.dataset import ImageConfig, load_images
from experiments.images.source import ImageSource, read_ahead, train_transform
from experiments.support.errors import UserError
from models.vit import ViTConfig

PLAIN = {
    "crop_scale": None, "flip": 0.0, "rand_augment": None, "color_jitter": 0.0,
    "random_erasing": 0.0, "mixup": 0.0, "cutmix": 0.0, "label_smoothing": 0.0, "repeats": 1,
    "mean": (0.0,) * 3, "std": (1.0,) * 3, "crop_pct": 1.0,
}  # fmt: skip
TRAIN, VAL = 5, 2  # images per class
VIT = ViTConfig(8, 1, 1, image_size=8, patch_size=4, n_classes=3)


def write_folder(root):
    """ImageNet's layout; an image is grey throughout, its level tells which one it is."""
    level = 0
    for split, count in (("train", TRAIN), ("val", VAL)):
        for name in ("cat", "dog", "owl"):
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
    return ImageSource(config, VIT, seed, batch_size, workers)


def levels(batch):
    return (batch["input"].mean((1, 2, 3)) * 255).round().int().tolist()


def requests(steps, batch_size):
    return [(step, range(batch_size)) for step in range(steps)]


def joined(batches):
    batches = list(batches)
    return {key: torch.cat([b[key] for b in batches]) for key in batches[0]}


def test_a_folder_in_imagenets_layout_is_known_by_names_sizes_and_content(folder, tmp_path):
    def load(root):
        return load_images(ImageConfig("pets", str(root)))

    data = load(folder)
    assert data.classes == ("cat", "dog", "owl")
    assert data.splits["train"].labels.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert data.splits["val"].labels.tolist() == [0, 0, 1, 1, 2, 2]
    image = data.splits["train"].open(6)
    assert (image.mode, image.size, image.getpixel((0, 0))) == ("RGB", (12, 10), (35, 35, 35))
    again = write_folder(tmp_path / "elsewhere")
    assert load(again).fingerprint == data.fingerprint
    (folder / "val" / "cat" / "cat_0.png").rename(folder / "val" / "cat" / "cat_9.png")
    assert load(folder).fingerprint != data.fingerprint
    path = again / "train" / "owl" / "owl_0.png"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert load(again).fingerprint != data.fingerprint


def test_the_digits_hold_out_400_of_1797_by_class():
    data = load_images(ImageConfig("digits", "digits", image_size=32))
    train, val = data.splits["train"].labels, data.splits["val"].labels
    assert (len(train), len(val), len(data.classes)) == (1397, 400, 10)
    counts = np.bincount(np.concatenate([train, val]))
    # Stratified: each class gives its share of 400, rounded up or down.
    assert (np.abs(np.bincount(val) - 400 * counts / 1797) < 1).all()


def test_idx_files_gzipped_or_not_are_read_and_a_bad_one_is_refused(tmp_path, write_idx):
    def load_folder(root, name="mine", splits=("train", "val")):
        return load_images(ImageConfig(name, str(root), image_size=8), splits)

    noise = np.random.default_rng(0).integers(0, 40, (12, 8, 8), dtype=np.uint8)
    plain, zipped = (write_idx(tmp_path / name, zipped=name == "zip") for name in ("idx", "zip"))
    for root in (plain, zipped):
        data = load_folder(root)
        assert data.classes == ("0", "1", "2")
        assert data.splits["train"].labels.tolist() == [0, 1, 2] * 4
        image = np.asarray(data.splits["train"].open(7))
        assert np.array_equal(image, np.repeat(60 + noise[7][..., None], 3, axis=2))
        assert load_folder(root, splits=("val",)).describe()["splits"] == {"val": {"images": 6}}
    assert load_folder(plain).fingerprint == load_folder(zipped).fingerprint
    path = zipped / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-1] + b"\1"))
    assert load_folder(zipped).fingerprint != load_folder(plain).fingerprint
    images_of, labels = plain / "train-images-idx3-ubyte", plain / "train-labels-idx1-ubyte"
    for path, change in (
        (images_of, lambda c: c[:-1]),
        (labels, lambda c: c[:7] + b"\x0b" + c[8:-1]),  # 11 labels
    ):
        content = path.read_bytes()
        path.write_bytes(change(content))
        with pytest.raises(UserError, match=r"get .* anew") as error:
            load_folder(path.parent)
        assert str(path.parent) in str(error.value)
        path.write_bytes(content)


def test_a_data_set_of_the_hub(monkeypatch):
    import datasets

    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    made, asked = {}, []
    for name, first, labels in (("train", 1, [0, 1, 0]), ("validation", 4, [0, 1])):
        pictures = [Image.new("L", (9, 9), first + i) for i in range(len(labels))]
        rows = {"image": pictures, "label": labels}
        made[name] = datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))
        url = f"hf://datasets/some/pets@{'c' * 40}/{name}.parquet"
        made[name].info.download_checksums = {url: {}}

    def load_dataset(*given, revision):
        asked.append((*given, revision))
        return datasets.DatasetDict(made)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = load_images(ImageConfig("pets", "some/pets@0a1b2c"))
    assert (data.classes, data.splits["train"].labels.tolist()) == (("cat", "dog"), [0, 1, 0])
    assert data.splits["val"].open(np.int64(1)).getpixel((0, 0)) == (5, 5, 5)
    assert data.describe()["revisions"] == ["c" * 40] and asked == [("some/pets", None, "0a1b2c")]


def test_an_epoch_shows_every_image_once_and_repeats_stand_in_one_batch(folder):
    source = source_of(folder, batch_size=5)
    epochs = [levels(joined(source.batches(requests(9, 5)[i : i + 3]))) for i in (0, 3, 6)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(5, 80, 5))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    source = source_of(folder, batch_size=6, repeats=3)
    epoch = [levels(batch) for batch in source.batches(requests(7, 6))]
    for batch in epoch:
        assert sorted(Counter(batch).values()) == [3, 3]
        assert all(a != b for a, b in zip(batch[::2], batch[1::2], strict=True))  # mixed pairs
    counts = Counter(level for batch in epoch for level in batch)
    assert len(counts) == 14 and set(counts.values()) == {3}  # 7 steps of 2 of the 15 images


def test_scores_by_hand(folder):
    """The right class is first, fifth, sixth and first; and of three classes all are among five."""
    source, falling = source_of(folder), torch.arange(6.0, -1.0, -1.0)
    logits = torch.stack([falling, falling, falling, falling.flip(0)])
    batch = {"target": torch.tensor([0, 4, 5, 6])}
    sums, number = source.score(logits, torch.tensor(0.5), batch)
    assert number == 4
    assert {k: v.item() for k, v in sums.items()} == {"loss": 2.0, "top1": 200.0, "top5": 300.0}
    few, _ = source.score(logits[:, :3], torch.tensor(0.5), {"target": torch.tensor([0, 2, 1, 2])})
    assert (few["top1"].item(), few["top5"].item()) == (200.0, 400.0)


def test_evaluation_images_are_evenly_spaced_resized_and_cropped_to_the_centre(folder):
    source, first = source_of(folder), 3 * TRAIN * 5
    assert levels(joined(source.eval_batches(3, 2))) == [first + 5, first + 15, first + 25]
    assert joined(source.eval_batches(6, 4))["target"].tolist() == [0, 0, 1, 1, 2, 2]
    pixels = np.zeros((40, 40, 3), dtype=np.uint8)
    pixels[10:30, 10:30] = 200
    Image.fromarray(pixels).save(folder / "val" / "cat" / "cat_0.png")
    source = source_of(folder, crop_pct=0.5)  # resized to 16, the middle 8 of it kept
    image = next(source.eval_batches(1, 1))["input"][0]
    assert image.shape == (3, 8, 8)
    torch.testing.assert_close(image[:, 2:6, 2:6], torch.full((3, 4, 4), 200 / 255))


def under_fire(number):
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    return {"input": torch.tensor(number)}


def test_a_signal_to_all_processes_of_a_run_leaves_its_readers_at_work():
    batches = read_ahead(under_fire, [3, 4, 5], 1)
    assert [int(batch["input"]) for batch in batches] == [3, 4, 5]


def test_a_file_that_is_no_image_ends_training_in_one_line(folder):
    """Pillow would give EPS to Ghostscript, whatever the file's name."""
    path, eps = folder / "train" / "dog" / "dog_1.png", io.BytesIO()
    Image.new("RGB", (6, 6)).save(eps, "EPS")
    for workers, content in ((0, path.read_bytes()[:40]), (2, b"<html>"), (0, eps.getvalue())):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"dog_1\.png cannot be read as an image"):
            list(source_of(folder, workers=workers).batches(requests(3, 6)))


def test_the_training_augmentation_is_deit_s():
    """Touvron et al. (arXiv 2012.12877, table 9); with RandAugment timm leaves out the jitter.
    RandAugment's strongest posterization keeps 0 of 8 bits, which Pillow 13 refuses."""

    [chain] = train_transform(ImageConfig("imagenet", "unused")).transforms
    found = {type(step).__name__: step for step in chain.transforms}
    crop, erasing = found["RandomResizedCropAndInterpolation"], found["RandomErasing"]
    assert (crop.size, crop.scale, crop.ratio) == ((224, 224), (0.08, 1.0), (3 / 4, 4 / 3))
    assert found["RandomHorizontalFlip"].p == 0.5
    assert (erasing.probability, erasing.per_pixel) == (0.25, True)
    assert "ColorJitter" not in found
    [posterize] = [op for op in found["RandAugment"].ops if "Posterize" in op.name]
    posterize.prob, posterize.magnitude_std = 1.0, 0.0
    image = Image.fromarray(np.full((8, 8, 3), 200, dtype=np.uint8))
    for posterize.magnitude, level in ((10, 0), (5, 192), (0, 192)):  # 0, 2 and 4 bits are kept
        assert np.asarray(posterize(image)).max() == level
