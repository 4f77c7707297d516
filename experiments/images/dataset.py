"""Labelled image data sets, from a folder, idx files, the hub, or scikit-learn's digits.

A data set is a folder in ImageNet's layout (`train/<class>/*`, `val/<class>/*`), a folder with the
four idx files of MNIST or Fashion-MNIST (their test images serve for validation), a data set of the
hub, or the embedded one: the 1797 handwritten digits that ship with scikit-learn, of which 400 are
held out (stratified, with the fixed seed 0). Images are RGB.

A data set of the hub is read in its current version, unless `owner/name@revision` pins a commit,
branch or tag.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import math
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from experiments.images import idx
from experiments.support import hashes
from experiments.support.errors import UserError
from experiments.support.hub import commits, load_dataset
from experiments.support.identity import identity_of
from experiments.support.names import check_name

if TYPE_CHECKING:
    from PIL.Image import Image

EMBEDDED = "digits"  # the value of `ImageConfig.source` that needs no files
HELD_OUT = 400  # digits for validation
SPLITS = ("train", "val")
# The only Pillow readers that are used, whatever a file's name; some others start external programs
# (EPS starts Ghostscript).
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP", "GIF")
MAX_NAMES = 1000  # largest number of classes that results list by name
# The least and the largest value of each number in `ImageConfig`.
_RANGES = {
    "image_size": (1, 10_000), "repeats": (1, 1000), "crop_pct": (0.01, 1), "rotate": (0, 180),
    "color_jitter": (0, 10), "mixup": (0, 1000), "cutmix": (0, 1000),
    **dict.fromkeys(("flip", "shift", "random_erasing", "label_smoothing"), (0, 1)),
}  # fmt: skip


@dataclass(frozen=True)
class ImageConfig:
    """Settings of an image data set and its augmentation in training (by default as DeiT).

    source: "digits", a local folder in ImageNet's layout or with idx files, or an id on the hub,
        owner/name or owner/name@revision.
    image_size: side length in pixels that the model sees.
    mean, std: of the channels, for pixels in [0, 1].
    crop_pct: timm's setting of the centre crop for evaluation.
    crop_scale: range of the area that the random resized crop keeps; null = the whole image.
    flip: probability of horizontal mirroring.
    rotate: range of a random rotation in degrees.
    shift: range of a random shift as a fraction of the side.
    rand_augment: timm's description; null = off.
    color_jitter: strength; timm ignores it if rand_augment is on.
    random_erasing: probability.
    mixup, cutmix: their alpha; 0 = off. With both on, each is used half of the time. Neighbours in
        the batch (0 and 1, 2 and 3, ...) are mixed, every pair with its own weight, so that the
        result does not depend on how a batch is split. Batches and micro-batches must be even.
    repeats: how often an image appears in a batch, each time augmented anew (repeated
        augmentation).
    on_corrupt: `error`, or `skip` to train on the next image instead and count it; a run that
        ended with the error can be resumed with `skip`.
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
    on_corrupt: str = "error"

    def __post_init__(self) -> None:
        check_name("data.name", self.name)
        for name in ("mean", "std", "crop_scale"):  # omegaconf makes lists of them
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, tuple(value))
        if self.name == EMBEDDED != self.source:
            raise ValueError(
                f"data.source={self.source} is not the embedded digits: use data=imagenet and give "
                "yours a name, data.name=..."
            )
        for name, least in {"mean": -math.inf, "std": 0}.items():
            values = getattr(self, name)
            if len(values) != 3 or not all(least < value < math.inf for value in values):
                kind = "numbers" if name == "mean" else "positive numbers"
                raise ValueError(f"data.{name}={list(values)}; it must be three {kind}")
        for name, (least, most) in _RANGES.items():
            if not least <= getattr(self, name) <= most:
                value = getattr(self, name)
                raise ValueError(f"data.{name}={value}; it must lie in [{least}, {most}]")
        scale = self.crop_scale
        if scale is not None and not (len(scale) == 2 and 0 < scale[0] <= scale[1] <= 1):
            raise ValueError(
                f"data.crop_scale={list(scale)}; it must be two rising shares in (0, 1]"
            )
        if self.rand_augment is not None and not self.rand_augment.startswith("rand-"):
            raise ValueError(
                f"data.rand_augment={self.rand_augment}; it must be a description such as "
                "rand-m9-mstd0.5-inc1, or null"
            )
        if self.on_corrupt not in ("error", "skip"):
            raise ValueError(f"data.on_corrupt={self.on_corrupt}; choose one of error, skip")

    @property
    def mixes(self) -> bool:
        """True if training images are mixed with each other (mixup or cutmix)."""
        return self.mixup > 0 or self.cutmix > 0

    def identity(self) -> dict[str, Any]:
        """The settings that a run's hash covers: all but `source` and `on_corrupt`. With
        on_corrupt=error a run that meets a corrupt image has no result; with `skip` the result
        counts them."""
        identity = identity_of(self)
        for name in ("source", "on_corrupt"):
            identity.pop(name, None)
        return identity

    def check_result(self, result: dict[str, Any], directory: Path) -> bool:
        """True if the finished run in `directory` was made on these images.

        If the images of the run's own source are no longer here, or are on the hub, this is
        assumed.

        Raises:
            UserError: there are no such images.
        """
        here = self.source == EMBEDDED or Path(self.source).expanduser().is_dir()
        if not here and self.source == result["config"]["data"]["source"]:
            return True
        return load_images(self).fingerprint == result["corpus_hash"]


