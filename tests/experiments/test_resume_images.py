"""Self-distillation goes on bit for bit, its centre, teacher and schedules included."""

import pytest
import torch
from safetensors.torch import load_file

from experiments import dino, pretrain
from experiments.errors import UserError
from experiments.trainer import Trainer

TINY = [
    "model.width=16", "model.depth=1", "model.heads=2", "model.patch_size=16",
    "dino.prototypes=16", "dino.hidden=16", "dino.bottleneck=8", "train.steps=6",
    "train.batch_size=4", "train.warmup_steps=1", "train.log_every=1", "train.eval_every=6",
    "train.eval_samples=4", "train.weight_decay_end=0.4", "impl.device=cpu", "impl.threads=1",
    "impl.checkpoint_every=1", "method=semi_sparse", "method.sparse_fraction=0.7",
]  # fmt: skip


class Stop(Exception):
    """Stands for the end of the process."""


@pytest.mark.parametrize("stop", [3, 5])
def test_an_interrupted_distillation_goes_on_bit_for_bit(tmp_path, monkeypatch, stop):
    def config(name):
        return dino.load([*TINY, f"runs={tmp_path / name}"])

    whole = pretrain.run(config("whole"), print)
    original = Trainer._train_step

    def dying(self, batches):
        if self.step == stop:
            raise Stop
        return original(self, batches)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train_step", dying)
        with pytest.raises(Stop):
            pretrain.run(config("stopped"), print)
    again = pretrain.run(config("stopped"), print)
    assert again["metrics"]["val_loss"] == whole["metrics"]["val_loss"]
    first, second = (
        load_file(config(name).directory() / "model.safetensors") for name in ("whole", "stopped")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("method=ast", "method=ast distils from the model as it was, but model=vit"),
        ("train.ema=0.9", "its teacher is the average; set it to 0"),
    ],
)
def test_what_does_not_go_with_self_distillation(override, message):
    with pytest.raises(UserError, match=message):
        dino.load([*TINY[:-2], override])


def test_a_model_with_classes_is_not_for_this_driver():
    with pytest.raises(UserError, match=r"choose model=vit_nano"):
        dino.run(dino.load(["model=deit_nano"]), print)
