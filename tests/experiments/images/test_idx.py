"""Images in the idx format of MNIST: what is read, and what is refused in one line."""

import gzip

import numpy as np
import pytest

from experiments.config.run import load
from experiments.images.dataset import ImageConfig, load_images
from experiments.support.errors import UserError

TRAIN, VAL = 12, 6  # images that `write_idx` writes


def load_folder(root, name="mine", splits=("train", "val")):
    return load_images(ImageConfig(name, str(root), image_size=8), splits)


def test_a_folder_of_idx_files_gzipped_or_not(tmp_path, write_idx):
    noise = np.random.default_rng(0).integers(0, 40, (TRAIN, 8, 8), dtype=np.uint8)
    prints = set()
    for zipped in (False, True):
        root = write_idx(tmp_path / str(zipped), zipped=zipped)
        data = load_folder(root)
        assert data.classes == ("0", "1", "2")
        assert data.train.labels.tolist() == [0, 1, 2] * 4
        assert data.val.labels.tolist() == [0, 1, 2] * 2
        image = data.train.open(7)
        assert (image.mode, image.size) == ("RGB", (8, 8))
        assert np.array_equal(np.asarray(image), np.repeat(60 + noise[7][..., None], 3, axis=2))
        end = "-ubyte.gz" if zipped else "-ubyte"
        assert data.train.where(7) == f"{root}/train-images-idx3{end}, image 7"
        only = load_folder(root, splits=("val",))
        assert only.describe()["splits"] == {"val": {"images": VAL}}
        prints.add(data.fingerprint)
    assert len(prints) == 1
    labels = root / "t10k-labels-idx1-ubyte.gz"
    labels.write_bytes(gzip.compress(gzip.decompress(labels.read_bytes())[:-1] + b"\1"))
    assert load_folder(root).fingerprint not in prints


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def test_a_bad_file_is_refused_in_one_line(tmp_path, write_idx):
    root = write_idx(tmp_path / "idx")
    for name, change, message in (
        (IMAGES, lambda c: b"\0\0\x0d" + c[3:], "begins with 00 00 0d"),
        (IMAGES, lambda c: c[:9], "no idx file of uint8 in 3 dims"),
        (IMAGES, lambda _: b"", "begins with nothing"),
        (LABELS, lambda c: b"\0\0\x08\x02" + c[4:], "no idx file of uint8 in 1 dims"),
        (IMAGES, lambda c: c[:-1], "767 values follow its header 12 x 8 x 8"),
        (IMAGES, lambda c: c[:4] + b"\xff" * 12 + c[16:], "768 values follow"),
        (LABELS, lambda c: c[:7] + b"\x0b" + c[8:-1], "11 labels"),
        (LABELS, None, "has no train-labels-idx1-ubyte, gzipped"),
        (IMAGES, lambda c: c[:4] + bytes(4) + c[8:16], "holds no image"),
    ):
        content = (root / name).read_bytes()
        (root / name).unlink()
        if change is not None:
            (root / name).write_bytes(change(content))
        with pytest.raises(UserError) as error:
            load_folder(root)
        assert message in str(error.value) and str(root) in str(error.value)
        (root / name).write_bytes(content)

    zipped = write_idx(tmp_path / "zipped", zipped=True)
    path = zipped / f"{IMAGES}.gz"
    content = path.read_bytes()
    for cut in (content[:-9], b"text", content[:40] + content[44:]):
        path.write_bytes(cut)
        with pytest.raises(UserError, match="cannot be read") as error:
            load_folder(zipped)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"not those of fashion_mnist .*data\.name=") as error:
        load_folder(root, "fashion_mnist")
    assert "\n" not in str(error.value)


def test_fashion_mnist_itself():
    config = load(["model=deit_mini"]).data
    try:
        data = load_images(config)
    except UserError:
        pytest.skip("Fashion-MNIST is not installed")
    assert data.describe()["splits"] == {"train": {"images": 60_000}, "val": {"images": 10_000}}
    assert np.bincount(data.train.labels).tolist() == [6000] * 10
    pixels = data.train.pixels / 255
    assert config.mean == pytest.approx([pixels.mean()] * 3, abs=5e-4)
    assert config.std == pytest.approx([pixels.std()] * 3, abs=5e-4)
