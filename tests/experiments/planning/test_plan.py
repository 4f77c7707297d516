"""Tests of the plan of a training: against measured peaks, by hand, and for the published runs."""

import json
import re
from functools import cache, partial
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F

import experiments
import methods
from experiments import plan as driver
from experiments.bench import variants
from experiments.bench.jobs import MLP, square
from experiments.config.compose import composed
from experiments.config.settings import ImplConfig, TrainConfig
from experiments.planning import plan as planning
from experiments.planning.footprint import Footprint, footprint
from experiments.planning.plan import MIB, lines, per_gpu
from models.gpt2 import GPT, Block, GPTConfig
from tests.each import each

RESULTS = Path(experiments.__file__).parent / "bench_results"
MEASURED = json.loads((RESULTS / "h200.json").read_text())["benchmarks"]
TRAIN = partial(TrainConfig, steps=1, batch_size=1, learning_rate=1.0, dtype="bf16")
GPT2 = re.compile(r"GPT-2 (\w+), (\d+) x (\d+)(, all linears)?")
STACK = re.compile(r"(\d+) blocks (\d+) -> (\d+), (\d+) x (\d+)(, all linears)?")
# Each method counts for seconds on models of many layers, so that these take some of the methods.
CHOSEN = {
    "GPT-2 124M, 32 x 1024": ("dense", "ste", "fst", "s_ste", "slope", "s_ste, fp8"),
    "6 blocks 4096 -> 14336, 8 x 1024, all linears": ("fst", "slope", "slope, packed in backward"),
    "GPT-2 774M, 16 x 1024, all linears": ("s_ste",),
    "ViT-L/16, 64 images": ("dense", "fst"),
}
ROWS = [
    row
    for kind in ("train", "memory")
    for row in MEASURED[kind]["rows"]
    if "peak MiB" in row["figures"] and row["name"] in CHOSEN.get(row["shape"], ())
]


def measured_step(shape, name):
    """The footprint of the step of a row."""
    variant, found = variants.VARIANTS[name], GPT2.fullmatch(shape) or STACK.fullmatch(shape)
    if found is None:
        shapes = (64, 3, 224, 224), torch.zeros(64).long()
        build = partial(timm.create_model, "vit_large_patch16_224")
        loss = lambda model: F.cross_entropy(model(torch.zeros(shapes[0])), shapes[1])  # noqa: E731
    elif found.re is STACK:
        layers, width, inner, *size = map(int, found.groups()[:5])
        config = GPTConfig(layers, 32, width, vocab_size=1, n_inner=inner)
        build = lambda: torch.nn.Sequential(*(Block(config) for _ in range(layers)))  # noqa: E731
        loss = lambda model: square(model(torch.zeros(*size, width)))  # noqa: E731
    else:
        size = int(found[2]), int(found[3])
        build = partial(GPT, GPTConfig.of_size(found[1]))
        loss = lambda model: model(*torch.zeros(2, *size, dtype=torch.int64))[1]  # noqa: E731
    include = "all" if found and found.groups()[-1] else MLP
    options = {"include": include, "exclude": (), "measure_every": 0, **variant.options}
    method = methods.build(variant.method, **options)
    impl = ImplConfig(compile=True, repack_backward=variant.repack)
    return footprint(build, method, loss, TRAIN(), impl)


@pytest.mark.parametrize("shape", sorted({row["shape"] for row in ROWS}))
def test_measured_peaks_are_met_within_a_tenth(shape):
    need = cache(partial(measured_step, shape))
    parts = {"weights": "weights", "optimizer": "optimizer", "masks": "masks",
             "packed": "packed operands", "operands": "dense operands"}  # fmt: skip
    for row in (row for row in ROWS if row["shape"] == shape):
        figures = row["figures"]
        planned = per_gpu(need(row["name"]), TRAIN(), ImplConfig(), 1, accumulates=False)
        assert planned["peak"] / MIB == pytest.approx(figures["peak MiB"], rel=0.1), row["name"]
        for part, ours in parts.items() if "weights MiB" in figures else ():
            # keys, and the steps that AdamW counts, one number for each weight
            assert planned[ours] / MIB == pytest.approx(figures[f"{part} MiB"], abs=0.01)


