"""The driver: two steps, the teacher as the result, probes among the metrics."""

import json

import pytest

from experiments import dino
from experiments.evaluation import probes
from experiments.runs.finished import FinishedRun
from experiments.support.checkpoint import read_sealed
from models.vit import ViT
from tests.experiments.conftest import CPU, losses, quiet, settings

TINY = [
    *settings("model", width=16, depth=1, heads=2),
    *settings("dino", prototypes=8, hidden=16, bottleneck=8, local_crops=1, local_size=16),
    *settings("train", steps=2, warmup_steps=1, batch_size=4, log_every=1, eval_every=2),
    *("train.eval_samples=4", *CPU),
]


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.setattr(probes, "DECAYS", (1e-2,))
    return lambda *more: dino.load([*TINY, f"runs={tmp_path}", *more])


@pytest.mark.parametrize("method", ["dense", "semi_sparse"])
def test_two_steps_deliver_the_teacher_and_probe_it(tiny, method):
    config = tiny(f"method={method}")
    assert dino.finished(config) is None
    result = dino.run(config, quiet).result
    # Two global crops of 16 patches and a class token, a local one of 4 and the token.
    assert result["steps"] == 2 and result["tokens"] == 2 * 4 * (2 * 17 + 5)
    metrics = result["metrics"]
    assert {"val_loss", "knn_top1", "linear_top1", "linear_decay"} <= metrics.keys()
    written = read_sealed(config.directory() / "result.json")
    assert written == json.loads(json.dumps(result)) == dino.finished(config)
    model = FinishedRun.open(config.directory()).model()
    assert isinstance(model, ViT)
    assert result["converted"] == ["vit.blocks.0.mlp.fc1", "vit.blocks.0.mlp.fc2"]
    sparsity = result["sparsity"]
    assert (sparsity["density"] <= 0.5 and sparsity["illegal_groups"] == 0) is (
        method == "semi_sparse"
    )
    assert losses(config.directory(), "teacher_entropy").keys() == {0, 1}