class CorruptImage(UserError):
    """An image that cannot be decoded: its file and the reason."""


class Split(Protocol):
    """The images of one split, in a fixed order."""

    @property
    def labels(self) -> np.ndarray:
        """Class of each image, int64 [N]."""

    def open(self, index: int) -> Image:
        """The image in RGB. Raises `CorruptImage` if it cannot be decoded."""

    def where(self, index: int) -> str:
        """The image's file, for messages."""


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

    @property
    def train(self) -> Split:
        """The training split."""
        return self.splits["train"]

    @property
    def val(self) -> Split:
        """The validation split."""
        return self.splits["val"]

    def describe(self) -> dict[str, Any]:
        """The images' entry in `result.json`. `classes` holds their names, or for more than 1000
        their number and hash; equal values mean the same classes in the same order."""
        classes: Any = list(self.classes)
        if len(classes) > MAX_NAMES:
            names = "\n".join(classes).encode(errors="surrogateescape")
            classes = {"count": len(classes), "sha256": hashlib.sha256(names).hexdigest()}
        return {
            "classes": classes,
            "splits": {name: {"images": len(own.labels)} for name, own in self.splits.items()},
            "sha256": self.fingerprint,
            **({"revisions": [*self.revisions]} if self.revisions else {}),
        }


def load_images(config: ImageConfig, splits: Sequence[str] = SPLITS) -> Images:
    """The data set of `config`. Its files are listed and hashed, but none is decoded yet.

    Args:
        splits: those of `SPLITS` that are needed; others may be missing.
    Raises:
        UserError: it is not there, or not a folder in one of the two layouts.
    """
    if config.source == EMBEDDED:
        return _digits(config.image_size, splits)
    path = Path(config.source).expanduser()
    if path.is_dir():
        return _idx(path, splits, config.name) if idx.in_folder(path) else _folder(path, splits)
    if path.exists() or path.is_absolute() or config.source.startswith((".", "~")):
        if config.name in idx.PUBLISHED:
            raise UserError(f"data.source={config.source} is no folder; {idx.ADVICE}")
        needed = " and ".join(f"{split}/" for split in splits)
        raise UserError(f"data.source={config.source} is no folder; give one with {needed}")
    return _hub(config.source, splits)


# ---- the four kinds of data sets


@dataclass(frozen=True)
class Arrays:
    """Grey images in memory, uint8 [N, H, W]."""

    pixels: np.ndarray
    labels: np.ndarray
    name: str

    def open(self, index: int) -> Image:
        from PIL import Image

        return Image.fromarray(self.pixels[index]).convert("RGB")

    def where(self, index: int) -> str:
        return f"{self.name} {index}"


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
    both = {
        "train": Arrays(large[train], labels[train], "training digit"),
        "val": Arrays(large[val], labels[val], "held-out digit"),
    }
    return Images(
        directory=Path(EMBEDDED),
        classes=tuple(str(name) for name in data.target_names),
        splits={name: both[name] for name in splits},
        fingerprint=digest.hexdigest(),
    )


def _idx(root: Path, wanted: Sequence[str], name: str) -> Images:
    read = {split: idx.read(root, split) for split in wanted}
    for split, published in idx.PUBLISHED.get(name, {}).items():
        if split in read and read[split].sha256 != published:
            raise UserError(
                f"{read[split].path} and its labels are not those of {name} (sha256 "
                f"{read[split].sha256[:12]}..., not {published[:12]}...): give yours a name, "
                f"data.name=..., or get them anew; {idx.ADVICE}"
            )
    return Images(
        directory=root,
        classes=tuple(map(str, range(1 + max(int(own.labels.max()) for own in read.values())))),
        splits={
            split: Arrays(own.pixels, own.labels, f"{own.path}, image")
            for split, own in read.items()
        },
        fingerprint=_joined(wanted, [own.sha256 for own in read.values()]),
    )


@dataclass(frozen=True)
class Files:
    """Images in files, `<directory>/<class>/<name>`."""

    directory: Path
    names: np.ndarray  # with the class; bytes [N], an array because forked workers can share it
    labels: np.ndarray

    def open(self, index: int) -> Image:
        path = self.where(index)
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}") from error
        return decode(content, path)

    def where(self, index: int) -> str:
        return str(self.directory / os.fsdecode(bytes(self.names[index])))