def test_a_layer_and_a_loss_counted_by_hand():
    """[32, 16] tokens under bf16: the linear keeps its input and a copy of its weight, the loss the
    logits' logarithms in fp32 and the targets."""

    class Tiny(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(16, 64, bias=False)

        def forward(self, x):
            return self.head(x)

    def loss(model):
        logits = model(torch.zeros(32, 16, requires_grad=True))
        return F.cross_entropy(logits, torch.zeros(32, dtype=torch.int64))

    for compiled, logits in ((False, 32 * 64 * 4), (True, 32 * 64 * 2)):
        method, impl = methods.build("dense", include=("head",)), ImplConfig(compile=compiled)
        need = footprint(Tiny, method, loss, TRAIN(), impl)
        assert (need.trained, need.moments, need.casts) == (4096, 8192, 2048)
        rest = need.activations - logits
        assert 32 * 16 * 2 + 32 * 8 <= rest <= 32 * 16 * 2 + 32 * 8 + 64  # and a scalar or two
        assert need.loss == (0 if compiled else 2 * logits)


NEED = Footprint(
    parameters=100, trained=400, frozen=80, moments=800, masks=40, bits=5, packed=60,
    operands=20, casts=200, activations=1000, checkpointed=300, loss=30, passing=8,
    block=10, root=20, width=2,
)  # fmt: skip


@pytest.mark.parametrize("rounded", [True, False])
def test_gpus_share_a_step(rounded, monkeypatch):
    """rounded: torch gathers weights in autocast's dtype, as it does from 2.15 on."""
    monkeypatch.setattr(planning.sharding, "gathers_rounded", lambda: rounded)
    one = per_gpu(NEED, TRAIN(), ImplConfig(), 1, accumulates=False)
    held = 400 + 80 + 800 + 40 + 60 + 20
    assert one["peak"] == held + 200 + 1000 + 30
    assert per_gpu(NEED, TRAIN(), ImplConfig(), 1, True)["peak"] == one["peak"] + 400
    recomputed = ImplConfig(activation_checkpointing=True)
    assert per_gpu(NEED, TRAIN(), recomputed, 1, False)["peak"] == one["peak"] - 700
    assert per_gpu(NEED, TRAIN(ema=0.9), ImplConfig(), 1, False)["peak"] == one["peak"] + 400
    ddp = per_gpu(NEED, TRAIN(), ImplConfig(), 4, accumulates=True)
    assert ddp["communication"] == 400  # buckets of gradients
    assert ddp["peak"] == one["peak"] + 800
    fsdp = per_gpu(NEED, TRAIN(), ImplConfig(shard="fsdp2"), 4, accumulates=True)
    gathered = (2 * 10 + 20) * (2 if rounded else 4)
    assert fsdp["communication"] == 2 * gathered + (10 + 20) * 6  # the teacher's weights as well
    assert (fsdp["packed operands"], fsdp["dense operands"]) == (0, 0)  # none at rest
    rest = fsdp["communication"] + 5 + 8 + (0 if rounded else 200) + 1000 + 30
    assert fsdp["peak"] == (held - 60 - 20) // 4 + 400 // 4 + rest


def planned(*overrides):
    return composed("plan", driver.freeze_plan, list(overrides))


@each(
    "overrides, parameters",
    [
        (["experiment=slope_bert_large_phase1"], 336_756_544),
        (["model=gpt2_5m", "model.gelu=relu2", "method=act24"], 5_376_256),
        (["experiment=sr_ste_transformer_base"], 63_110_144),
    ],
)
def test_every_family_has_a_plan(overrides, parameters):
    run = planned(*overrides)
    said = "\n".join(lines(run))
    assert run.footprint(run.micro_batch()).parameters == pytest.approx(parameters, rel=0.01)
    assert "This fits into the 139 GiB of a GPU." in said


def test_the_command_line(monkeypatch, capsys, tmp_path, hf_model):
    """A plan for a local checkpoint, whose shape is read."""
    hf_model("llama").save_pretrained(tmp_path)
    overrides = [f"model.path={tmp_path}", "method=ste", "method.include=[*.layers.*]"]
    monkeypatch.setattr("sys.argv", ["plan", "model=hf", "plan.gpus=2", *overrides])
    driver.main()
    said = capsys.readouterr().out
    weights = sum(p.numel() for p in hf_model("llama").parameters())
    assert f"with the method ste: {weights:,} weights" in said and "GPUs: 2, with ddp" in said
