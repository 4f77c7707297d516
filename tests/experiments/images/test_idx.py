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


@pytest.mark.parametrize("zipped", [False, True])
def test_a_folder_of_idx_files(tmp_path, write_idx, zipped):
    root = write_idx(tmp_path / "idx", zipped=zipped)
    data = load_folder(root)
    assert data.classes == ("0", "1", "2")
    assert data.train.labels.tolist() == [0, 1, 2] * 4 and data.val.labels.tolist() == [0, 1, 2] * 2
    image = data.train.open(7)
    assert (image.mode, image.size) == ("RGB", (8, 8))
    noise = np.random.default_rng(0).integers(0, 40, (TRAIN, 8, 8), dtype=np.uint8)
    assert np.array_equal(np.asarray(image), np.repeat(60 + noise[7][..., None], 3, axis=2))
    end = "-ubyte.gz" if zipped else "-ubyte"
    assert data.train.where(7) == f"{root}/train-images-idx3{end}, image 7"
    assert load_folder(root, splits=("val",)).describe()["splits"] == {"val": {"images": VAL}}


def test_the_hash_is_of_the_content_gzipped_or_not(tmp_path, write_idx):
    first = load_folder(write_idx(tmp_path / "one")).fingerprint
    assert load_folder(write_idx(tmp_path / "two", zipped=True)).fingerprint == first
    assert load_folder(write_idx(tmp_path / "three", seed=1)).fingerprint != first
    labels = tmp_path / "two" / "t10k-labels-idx1-ubyte.gz"
    labels.write_bytes(gzip.compress(gzip.decompress(labels.read_bytes())[:-1] + b"\1"))
    assert load_folder(tmp_path / "two").fingerprint != first


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def test_a_bad_file_is_refused_in_one_line(tmp_path, write_idx):
    root = write_idx(tmp_path / "idx")
    for name, change, message in (
        (IMAGES, lambda c: b"\0\0\x0d" + c[3:], "begins with 00 00 0d"),
        (IMAGES, lambda c: c[:9], "no idx file of uint8 in 3 dims"),
        (IMAGES, lambda _: b"", "begins with nothing"),
        (LABELS, lambda c: b"\0\0\x08\x02" + c[4:], "no idx file of uint8 in 1 dims"),
        (IMAGES, lambda c: c[:-1], "damaged: its header says 12 x 8 x 8 values, but 767 follow"),
        (IMAGES, lambda c: c[:4] + b"\xff" * 12 + c[16:], "values, but 768 follow"),
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


@pytest.mark.parametrize("cut", [lambda c: c[:-9], lambda c: b"text", lambda c: c[:40] + c[44:]])
def test_a_damaged_gzip_file_is_refused_in_one_line(tmp_path, write_idx, cut):
    root = write_idx(tmp_path / "idx", zipped=True)
    path = root / f"{IMAGES}.gz"
    path.write_bytes(cut(path.read_bytes()))
    with pytest.raises(UserError, match="is damaged") as error:
        load_folder(root)
    assert "\n" not in str(error.value)


def test_other_images_are_no_fashion_mnist(tmp_path, write_idx):
    root = write_idx(tmp_path / "idx")
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
