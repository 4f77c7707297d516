"""Labelled image data sets, from a folder, idx files, the hub, or scikit-learn's digits.

A data set is a folder in ImageNet's layout (`train/<class>/*`, `val/<class>/*`), a folder with the
four idx files of MNIST or Fashion-MNIST (their test images serve for validation), a data set of the
hub, or the embedded one: the 1797 handwritten digits that ship with scikit-learn, of which 400 are
held out (stratified, with the fixed seed 0). Images are RGB.

The hub's current version is read, unless `owner/name@revision` pins a commit, branch or tag.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.support import checkpoint
from experiments.support.errors import UserError, one_line
from experiments.support.hub import commits, load_dataset
from experiments.support.names import check_bounds, check_name, identity_of

if TYPE_CHECKING:  # Pillow is imported where images are opened: texts do without it
    from PIL import Image

EMBEDDED = "digits"  # the value of `ImageConfig.source` that needs no files
HELD_OUT = 400  # digits for validation
SPLITS = ("train", "val")
# The only Pillow readers that are used, whatever a file's name; some others start external programs
# (EPS starts Ghostscript).
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP", "GIF")
IDX = {split: (f"{name}-images-idx3-ubyte", f"{name}-labels-idx1-ubyte")
       for split, name in (("train", "train"), ("val", "t10k"))}  # fmt: skip
# Hashes of both splits of Fashion-MNIST, as `_idx` computes them.
FASHION = {
    "train": "6ba2795ebd1931a1643ac1ad7e66168dd73d5f20e4df4779820d98f2344a6045",
    "val": "eb7d6a637e06928bd180beb02809c9da0dee278decfc7b9eaad5427f5b5585c4",
}


@dataclass(frozen=True)
class ImageConfig:
    """Settings of images and their augmentation (default: DeiT's); see conf/data/imagenet.yaml.

    source: "digits", a local folder in ImageNet's layout or with idx files, or an id on the hub,
        owner/name or owner/name@revision.
    crop_pct, rand_augment, color_jitter: as timm's; it ignores color_jitter beside rand_augment.
    mixup, cutmix: with both on, each is used half of the time. Neighbours in the batch (0 and 1, 2
        and 3, ...) are mixed, every pair with its own weight, so that the result does not depend on
        how a batch is split. Batches and micro-batches must be even.
    """

    name: str
    source: str
    image_size: int = 224
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    crop_pct: float = 0.875
    crop_scale: tuple[float, float] | None = (0.08, 1.0)
    flip: float = 0.5
    rotate: float = 0.0
    shift: float = 0.0
    rand_augment: str | None = "rand-m9-mstd0.5-inc1"
    color_jitter: float = 0.3
    random_erasing: float = 0.25
    mixup: float = 0.8
    cutmix: float = 1.0
    label_smoothing: float = 0.1
    repeats: int = 3

    def __post_init__(self) -> None:
        check_name("data.name", self.name)
        share = dict.fromkeys(("flip", "shift", "random_erasing", "label_smoothing"), (0.0, 1.0))
        check_bounds(
            self, "data.", image_size=(1, 10_000), repeats=(1, 1000), crop_pct=(0.01, 1),
            rotate=(0, 180), color_jitter=(0, 10), mixup=(0, 1000), cutmix=(0, 1000), **share,
        )  # fmt: skip
        scale = self.crop_scale
        if scale is not None and not (len(scale) == 2 and 0 < scale[0] <= scale[1] <= 1):
            raise ValueError(
                f"data.crop_scale={list(scale)}; it must be two rising shares in (0, 1]"
            )

    @property
    def mixes(self) -> bool:
        """True if training images are mixed with each other (mixup or cutmix)."""
        return self.mixup > 0 or self.cutmix > 0

    def identity(self) -> dict[str, Any]:
        """The settings that a run's hash covers: all but `source`."""
        return {k: v for k, v in identity_of(self).items() if k != "source"}

    def check_result(self, result: dict[str, Any], directory: Path) -> bool:
        """True if the finished run in `directory` was made on these images; assumed if those of its
        own source are no longer here, or on the hub."""
        here = self.source == EMBEDDED or Path(self.source).expanduser().is_dir()
        if not here and self.source == result["config"]["data"]["source"]:
            return True
        return load_images(self).fingerprint == result["corpus_hash"]


@dataclass(frozen=True)
class Images:
    """A data set. splits: `train` and `val`, or one of them. classes: their names, by label.

    revisions: the hub's commits that they were read from.
    fingerprint: hash of the splits that were read. It covers the labels and sizes of all images, in
        a folder also their names, and every byte of a small data set. Of a larger one (above
        256 MiB) it covers the content of 512 evenly spaced images per split.
    """

    directory: Path
    classes: tuple[str, ...]
    splits: dict[str, Split]
    fingerprint: str
    revisions: tuple[str, ...] = ()

    def describe(self) -> dict[str, Any]:
        """The images' entry in `result.json`."""
        return {
            "classes": list(self.classes),
            "splits": {name: {"images": len(own.labels)} for name, own in self.splits.items()},
            "sha256": self.fingerprint,
            **({"revisions": [*self.revisions]} if self.revisions else {}),
        }


def load_images(config: ImageConfig, splits: Sequence[str] = SPLITS) -> Images:
    """The data set of `config`, only `splits` of it: files are listed and hashed, not decoded."""
    if config.source == EMBEDDED:
        return _digits(config.image_size, splits)
    path = Path(config.source).expanduser()
    if path.is_dir():
        pairs = any(_find(path, name) for names in IDX.values() for name in names)
        return _idx(path, splits, config.name) if pairs else _folder(path, splits)
    if path.exists() or path.is_absolute() or config.source.startswith((".", "~")):
        raise UserError(
            f"data.source={config.source} is no folder; give one with train/<class>/ and "
            "val/<class>/, or with idx files (Debian's dataset-fashion-mnist has some)"
        )
    return _hub(config.source, splits)


# ---- the four kinds of data sets: the images of a split in a fixed order, with the class of each,
# int64 [N], and `open`, which gives an image in RGB or a `UserError` that names its file


@dataclass(frozen=True)
class Arrays:
    """Grey images in memory, uint8 [N, H, W]."""

    pixels: np.ndarray
    labels: np.ndarray

    def open(self, index: int) -> Image.Image:
        from PIL import Image

        return Image.fromarray(self.pixels[index]).convert("RGB")


def _digits(image_size: int, splits: Sequence[str]) -> Images:
    from PIL import Image
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    pixels = np.rint(data.images * (255 / 16)).astype(np.uint8)  # 8 x 8, from 0 to 16
    labels = data.target.astype(np.int64)
    train, val = train_test_split(
        np.arange(len(labels)), test_size=HELD_OUT, stratify=labels, random_state=0
    )
    digest = hashlib.sha256(pixels.tobytes() + labels.tobytes() + val.astype("<i8").tobytes())
    size = (image_size, image_size)
    large = np.stack(
        [np.asarray(Image.fromarray(x).resize(size, Image.Resampling.BICUBIC)) for x in pixels]
    )
    places = {"train": train, "val": val}
    return Images(
        directory=Path(EMBEDDED),
        classes=tuple(str(name) for name in data.target_names),
        splits={name: Arrays(large[places[name]], labels[places[name]]) for name in splits},
        fingerprint=digest.hexdigest(),
    )


def _idx(root: Path, wanted: Sequence[str], name: str) -> Images:
    splits: dict[str, Split] = {}
    digests = []
    for split in wanted:
        pixels, labels = (_values(root, file) for file in IDX[split])
        if pixels.ndim != 3 or not pixels.size or labels.shape != pixels.shape[:1]:
            raise UserError(
                f"{root} holds images of the shape {pixels.shape} and labels of {labels.shape} in "
                f"{' and '.join(IDX[split])}; get them anew"
            )
        shape = " ".join(map(str, pixels.shape)).encode()
        content = shape + b"\n" + pixels.tobytes() + labels.tobytes()
        digests.append(hashlib.sha256(content).hexdigest())
        if name == "fashion_mnist" and digests[-1] != FASHION[split]:
            raise UserError(
                f"{root} does not hold the {split} images of Fashion-MNIST: give yours a name, "
                "data.name=..."
            )
        splits[split] = Arrays(pixels, labels.astype(np.int64))
    classes = 1 + max(int(own.labels.max()) for own in splits.values())
    return Images(root, tuple(map(str, range(classes))), splits, _joined(wanted, digests))


def _find(root: Path, name: str) -> Path | None:
    return next((path for end in ("", ".gz") if (path := root / (name + end)).is_file()), None)


def _values(root: Path, name: str) -> np.ndarray:
    """The uint8 array in MNIST's idx format in the file of this name, gzipped or not: after four
    bytes, of which the last is the number of dims, the dims as big-endian 32-bit numbers."""
    if (path := _find(root, name)) is None:
        raise UserError(f"{root} has no {name}, gzipped (.gz) or not")
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        start = 4 + 4 * content[3]
        return np.frombuffer(content[start:], np.uint8).reshape(
            np.frombuffer(content[4:start], ">u4").astype(int)
        )
    except (OSError, EOFError, zlib.error, ValueError, IndexError) as error:
        raise UserError(f"{path} cannot be read ({one_line(error)}); get it anew") from error


@dataclass(frozen=True)
class Files:
    """Images in files, `<directory>/<class>/<name>`."""

    directory: Path
    names: np.ndarray  # with the class; bytes [N], an array because forked workers can share it
    labels: np.ndarray

    def open(self, index: int) -> Image.Image:
        path = self.directory / os.fsdecode(bytes(self.names[index]))
        return decode(path.read_bytes(), str(path))


def _folder(root: Path, wanted: Sequence[str]) -> Images:
    from torchvision.datasets import ImageFolder

    try:
        found = {split: ImageFolder(root / split) for split in wanted}
    except FileNotFoundError as error:
        needed = ", ".join(f"{split}/<class>/" for split in wanted)
        raise UserError(f"data.source={root} needs images in {needed}: {error}") from error
    classes = found[wanted[0]].classes
    for split, own in found.items():
        if differ := sorted({*own.classes} ^ {*classes}):
            raise UserError(
                f"{root}: the class {differ[0]} is only in one of {wanted[0]} and {split}; "
                f"{len(differ)} classes differ"
            )
    splits: dict[str, Split] = {}
    digests = []
    for split, own in found.items():
        start = len(str(root / split)) + 1
        names = [path[start:] for path, _ in own.samples]
        sizes = [Path(path).stat().st_size for path, _ in own.samples]
        digests.append(checkpoint.fingerprint(root / split, [*zip(names, sizes, strict=True)]))
        stored = np.array([os.fsencode(name) for name in names])
        splits[split] = Files(root / split, stored, np.array(own.targets))
    return Images(root, tuple(classes), splits, _joined(wanted, digests))


def _joined(wanted: Sequence[str], digests: list[str]) -> str:
    """One hash of the hashes of the splits."""
    return hashlib.sha256(" ".join([*wanted, *digests]).encode()).hexdigest()


@dataclass(frozen=True)
class _Rows:
    """Images in a data set of the hub, as their encoded files."""

    rows: Any
    column: str
    labels: np.ndarray
    name: str

    def open(self, index: int) -> Image.Image:
        return decode(self.content(index), f"{self.name}, row {index}")

    def content(self, index: int) -> bytes:
        cell = self.rows[int(index)][self.column]
        return cell["bytes"] if cell["bytes"] is not None else Path(cell["path"]).read_bytes()


def _hub(source: str, wanted: Sequence[str]) -> Images:
    import datasets

    hub_id, _, revision = source.partition("@")
    data = load_dataset(hub_id, None, revision or None)
    names = {"train": "train", "val": "validation" if "validation" in data else "test"}
    first = data[names[wanted[0]]] if all(names[split] in data for split in wanted) else None
    features = {} if first is None else first.features
    image = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
    label = [name for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    if first is None or len(image) != 1 or len(label) != 1:
        raise UserError(
            f"{hub_id} has the splits {', '.join(data)} and columns {', '.join(features)}; it "
            "needs train, and validation or test, with one column of images and one of labels"
        )
    classes = tuple(features[label[0]].names)
    digests = []
    splits: dict[str, Split] = {}
    for split in wanted:
        rows = data[names[split]].cast_column(image[0], datasets.Image(decode=False))
        labels = np.array([-1 if row is None else row for row in rows[label[0]][:]], np.int64)
        if labels.min() < 0:
            raise UserError(f"data.source={source}, {names[split]}: its labels are kept back")
        own = _Rows(rows, image[0], labels, f"{hub_id}, {names[split]}")
        size = rows.info.dataset_size
        digest = hashlib.sha256(f"{len(rows)} {size}".encode() + labels.tobytes())
        small = (size or math.inf) <= checkpoint.LIMIT
        count = len(rows) if small else min(checkpoint.SAMPLED, len(rows))
        for number in range(count):
            content = own.content(number * len(rows) // count)
            digest.update(hashlib.sha256(content).digest())
        digests.append(digest.hexdigest())
        splits[split] = own
    revisions = tuple(commits(first.info.download_checksums or ()))
    return Images(Path(hub_id), classes, splits, _joined(wanted, digests), revisions)


Split = Arrays | Files | _Rows


def decode(content: bytes, where: str) -> Image.Image:
    """The image in an encoded file, in RGB (grey, transparent and CMYK ones are converted)."""
    from PIL import Image

    try:
        return Image.open(io.BytesIO(content), formats=FORMATS).convert("RGB")
    except Exception as error:  # Pillow's readers raise many kinds for damaged files
        raise UserError(f"{where} cannot be read as an image: {one_line(error)}") from error
