"""The driver: two steps, the teacher as the result, probes among the metrics, idempotence."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

import methods
from experiments import dino
from experiments.config.run import load
from experiments.config.settings import TrainConfig
from experiments.evaluation import probes
from experiments.runs.finished import FinishedRun
from experiments.support.checkpoint import read_sealed
from experiments.support.errors import UserError
from experiments.training import pretraining, routine
from experiments.training.optimization import Optimization
from models.dino import DINO, DinoConfig
from models.vit import ViT, ViTConfig
from tests.experiments.conftest import quiet

TINY = [
    "model.width=16", "model.depth=1", "model.heads=2", "dino.prototypes=8", "dino.hidden=16",
    "dino.bottleneck=8", "dino.local_crops=1", "dino.local_size=16", "train.steps=2",
    "train.warmup_steps=1", "train.batch_size=4", "train.log_every=1", "train.eval_every=2",
    "train.eval_samples=4", "impl.device=cpu", "impl.threads=1",
]  # fmt: skip


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.setattr(probes, "DECAYS", (1e-2,))
    return lambda *more: dino.load([*TINY, f"runs={tmp_path}", *more])


def test_what_does_not_go_with_self_distillation():
    for override, message in (
        ("method=ast", "method=ast distils from the model as it was, but model=vit"),
        ("train.ema=0.9", "its teacher is the average; set it to 0"),
    ):
        with pytest.raises(UserError, match=message):
            dino.load([*TINY, override])


@pytest.mark.parametrize("method", ["dense", "semi_sparse"])
def test_two_steps_deliver_the_teacher_and_probe_it(tiny, method, monkeypatch):
    config = tiny(f"method={method}")
    assert dino.finished(config) is None
    kept = []
    original = routine.deliverable

    def spy(model, names):
        kept.append(model)
        return original(model, names)

    monkeypatch.setattr(routine, "deliverable", spy)
    result = dino.run(config, quiet)
    # Two global crops of 16 patches and a class token, a local one of 4 and the token.
    assert result["steps"] == 2 and result["tokens"] == 2 * 4 * (2 * 17 + 5)
    metrics = result["metrics"]
    assert {"val_loss", "knn_top1", "linear_top1", "linear_decay"} <= metrics.keys()
    written = read_sealed(config.directory() / "result.json")
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
    pretraining.run(config, quiet)  # stopped before the probes
    assert pretraining.finished(config) is not None and dino.finished(config) is None
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


def test_torchao_s_study_has_the_published_defaults_of_dinov2():
    """Its ssl_default_config.yaml, iBOT and KoLeo apart."""
    for share in ["000", "040", "060", "070", "080", "090", "100"]:
        config = load([f"experiment=dino_vit_l_{share}"], "dino")
        model, train, own = config.model, config.train, config.dino
        assert (model.width, model.depth, model.heads, model.patch_size) == (1024, 24, 16, 16)
        assert (model.drop_path, model.drop_path_uniform, model.init_values) == (0.3, True, 1e-5)
        assert (train.steps, train.warmup_steps) == (100 * 1250, 10 * 1250)
        rates = train.learning_rate, train.min_learning_rate
        assert rates == (0.004 * math.sqrt(train.batch_size / 1024), 1e-6)
        assert (train.optimizer, train.betas, train.grad_clip) == ("adamw", (0.9, 0.999), 3.0)
        assert train.dtype == "fp16"
        assert (train.weight_decay, train.weight_decay_end) == (0.04, 0.4)
        assert (own.layer_decay, own.patch_rate, own.frozen_fraction) == (0.9, 0.2, 0.01)
        assert (own.global_scale, own.local_scale) == ((0.32, 1.0), (0.05, 0.32))
        assert (own.local_crops, own.local_size) == (8, 96)
        assert (own.momentum_at(0), own.momentum_at(train.steps)) == (pytest.approx(0.992), 1.0)
        temperatures = [own.teacher_temperature_at(epoch * 1250) for epoch in (0, 30, 100)]
        assert temperatures == pytest.approx([0.04, 0.07, 0.07])
        assert (own.prototypes, own.hidden, own.bottleneck) == (65536, 2048, 256)


def test_each_block_s_rate_reaches_the_optimizer_and_survives_a_checkpoint():
    shape = ViTConfig(width=8, depth=2, heads=2, image_size=16, patch_size=8, n_classes=0)
    settings = DinoConfig(
        total_steps=10, local_crops=0, prototypes=4, hidden=8, bottleneck=4,
        layer_decay=0.5, patch_rate=0.25,
    )  # fmt: skip
    train = TrainConfig(steps=10, batch_size=2, learning_rate=0.1, min_learning_rate=0.1)
    batch = {
        "global_crops": torch.randn(2, 2, 3, 16, 16),
        "local_crops": torch.empty(2, 0, 3, 8, 8),
    }
    state = None
    for step in (0, 1):
        model, method = DINO(ViT(shape), settings), methods.build("dense", include=["*mlp.*"])
        method.convert(model)
        optimization = Optimization(model, method, train, torch.device("cpu"))
        if state is not None:
            optimization.load_state_dict(state)
        optimization.step(step, iter([batch]), [1.0])
        state = optimization.state_dict()
        groups = optimization.optimizer.param_groups
        rates = {id(p): group["lr"] for group in groups for p in group["params"]}
        trunk, head = model.student.backbone.vit, model.student.head
        expected = {
            trunk.patch_embed.proj.weight: 0.1 / 32,  # layer 0 of 3, and a quarter
            trunk.patch_embed.proj.bias: 0.1 / 32,
            trunk.pos_embed: 0.1 / 8,
            trunk.cls_token: 0.1 / 8,
            trunk.blocks[0].attn.qkv.weight: 0.1 / 4,
            trunk.blocks[1].norm1.bias: 0.1 / 2,
            trunk.norm.weight: 0.1,
            head.last_layer.weight: 0.1,
        }
        assert {p: rates[id(p)] for p in expected} == expected
        assert len(rates) == len(list(model.student.parameters()))
