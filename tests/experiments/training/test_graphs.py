"""Blocks that are computed again, and CUDA graphs: where passes are replayed, what `auto` reports,
what a graph relies on."""

import itertools
from types import SimpleNamespace

import pytest
import torch

import methods
from experiments import dino
from experiments.support.errors import UserError
from experiments.training import graphs, pretraining
from experiments.training.blocks import blocks, recompute, trained_blocks
from experiments.training.optimization import Optimization
from methods import sr_ste
from models.bert import BertConfig, BertLM
from models.dino import DINO, DinoConfig
from models.gpt2 import GPT, GPTConfig
from models.heads import Classifier
from models.hf import CausalLM
from models.vit import ViT, ViTConfig
from tests.experiments.conftest import untimed
from tests.experiments.test_dino import TINY as TINY_DINO
from tests.lifetimes import Operators

DROPPED = GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=32, block_size=8, dropout=0.5)


def test_blocks_are_found_before_and_after_conversion():
    model = GPT(DROPPED)
    names = ["transformer.h.0", "transformer.h.1"]
    assert list(blocks(model)) == names
    sr_ste.Method(sr_ste.Config()).convert(model)
    assert list(blocks(model)) == names
    # A teacher in the model has blocks that are not trained.
    shape = ViTConfig(image_size=16, patch_size=4, width=16, depth=2, heads=2, n_classes=0)
    model = DINO(ViT(shape), DinoConfig(total_steps=1, prototypes=8, hidden=8, local_crops=0))
    assert len(blocks(model)) == 4
    assert trained_blocks(model) == list(model.student.backbone.vit.blocks)


def test_blocks_that_are_computed_again_give_the_same_gradients_dropout_included():
    torch.manual_seed(0)
    model = GPT(DROPPED).train()
    ids = torch.randint(0, 32, (2, 9))
    runs, found = [], []

    def step():
        torch.manual_seed(1)
        model.zero_grad()
        _, loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])

    step()
    recompute(model)
    model.transformer.h[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    step()
    assert len(runs) == 2  # forward, and again in the backward pass
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    with torch.no_grad():
        model(ids[:, :-1], ids[:, 1:])
    assert len(runs) == 3


GPU, CPU = torch.device("cuda"), torch.device("cpu")
SIZES = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 32, "block_size": 8}
LAUNCHED = "passes are launched from Python: no CUDA graphs "


def gpt2():
    return GPT(GPTConfig(**SIZES))


def chosen(setting, device=GPU, ranks=1, model=None, descent_every=0, one_shape=True):
    train, world = SimpleNamespace(descent_every=descent_every), graphs.World(0, ranks, device)
    return graphs.choose(setting, world, model or gpt2(), train, one_shape)


def test_where_passes_are_launched_instead(hf_model):
    """CUDA graphs are refused, where they were asked for, if they cannot serve the training."""
    assert chosen("auto") == (True, "passes are replayed from CUDA graphs")
    assert chosen(True) == (True, None)
    assert chosen(False) == chosen(False, CPU, 2, one_shape=False) == (False, None)
    recomputed = gpt2()
    recompute(recomputed)
    for why, given in (
        ("without a GPU", {"device": CPU}),
        ("with 2 processes", {"ranks": 2}),
        ("with a model of transformers", {"model": Classifier(CausalLM(hf_model("gpt2")), 2)}),
        ("with the head for masked words", {"model": BertLM(BertConfig(**SIZES))}),
        ("with batches of different shapes", {"one_shape": False}),
        ("with impl.activation_checkpointing=true", {"model": recomputed}),
        ("with train.descent_every", {"descent_every": 10}),
    ):
        replayed, line = chosen("auto", **given)
        assert not replayed and line.startswith(LAUNCHED + why)
    with pytest.raises(UserError, match=r"impl.cuda_graphs=true without a GPU.*_graphs=false"):
        chosen(True, device=CPU)


def test_passes_for_whose_graphs_memory_is_short_are_launched(tiny, tmp_path, monkeypatch):
    """Said once; the failed capture leaves nothing behind."""
    launched, graphed = (
        tiny("impl.micro_batch=2", f"impl.cuda_graphs={name}", f"runs={tmp_path / name}")
        for name in ("false", "auto")
    )
    pretraining.run(launched, lambda _: None)

    def capture(part, pool):
        part.func.__self__.model.get_parameter("lm_head.weight").grad = None
        part.func.__self__.model.transformer.wte.weight.grad = torch.tensor(1.0).expand(320, 16)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(graphs, "_obstacle", lambda *_: None)
    said = []
    result = pretraining.run(graphed, said.append).result
    assert [line for line in said if "CUDA" in line] == [
        "passes are replayed from CUDA graphs",
        f"{LAUNCHED}in the free memory: they need as much again as the passes take",
    ]
    assert result["cuda_graphs"] is False and untimed(launched) == untimed(graphed)


RUNS = [
    *((name, ("model.gelu=relu2",) * (name == "act24")) for name in methods.available()),
    ("fst", ("method.refresh_every=3", "method.dense_fraction=0.5")),
    ("s_ste", ("method.fp8=paper",)),
    ("s_ste", ("method.fp8=hopper_delayed",)),
    ("slope", ("method.adapter_rank=2", "method.adapter_fraction=0.3")),
    ("dino", ("method=semi_sparse",)),
]


@pytest.mark.parametrize(("name", "options"), RUNS, ids=[" ".join([n, *o]) for n, o in RUNS])
def test_a_phase_has_the_same_passes_in_every_step(tiny, tmp_path, monkeypatch, name, options):
    """A graph freezes operators and numbers that are given from Python, so these must not change
    within a phase. Nothing may be read back either. Steps that differ must differ in phase or
    flags, by which they are told apart."""
    passes, own = [], Optimization._backward

    def watched(self, batch, share):
        replays = graphs.Replays(self.model, own, print)
        flags = tuple(held[name] for held, name in replays._flags)
        with Operators() as operators:
            loss = own(self, batch, share)
        passes.append(((self.method.phase(), flags), operators.found))
        return loss

    monkeypatch.setattr(Optimization, "_backward", watched)
    short = ("train.steps=8", "train.eval_every=8", "impl.checkpoint_every=0")
    if name == "dino":
        config = dino.load([*TINY_DINO, *short, *options, f"runs={tmp_path}"])
    else:
        config = tiny(f"method={name}", *short, *options)
    pretraining.run(config, lambda _: None)
    assert len(passes) == 8
    for _, some in itertools.groupby(passes, lambda kind: kind[0]):
        (_, first), *others = some
        assert all(found == first for _, found in others)
        for operator, given in first:
            assert operator not in ("aten._local_scalar_dense.default", "aten.nonzero.default")
            booleans = any(leaf[1:] == (torch.bool,) for leaf in given)
            assert not (booleans and operator.startswith("aten.index")), "its length is read back"