def _folder(root: Path, wanted: Sequence[str]) -> Images:
    digests = []
    classes: dict[str, tuple[str, ...]] = {}
    splits: dict[str, Split] = {}
    for split in wanted:
        directory = root / split
        if not directory.is_dir():
            needed = ", ".join(f"{name}/<class>/" for name in wanted)
            raise UserError(f"{root} has no folder {split}; it needs {needed}")
        with os.scandir(directory) as entries:
            names = sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
        if not names:
            raise UserError(f"{directory} has no classes; put its images into {directory}/<class>/")
        classes[split] = tuple(names)
    for split, other in itertools.permutations(wanted, 2):
        if missing := sorted(set(classes[other]) - set(classes[split])):
            raise UserError(
                f"{root / split / missing[0]} is missing, the class {missing[0]} is only in "
                f"{other}; {len(missing)} classes differ"
            )
    for split in wanted:
        files: list[tuple[str, int]] = []
        labels: list[int] = []
        for label, name in enumerate(classes[split]):
            found = _image_files(root / split / name)
            files += [(f"{name}/{file}", size) for file, size in found]
            labels += [label] * len(found)
        digests.append(hashes.fingerprint(root / split, files))
        paths = np.array([os.fsencode(name) for name, _ in files])
        splits[split] = Files(root / split, paths, np.array(labels))
    return Images(root, classes[wanted[0]], splits, _joined(wanted, digests))


def _joined(wanted: Sequence[str], digests: list[str]) -> str:
    """One hash of the hashes of the splits."""
    return hashlib.sha256(" ".join([*wanted, *digests]).encode()).hexdigest()


def _image_files(directory: Path) -> list[tuple[str, int]]:
    """(name, bytes) of the images in a class, sorted; a UserError if there are none."""
    from torchvision.datasets.folder import IMG_EXTENSIONS

    with os.scandir(directory) as entries:
        found = sorted(
            (entry.name, entry.stat().st_size)
            for entry in entries
            if entry.name.lower().endswith(IMG_EXTENSIONS) and not entry.name.startswith(".")
        )
    if not found:
        raise UserError(f"{directory} holds no image ({', '.join(IMG_EXTENSIONS)})")
    return found


@dataclass(frozen=True)
class _Rows:
    """Images in a data set of the hub, as their encoded files."""

    rows: Any
    column: str
    labels: np.ndarray
    name: str

    def open(self, index: int) -> Image:
        return decode(self.content(index), self.where(index))

    def content(self, index: int) -> bytes:
        cell = self.rows[index][self.column]
        return cell["bytes"] if cell["bytes"] is not None else Path(cell["path"]).read_bytes()

    def where(self, index: int) -> str:
        return f"{self.name}, row {index}"


def _hub(source: str, wanted: Sequence[str]) -> Images:
    import datasets

    hub_id, _, revision = source.partition("@")
    data = load_dataset(hub_id, None, revision or None)
    names = {"train": "train", "val": "validation" if "validation" in data else "test"}
    if any(names[split] not in data for split in wanted):
        needed = {"train": "train", "val": "validation or test"}
        raise UserError(
            f"{hub_id} has the splits {', '.join(data)}; it needs "
            f"{', and '.join(needed[split] for split in wanted)}"
        )
    features = data[names[wanted[0]]].features
    image = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
    label = [name for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    if len(image) != 1 or len(label) != 1:
        raise UserError(
            f"{hub_id} has the columns {', '.join(features)}; it needs one of images and one of "
            "class labels"
        )
    classes = tuple(features[label[0]].names)
    digests = []
    splits: dict[str, Split] = {}
    for split in wanted:
        name = names[split]
        rows = data[name].cast_column(image[0], datasets.Image(decode=False))
        found = [-1 if row is None else row for row in rows[label[0]][:]]
        labels = np.array(found, dtype=np.int64)
        if not ((labels >= 0) & (labels < len(classes))).all():
            raise UserError(
                f"data.source={source}, {name}: a label is none of 0 to {len(classes) - 1}; the "
                "labels of hidden tests are kept back"
            )
        own = _Rows(rows, image[0], labels, f"{hub_id}, {name}")
        digest = hashlib.sha256(f"{len(rows)} {rows.info.dataset_size}".encode() + labels.tobytes())
        small = (rows.info.dataset_size or math.inf) <= hashes.LIMIT
        count = len(rows) if small else min(hashes.SAMPLED, len(rows))
        for number in range(count):
            content = own.content(number * len(rows) // count)
            digest.update(hashlib.sha256(content).digest())
        digests.append(digest.hexdigest())
        splits[split] = own
    revisions = tuple(commits(data[names[wanted[0]]].info.download_checksums or ()))
    return Images(Path(hub_id), classes, splits, _joined(wanted, digests), revisions)


# Errors that Pillow's readers of `FORMATS` raise for truncated or malformed files.
_CORRUPT = (OSError, ValueError, SyntaxError, EOFError, IndexError, struct.error, zlib.error)


def decode(content: bytes, where: str) -> Image:
    """The image in an encoded file, in RGB (grey, transparent and CMYK ones are converted).

    Raises:
        CorruptImage: it cannot be decoded; `where` is named.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(content), formats=FORMATS).convert("RGB")
    except UnidentifiedImageError as error:
        raise CorruptImage(f"{where} is no image: it is none of {', '.join(FORMATS)}") from error
    except (*_CORRUPT, Image.DecompressionBombError) as error:
        raise CorruptImage(f"{where} is corrupt: {error}") from error
