"""The permutation of hidden channels: what a swap gains, what the search finds, and a function that
does not change."""

import copy

import pytest
import torch
from torch import nn

import methods
from common_kernels import nm_mask
from methods.nn.config import Config
from methods.nn.permutation import gains, networks, permute, search
from models.bert import BertConfig, BertLM
from models.gpt2 import GPT, GPTConfig


def kept(weight, n=2, m=4):
    return torch.where(nm_mask(weight, n, m), weight, 0.0).abs().sum()


def test_the_gain_of_every_swap_is_what_swapping_adds():
    generator = torch.Generator().manual_seed(0)
    for n, m in ((2, 4), (1, 4), (3, 4), (2, 8)):
        w = torch.randint(0, 9, (5, 3 * m), generator=generator).float()  # sums are exact
        unknown, every = torch.full((3 * m, 3 * m), torch.nan), torch.ones(3 * m) > 0
        gain, groups = gains(w, n, m, unknown, every)
        assert groups.sum() == kept(w, n, m)
        for a in range(3 * m):
            for b in range(3 * m):
                swapped = w.clone()
                swapped[:, [a, b]] = w[:, [b, a]]
                wanted = kept(swapped, n, m) - kept(w, n, m) if a // m != b // m else -torch.inf
                assert gain[a, b] == wanted


def test_the_search_by_hand():
    """The four large columns of one group go to both: 8 + 7 + 6 + 5 stay instead of 8 + 7 + 1 + 1;
    a second row that is best so has its say."""
    w = torch.tensor([[8.0, 7.0, -6.0, 5.0, 1.0, 1.0, -1.0, 1.0]])
    order = search(w, 2, 4)
    assert order.sort().values.tolist() == [*range(8)]
    assert (kept(w), kept(w[:, order])) == (17, 26)
    other = 100 * torch.tensor([[1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]])
    assert search(torch.cat([w, other]), 2, 4)[[0, 1, 4, 5]].sort().values.tolist() == [0, 1, 4, 5]


class Gated(nn.Module):
    """LLaMA's feed-forward network, its second linear in the middle."""

    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(8, 24), nn.Linear(24, 8), nn.Linear(8, 24)

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


def test_a_network_computes_the_same_and_its_mask_keeps_more():
    torch.manual_seed(0)
    bert = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 32, "block_size": 8}
    text = torch.randint(0, 32, (2, 8))
    for model, x in (
        (GPT(GPTConfig(**bert, bias=True)), text),
        (BertLM(BertConfig(**bert, glu=True)), text),
        (Gated(), torch.randn(4, 8)),
        (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), torch.randn(2, 4, 16)),
    ):
        model.eval()
        (found,) = [(name, down) for name, _, down in networks(model)]
        name, down = found
        dense, before = copy.deepcopy(model), down.weight.detach().clone()
        permute(model, {name: down}, Config())
        assert kept(down.weight) > 1.01 * kept(before)
        assert torch.equal(down.weight.sort(1).values, before.sort(1).values)
        outputs = [out[0] if isinstance(out := m(x), tuple) else out for m in (model, dense)]
        torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)


def test_what_cannot_absorb_it_is_left_alone():
    shared = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    shared[2].weight = shared[0].weight
    scaled = nn.Sequential(nn.Linear(8, 16), nn.PReLU(16), nn.Linear(16, 8))
    for model in (scaled, shared):
        assert not [*networks(model)]
        with pytest.raises(ValueError, match=r"permute=True, but no converted linear.*permute=Fal"):
            permute(model, dict(model.named_modules()), Config())


def test_methods_take_their_masks_from_permuted_weights():
    for name, options in (
        ("one_shot", {}),
        ("gmp", {"begin_fraction": 0.0, "end_fraction": 0.0}),
        ("imp", {"begin_fraction": 0.0, "rounds": 1}),
        ("slope", {"mask": "magnitude", "include": "ffn"}),
    ):
        sums = []
        for given in (False, True):
            torch.manual_seed(0)
            model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=32, block_size=8))
            method = methods.build(name, permute=given, total_steps=1, **options)
            method.convert(model)
            method.on_step_begin(0)
            sums.append(method.finalize(model).transformer.h[0].mlp.c_proj.weight.abs().sum())
        assert sums[1] > 1.01 * sums[0]
