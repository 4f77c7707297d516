"""Self-distillation goes on bit for bit, its centre, teacher and schedules included; corrupt images
on the way."""

import numpy as np
import pytest
from PIL import Image

from experiments import dino
from experiments.config.run import load
from experiments.images.dataset import ImageConfig
from experiments.images.multicrop import MultiCrops
from experiments.images.source import ImageSource
from experiments.support.errors import UserError
from experiments.training import pretraining
from models.dino import DinoConfig
from models.vit import ViTConfig

TINY = [
    "model.width=16", "model.depth=1", "model.heads=2", "model.patch_size=16",
    "dino.prototypes=16", "dino.hidden=16", "dino.bottleneck=8", "train.steps=6",
    "train.batch_size=4", "train.warmup_steps=1", "train.log_every=1", "train.eval_every=6",
    "train.eval_samples=4", "train.weight_decay_end=0.4", "impl.device=cpu", "impl.threads=1",
    "impl.checkpoint_every=1", "method=semi_sparse", "method.sparse_fraction=0.7",
]  # fmt: skip


def test_what_does_not_go_with_self_distillation():
    for override, message in (
        ("method=ast", "method=ast distils from the model as it was, but model=vit"),
        ("train.ema=0.9", "its teacher is the average; set it to 0"),
    ):
        with pytest.raises(UserError, match=message):
            dino.load([*TINY[:-2], override])


# ---- Corrupt images


@pytest.fixture
def folder(tmp_path):
    """24 training images of two classes, four of them corrupt; 4 validation images."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 2)):
        for name in ("a", "b"):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = generator.integers(0, 256, (10, 10, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / split / name / f"{i:02}.png")
    for path in ("a/03", "a/07", "b/01", "b/11"):  # the indices 3, 7, 13 and 23
        (tmp_path / "train" / f"{path}.png").write_bytes(b"damaged")
    return tmp_path


def open_source(kind, folder):
    data = ImageConfig(
        "two", str(folder), image_size=8, rand_augment=None, repeats=1, on_corrupt="skip"
    )
    if kind == "crops":
        shape = ViTConfig(8, 1, 1, image_size=8, patch_size=4, n_classes=0)
        return MultiCrops(data, DinoConfig(local_size=4, local_crops=1, total_steps=4), shape, 0, 6)
    return ImageSource(data, ViTConfig(8, 1, 1, image_size=8, patch_size=4, n_classes=2), 0, 6)


def whole(steps):
    return [(step, range(6)) for step in steps]


@pytest.mark.parametrize("kind", ["classes", "crops"])
def test_skipped_images_are_counted_across_a_stop_and_over_all_ranks(folder, kind):
    """The contract of `skipped` (experiments/data/source.py), with what a checkpoint can hold."""
    straight = open_source(kind, folder)
    list(straight.batches(whole(range(4))))
    assert straight.skipped == {3, 7, 13, 23} and straight.describe()["skipped"] == 4

    first = open_source(kind, folder)
    list(first.batches(whole(range(2))))
    stored = sorted(first.skipped)
    assert all(type(index) is int for index in stored) and 0 < len(stored) < 4
    second = open_source(kind, folder)
    second.skipped.update(stored)
    list(second.batches(whole(range(2, 4))))
    assert second.describe() == straight.describe()

    ranks = [open_source(kind, folder) for _ in range(3)]
    for rank, source in enumerate(ranks):
        list(source.batches([(step, range(2 * rank, 2 * rank + 2)) for step in range(4)]))
    parts = [sorted(source.skipped) for source in ranks]
    assert max(map(len, parts)) < 4
    ranks[0].skipped.update(*parts)
    assert ranks[0].describe() == straight.describe()


def configure(folder, runs, *more):
    """Twelve steps on the images of `folder`, by classes."""
    shape = ["model.width=16", "model.depth=1", "model.heads=2", "model.n_classes=2"]
    short = ["train.steps=12", "train.batch_size=2", "train.warmup_steps=0"]
    often = ["train.log_every=1", "train.eval_samples=4", "impl.checkpoint_every=1"]
    data = ["data=imagenet", "data.name=two", f"data.source={folder}", "data.image_size=32",
            "data.repeats=1"]  # fmt: skip
    here = ["method=dense", "impl.device=cpu", "impl.threads=1", f"runs={runs}"]
    return load(["model=deit_nano", *shape, *short, *often, *data, *here, *more])


def test_a_run_that_met_a_corrupt_image_goes_on_without_it(folder, tmp_path):
    runs = tmp_path / "runs"
    strict, lenient = configure(folder, runs), configure(folder, runs, "data.on_corrupt=skip")
    assert strict.directory() == lenient.directory()
    with pytest.raises(UserError, match=r"set data\.on_corrupt=skip to go on without it"):
        pretraining.run(strict, print)
    said = []
    result = pretraining.run(lenient, said.append)
    assert any(line.startswith("resumed at step") for line in said)
    assert result["config"]["data"]["on_corrupt"] == "skip"
    assert result["steps"] == 12 and result["corpus"]["skipped"] > 0
