"""Batches of images in memory are made without waiting for the GPU."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from experiments.images.dataset import ImageConfig
from experiments.images.multicrop import MultiCrops
from experiments.images.source import ImageSource
from models.dino import DinoConfig
from models.vit import ViTConfig

SIZE = 8
SHAPE = ViTConfig(8, 1, 1, image_size=SIZE, patch_size=4, n_classes=3)
PLAIN = {
    "image_size": SIZE, "mean": (0.3, 0.4, 0.5), "std": (0.2, 0.3, 0.4), "crop_pct": 1.0,
    "crop_scale": None, "flip": 0.5, "rand_augment": None, "color_jitter": 0.0,
    "random_erasing": 0.0, "repeats": 1,
}  # fmt: skip


@pytest.fixture(params=["mixed", "crops"])
def source_on(request, tmp_path, write_idx):
    """A function from a device to a source whose images lie there."""
    folder = str(write_idx(tmp_path / "idx", SIZE))

    def make(device):
        if request.param == "mixed":
            config = ImageConfig("mine", folder, **PLAIN, shift=0.1, mixup=0.8, cutmix=1.0)
            return ImageSource(config, SHAPE, seed=0, batch_size=6, device=device)
        dino = DinoConfig(total_steps=10, local_crops=2, local_size=4, color=False, prototypes=4)
        config = ImageConfig("mine", folder, **PLAIN, mixup=0.0, cutmix=0.0, label_smoothing=0.0)
        return MultiCrops(config, dino, SHAPE, seed=0, batch_size=6, device=device)

    return make


class Copies(TorchDispatchMode):
    """Counts the copies from the CPU to another device, and those of them that wait for it."""

    def __init__(self):
        super().__init__()
        self.count = self.waiting = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if operator is torch.ops.aten._to_copy.default:
            to = kwargs.get("device")
            if to is not None and to.type != "cpu" and args[0].device.type == "cpu":
                self.count += 1
                self.waiting += not kwargs.get("non_blocking")
        return operator(*args, **kwargs)


def test_no_copy_to_the_device_waits(source_on):
    source = source_on("meta")
    assert source.memory
    with Copies() as copies:
        next(iter(source.batches([(0, range(6))])))
    assert copies.count >= 2
    assert copies.waiting == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_batch_is_made_without_waiting_for_the_gpu(source_on):
    source = source_on("cuda")
    batches = source.batches([(step, range(6)) for step in range(3)])
    next(batches)
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch = next(batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(value.is_cuda for value in batch.values())
