"""Reads images and labels in MNIST's idx format, each file gzipped or not.

A file begins with two zero bytes, a byte 8 for the type uint8, the number of dims, and the dims
themselves as big-endian 32-bit numbers; the values follow.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.support.errors import UserError

FILES = {split: (f"{name}-images-idx3-ubyte", f"{name}-labels-idx1-ubyte")
         for split, name in (("train", "train"), ("val", "t10k"))}  # fmt: skip
# `Idx.sha256` of both splits of published data sets, by their `data.name`.
PUBLISHED = {
    "fashion_mnist": {
        "train": "6ba2795ebd1931a1643ac1ad7e66168dd73d5f20e4df4779820d98f2344a6045",
        "val": "eb7d6a637e06928bd180beb02809c9da0dee278decfc7b9eaad5427f5b5585c4",
    }
}
ADVICE = (
    "Debian's dataset-fashion-mnist has them (`apt-get install` it), and "
    "torchvision.datasets.FashionMNIST(FOLDER, download=True) puts them into "
    "FOLDER/FashionMNIST/raw: pass that as data.source"
)
_UINT8 = 8


@dataclass(frozen=True)
class Idx:
    """One split: pixels uint8 [N, H, W], labels int64 [N], a hash of both that does not depend on
    gzip, and the path of the image file."""

    path: Path
    pixels: np.ndarray
    labels: np.ndarray
    sha256: str


def in_folder(root: Path) -> bool:
    """True if a folder holds one of these files."""
    return any(_find(root, name) for names in FILES.values() for name in names)


def read(root: Path, split: str) -> Idx:
    """The images and labels of a split.

    Raises:
        UserError: a file is missing or damaged, or the numbers of images and labels differ.
    """
    images, classes = FILES[split]
    (image_path, pixels), (label_path, labels) = _values(root, images, 3), _values(root, classes, 1)
    if not pixels.size:
        raise UserError(f"{image_path} holds no image")
    if len(pixels) != len(labels):
        raise UserError(
            f"{image_path} holds {len(pixels)} images, but {label_path} {len(labels)} labels"
        )
    shape = " ".join(map(str, pixels.shape)).encode()
    digest = hashlib.sha256(shape + b"\n" + pixels.tobytes() + labels.tobytes()).hexdigest()
    return Idx(image_path, pixels, labels.astype(np.int64), digest)


def _find(root: Path, name: str) -> Path | None:
    return next((path for end in ("", ".gz") if (path := root / (name + end)).is_file()), None)


def _values(root: Path, name: str, dims: int) -> tuple[Path, np.ndarray]:
    """(path, uint8 array) of the idx file of this name, gzipped or not, with `dims` dimensions."""
    if (path := _find(root, name)) is None:
        raise UserError(f"{root} has no {name}, gzipped (.gz) or not")
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (EOFError, zlib.error, OSError) as error:
        raise UserError(f"{path} cannot be read ({error}); get it anew") from error
    size = 4 + 4 * dims
    shape = np.frombuffer(content[4:size], ">u4").tolist() if len(content) >= size else []
    values = np.frombuffer(content[size:], np.uint8)
    if content[:4] != bytes((0, 0, _UINT8, dims)) or values.size != math.prod(shape):
        raise UserError(
            f"{path} is damaged, or no idx file of uint8 in {dims} dims: it begins with "
            f"{content[:4].hex(' ') or 'nothing'}, and {values.size} values follow its header "
            f"{' x '.join(map(str, shape))}; get it anew"
        )
    return path, values.reshape(shape)
