"""SLoRB: what its term adds at the start, what it costs, and how a layer ends."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import methods
from methods.nn import lowrank, slorb
from models.gpt2 import GPT, GPTConfig
from tests.methods.loop import convert


def converted(seed=0, **options):
    """A layer of 16 inputs and 8 outputs with blocks of four, and its dense weight."""
    torch.manual_seed(seed)
    layer = nn.Linear(16, 8)
    dense = layer.weight.detach().clone()
    options = {"slorb_k": 4, "kl_weight": 0.0, "ramp_steps": 0, **options}
    return convert("ast", layer, **options)[0], dense


def product(layer):
    """S X [out, in]."""
    blocks = torch.eye(4).repeat_interleave(4, dim=1)
    return (layer.slorb_s @ (blocks if layer.slorb_x is None else layer.slorb_x)).detach()


def block_sums(weight, k=4):
    return weight.unflatten(1, (-1, k)).sum(-1)


def test_mean_keeps_the_block_sums_of_the_dense_weight():
    for train_x in (True, False):
        layer, dense = converted(slorb_train_x=train_x)
        used = layer.sparse_weight + product(layer)
        torch.testing.assert_close(block_sums(used), block_sums(dense), rtol=0, atol=1e-6)
        # So an input that is constant inside each block sees the dense layer.
        x = torch.randn(5, 4).repeat_interleave(4, dim=1)
        torch.testing.assert_close(layer(x), F.linear(x, dense, layer.bias), rtol=0, atol=1e-5)


def test_mean_by_hand():
    """The mean is over all k slots, not over the pruned ones."""
    weight = torch.tensor([[4.0, 1.0, 3.0, 2.0, 8.0, 7.0, 6.0, 1.0]])
    mask = torch.tensor([[1, 0, 1, 0, 1, 1, 0, 0]], dtype=torch.bool)
    s, x = torch.empty(1, 2), torch.empty(2, 8)
    slorb.initialize(weight, mask, s, x)
    blocks = torch.eye(2).repeat_interleave(4, dim=1)
    assert s.tolist() == [[0.75, 1.75]] and torch.equal(x, blocks)
    slorb.initialize(weight, torch.ones_like(mask), s, None)
    assert s.tolist() == [[0.0, 0.0]]


def test_gradients_reach_both_factors_and_the_dense_weight():
    layer, _ = converted()
    x, dy = torch.randn(6, 16), torch.randn(6, 8)
    layer(x).backward(dy)
    torch.testing.assert_close(layer.weight.grad, dy.t() @ x)
    torch.testing.assert_close(layer.slorb_s.grad, dy.t() @ x @ layer.slorb_x.detach().t())
    torch.testing.assert_close(layer.slorb_x.grad, layer.slorb_s.detach().t() @ dy.t() @ x)


TINY = GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=32, block_size=8, bias=True)


def test_the_end_is_saved_and_comes_back_without_the_method():
    for train_x in (True, False):
        torch.manual_seed(0)
        model = GPT(TINY)
        method = methods.build("ast", slorb_k=8, slorb_train_x=train_x, total_steps=4)
        method.convert(model)
        idx = torch.randint(0, 32, (2, 8))
        model.eval()
        with torch.no_grad():
            before = model(idx)[0]
            method.finalize(model)
            torch.testing.assert_close(model(idx)[0], before, rtol=0, atol=0)
        state = model.state_dict()
        own = {k for k in state if "slorb" in k}
        names = ("slorb_s", "slorb_x") if train_x else ("slorb_s",)
        layers = [f"transformer.h.0.mlp.{n}" for n in ("c_fc", "c_proj")]
        assert own == {f"{layer}.{n}" for layer in layers for n in names}
        assert state.keys() - own == GPT(TINY).state_dict().keys()
        layer = model.transformer.h[0].mlp.c_fc
        assert type(layer) is lowrank.BoostedLinear
        assert layer.weight.count_nonzero() == layer.weight.numel() // 2

        fresh = lowrank.attach(GPT(TINY), state)
        fresh.load_state_dict(state)
        with torch.no_grad():
            assert torch.equal(fresh.eval()(idx)[0], before)
            merged = lowrank.merge(copy.deepcopy(fresh))
            assert merged.state_dict().keys() == GPT(TINY).state_dict().keys()
            torch.testing.assert_close(merged(idx)[0], before, rtol=1e-5, atol=1e-6)
