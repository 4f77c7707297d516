"""The driver: two steps, the teacher as the result, probes among the metrics, idempotence."""

import json

import pytest
import torch
from safetensors.torch import load_file

from experiments import dino, pretrain, probes
from experiments.config import load
from experiments.errors import UserError
from experiments.finished import FinishedRun
from models.dino import DINO
from models.vit import ViT

TINY = [
    "model.width=16",
    "model.depth=1",
    "model.heads=2",
    "dino.prototypes=8",
    "dino.hidden=16",
    "dino.bottleneck=8",
    "dino.local_crops=1",
    "dino.local_size=16",
    "train.steps=2",
    "train.warmup_steps=1",
    "train.batch_size=4",
    "train.log_every=1",
    "train.eval_every=2",
    "train.eval_samples=4",
    "impl.device=cpu",
    "impl.threads=1",
]


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.setattr(probes, "DECAYS", (1e-2,))
    return lambda *more: dino.load([*TINY, f"runs={tmp_path}", *more])


def quiet(message):
    pass


@pytest.mark.parametrize("method", ["dense", "semi_sparse"])
def test_two_steps_deliver_the_teacher_and_probe_it(tiny, method, monkeypatch):
    config = tiny(f"method={method}")
    assert dino.finished(config) is None
    kept = []
    original = pretrain.deliverable

    def spy(model, names):
        kept.append(model)
        return original(model, names)

    monkeypatch.setattr(pretrain, "deliverable", spy)
    result = dino.run(config, quiet)
    # Two global crops of 16 patches and a class token, a local one of 4 and the token.
    assert result["steps"] == 2 and result["tokens"] == 2 * 4 * (2 * 17 + 5)
    metrics = result["metrics"]
    assert {"val_loss", "knn_top1", "linear_top1", "linear_decay"} <= metrics.keys()
    written = json.loads((config.directory() / "result.json").read_text())
    assert written == json.loads(json.dumps(result)) == dino.finished(config)

    trained = kept[-1]
    assert isinstance(trained, DINO)
    weights = load_file(config.directory() / "model.safetensors")
    teacher = dict(trained.teacher.backbone.named_parameters())
    assert weights.keys() == teacher.keys()
    assert all(torch.equal(weights[name], teacher[name]) for name in weights)

    model = FinishedRun.open(config.directory()).model()
    assert isinstance(model, ViT)
    assert result["converted"] == ["vit.blocks.0.mlp.fc1", "vit.blocks.0.mlp.fc2"]
    sparsity = result["sparsity"]
    assert (sparsity["density"] <= 0.5 and sparsity["illegal_groups"] == 0) is (
        method == "semi_sparse"
    )
    records = [
        json.loads(line) for line in (config.directory() / "metrics.jsonl").read_text().splitlines()
    ]
    assert all("teacher_entropy" in record for record in records if "loss" in record)


def test_a_finished_run_is_not_probed_again_and_a_trained_one_is(tiny, monkeypatch):
    config = tiny()
    pretrain.run(config, quiet)  # stopped before the probes
    assert pretrain.finished(config) is not None and dino.finished(config) is None
    result = dino.run(config, quiet)
    assert "linear_top1" in result["metrics"]
    monkeypatch.setattr(dino, "probe", None)
    assert dino.run(config, quiet)["metrics"] == result["metrics"]


def test_the_settings_of_the_nano_run_and_of_imagenet():
    nano = dino.load([])
    assert nano.data.name == "digits" and nano.method == "dense"
    assert nano.dino.total_steps == nano.train.steps
    imagenet = dino.load(["model=vit_s"])
    assert imagenet.data.name == "imagenet" and imagenet.dino.prototypes == 65536
    assert imagenet.train.weight_decay_end == 0.4
    assert nano.directory().parent.parent.name == "dino_vit-digits"
    other = dino.load(["dino.momentum=0.5"])
    assert other.digest() != nano.digest()
    with pytest.raises(UserError, match="dino has no key centering"):
        dino.load(["+dino.centering=sinkhorn"])


@pytest.mark.parametrize(
    ("share", "sparse"),
    [("040", 40000), ("060", 75000), ("070", 87500), ("080", 100000), ("090", 112500)],
)
def test_the_sparse_steps_of_torchao_s_study(share, sparse):
    config = load([f"experiment=dino_vit_l_{share}"], "dino")
    method = config.build_method()
    assert config.train.steps == 125000
    assert not method.dense_at(sparse - 1) and method.dense_at(sparse)


def test_the_ends_of_torchao_s_study():
    assert load(["experiment=dino_vit_l_000"], "dino").method == "dense"
    whole = load(["experiment=dino_vit_l_100"], "dino").build_method()
    assert not whole.dense_at(124999)
