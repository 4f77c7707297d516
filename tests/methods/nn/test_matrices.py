"""Tests of matrices that their modules multiply themselves: experts, and attention of torch."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

import methods
from common_kernels import check24, nm_mask, soft_threshold24
from methods.nn import conversion, matrices
from tests.methods.loop import through_a_file, training_step

EXPERTS = ["eager", "batched_mm", "grouped_mm"]
METHODS = {
    "ste": {},
    "s_ste": {"mvue": "off", "beta": "none"},
    "one_shot": {},
    "gmp": {"begin_fraction": 0.0, "end_fraction": 0.4, "prune_every": 1},
    "step": {"min_fraction": 0.3, "max_fraction": 0.3},
    "fst": {"mvue": "off", "dense_fraction": 0.0, "refresh_every": 1},
}


def mixtral(implementation="eager"):
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    return MixtralForCausalLM(
        MixtralConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, vocab_size=32, num_local_experts=4,
            experts_implementation=implementation,
        )
    )  # fmt: skip


class Attention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(32, 16)
        self.attn = nn.MultiheadAttention(16, 2, batch_first=True, **options)

    def forward(self, input_ids, labels):
        x = self.embedding(input_ids)
        context = x[..., : self.attn.kdim]
        y, _ = self.attn(x, x if self.attn.kdim == 16 else context, context, need_weights=False)
        return y, y.square().mean()


def batch():
    ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


MODELS = [mixtral, Attention]
through_pickle = partial(through_a_file, weights_only=False)


def built(name, model):
    names = [n for n, m, a in conversion.every_matrix(model) if matrices.multiplies(m, a)]
    method = methods.build(name, include=names, total_steps=6, **METHODS[name])
    return method, method.convert(model), names


def loss_of(model):
    output = model(**batch())
    return output.loss if hasattr(output, "loss") else output[1]


@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("name", METHODS)
def test_they_train_and_end_as_the_plain_module_with_true_zeros(build, name):
    model = build()
    plain = copy.deepcopy(model)
    types, parameters = [type(m) for m in model.modules()], dict(model.named_parameters())
    method, report, names = built(name, model)
    assert report.names == tuple(names) and len(names) == 2
    assert report.sparse_parameters == sum(m.weight.numel() for m in method.layers.values())
    optimizer = method.optimizer(model.parameters(), lr=1e-3)
    for step in range(6):
        with training_step(method, step, optimizer):
            method.loss(model, batch()).backward()
        for copied in (copy.deepcopy, through_pickle) if step == 2 else ():
            twin, its_method = copied((model, method))
            assert torch.equal(loss_of(twin), loss_of(model))
            its_method.finalize(twin)
            torch.testing.assert_close(loss_of(twin), loss_of(model))
    measured = method.metrics()
    assert (measured["illegal_groups"], measured["phase"]) == (0, "sparse")
    with torch.no_grad():
        before = loss_of(model.eval())
        method.finalize(model)
        torch.testing.assert_close(loss_of(model), before)
    assert [type(m) for m in model.modules()] == types
    assert model.state_dict().keys() == plain.state_dict().keys()
    after = dict(model.named_parameters())
    assert [*after] == [*parameters] and all(after[n] is p for n, p in parameters.items())
    for n, p in plain.named_parameters():
        assert after[n].shape == p.shape
        held = n.removesuffix(".weight") in names
        assert not held or (int(check24(after[n])) == 0 and not torch.equal(after[n], p))


def test_gradients_are_those_at_the_weight_in_use():
    """Straight through for STE and S-STE, under the mask for one-shot pruning."""
    for build in (*MODELS, lambda: Attention(kdim=8, vdim=8)):
        for name, project in {
            "ste": lambda w: torch.where(nm_mask(w), w, 0.0),
            "s_ste": soft_threshold24,
            "one_shot": lambda w: torch.where(nm_mask(w), w, 0.0),
        }.items():
            for implementation in EXPERTS if build is mixtral else [None]:
                model = build(implementation) if implementation else build()
                plain = copy.deepcopy(model)
                method, _, names = built(name, model)
                with torch.no_grad():
                    for n, p in plain.named_parameters():
                        if n.removesuffix(".weight") in names:
                            p.copy_(project(p))
                ours, theirs = method.loss(model, batch()), loss_of(plain)
                torch.testing.assert_close(ours, theirs)
                ours.backward(), theirs.backward()
                for n, layer in method.layers.items():
                    held = f"{n}.weight" if n.endswith("out_proj") else n
                    expected = plain.get_parameter(held).grad
                    if name == "one_shot":
                        expected = torch.where(layer.mask.view(expected.shape), expected, 0.0)
                    torch.testing.assert_close(layer.weight.grad.view(expected.shape), expected)
