"""FST under the trainer: where the decay is added, and the dense end of a run that was stopped."""

import pytest
import torch

from experiments.training import pretraining
from experiments.training.tracking import read_metrics
from methods import fst
from tests.experiments.conftest import quiet


def log(config):
    return read_metrics(config.directory() / "metrics.jsonl")


def test_the_decay_is_not_clipped_nor_in_the_norm_nor_scaled_with_the_loss(tiny, monkeypatch):
    """The gradients before and after `on_gradients`, in the first step of a clipped run."""
    seen, original = {}, fst.Method.on_gradients

    def record(self, step, optimizer=None):
        (layer,) = [layer for name, layer in self.sparse_layers.items() if "c_fc" in name]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()
        before = layer.weight.grad.clone()
        original(self, step, optimizer)
        pruned = torch.where(layer.mask, 0.0, layer.weight.detach())
        seen[self.config.alpha] = float(norm), layer.weight.grad - before, pruned

    monkeypatch.setattr(fst.Method, "on_gradients", record)
    norms = []
    for alpha in (0.0, 100.0):
        config = tiny(
            "method=fst", f"method.alpha={alpha}", "train.steps=1", "train.warmup_steps=0",
            "method.dense_fraction=0", "train.grad_clip=0.01", "train.dtype=fp16",
        )  # fmt: skip
        pretraining.run(config, quiet)
        norms += [record["grad_norm"] for record in log(config) if "grad_norm" in record]
    assert norms[0] == norms[1] > 0.01
    for clipped, _, pruned in seen.values():
        assert clipped == pytest.approx(0.01, rel=1e-3)
        assert int(pruned.count_nonzero()) == pruned.numel() // 2
    assert not seen[0.0][1].any()
    # (gradient + decay) - gradient, in fp32: a few ulps of the sum.
    torch.testing.assert_close(seen[100.0][1], 100 * seen[100.0][2], rtol=1e-5, atol=1e-6)
