"""Run-time sparsity: masks by magnitude, once per step; both modes; torchao's names."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from common_kernels import check24, transposable_mask24
from common_kernels.matmul import choice, linear24
from common_kernels.pack import BUFFERED, VENDOR
from methods.nn import at_run_time, operands
from methods.semi_sparse import (
    SemiSparseActivationLinear,
    SemiSparseLinear,
    swap_linear_with_semi_sparse_linear,
    swap_semi_sparse_linear_with_linear,
)
from tests.methods.loop import convert, training_step

# Rows by hand: the large entries are negative, so that a mask by signed value keeps all others.
SIGNED = torch.tensor([[-9.0, -8.0, 1.0, 1.0]] * 2 + [[1.0, 1.0, -9.0, -8.0]] * 2)
KEPT = torch.tensor([[True, True, False, False]] * 2 + [[False, False, True, True]] * 2)


def mlp(seed=0, bias=True):
    torch.manual_seed(seed)
    layers = nn.Linear(8, 16, bias=bias), nn.GELU(), nn.Linear(16, 8, bias=bias)
    return nn.Sequential(*layers)


def converted(model, **options):
    return convert("semi_sparse", model, **options)[1]


def layer_with(values, **options):
    layer = nn.Linear(values.shape[1], values.shape[0], bias=False)
    layer.weight.data = values.clone()
    return layer, converted(layer, **options)


def test_weights_and_inputs_are_ranked_by_magnitude():
    for algorithm in ("greedy", "exact"):
        layer, _ = layer_with(SIGNED, algorithm=algorithm)
        assert torch.equal(layer.mask, KEPT)
        assert torch.equal(layer(torch.eye(4)), torch.where(KEPT, SIGNED, 0.0).t())
    for algorithm in ("greedy", "exact", "rows"):
        layer, _ = layer_with(torch.eye(4), mode="activation", algorithm=algorithm)
        assert torch.equal(layer(SIGNED), torch.where(KEPT, SIGNED, 0.0))
    assert torch.equal(layer(SIGNED[:1]), torch.tensor([[-9.0, -8.0, 0.0, 0.0]]))


def test_sparse_steps_come_first():
    model = mlp()
    method = converted(model, sparse_fraction=0.5, total_steps=6)
    optimizer, phases = torch.optim.SGD(model.parameters(), lr=0.05), []
    for step in range(6):
        with training_step(method, step, optimizer):
            method.open_micro_batch()
            model(torch.randn(16, 4, 8)).square().mean().backward()
        phases.append(method.phase())
    assert phases == ["sparse"] * 3 + ["dense"] * 3
    assert method.metrics()["density"] == 1.0


def test_products_with_sparse_inputs():
    """Bias, 3-D input, a number of tokens that fills no tile: all of them failed in torchao."""
    for algorithm in ("greedy", "exact", "rows"):
        torch.manual_seed(0)
        layer = nn.Linear(8, 6)  # inputs alone are a multiple of four
        converted(layer, mode="activation", algorithm=algorithm)
        x = torch.randn(2, 3, 8, requires_grad=True)
        y = layer(x)
        c = torch.randn_like(y)
        (y * c).sum().backward()
        # With W = I and no bias a layer gives the pruned input itself.
        pruner, _ = layer_with(torch.eye(8), mode="activation", algorithm=algorithm)
        pruned = pruner(x.detach())
        assert int(check24(pruned)) == 0
        kept = pruned != 0
        assert torch.equal(pruned, torch.where(kept, x.detach(), 0.0))
        assert 15 <= int(kept.sum()) <= 24
        with pytest.raises(ValueError, match="6 inputs; 2:4 needs"):
            converted(nn.Linear(6, 8), mode="activation", algorithm=algorithm)
        expected = F.linear(pruned, layer.weight, layer.bias)
        torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(x.grad, c @ layer.weight.detach(), rtol=1e-6, atol=1e-6)
        dw = torch.einsum("bto,bti->oi", c, pruned)
        torch.testing.assert_close(layer.weight.grad, dw, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(layer.bias.grad, c.sum((0, 1)), rtol=1e-6, atol=1e-6)


def test_tiles_are_sparse_along_tokens_too_and_couple_them():
    """dW contracts over tokens. The coupling is why a causal model wants `rows`."""
    torch.manual_seed(0)
    x = torch.randn(1, 8, 8)
    later = x.clone()
    later[:, 3] *= 100.0
    for algorithm, couples in {"greedy": True, "exact": True, "rows": False}.items():
        layer, _ = layer_with(torch.eye(8), mode="activation", algorithm=algorithm)
        y = layer(x)[0]
        assert (int(check24(y, dim=0)) == 0) is couples
        assert torch.equal(y[:3], layer(later)[0, :3]) is not couples


@pytest.mark.parametrize("cls", [SemiSparseLinear, SemiSparseActivationLinear])
def test_swapping_changes_the_class_and_nothing_else(cls):
    """torchao built new modules: hooks and training flag were lost, random numbers drawn."""
    model = mlp()
    model[0].eval()
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    modules, parameters = list(model.modules()), list(model.parameters())
    latent = [p.detach().clone() for p in parameters]
    generator = torch.get_rng_state()

    def unchanged(kind):
        assert type(model[0]) is type(model[2]) is kind
        assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        assert (model[0].training, model[2].training) == (False, True)
        assert torch.equal(torch.get_rng_state(), generator)

    swap_linear_with_semi_sparse_linear(model, {"0": cls, "2": cls})
    unchanged(cls)
    model(torch.arange(32.0).view(4, 8))
    swap_semi_sparse_linear_with_linear(model)
    unchanged(nn.Linear)
    assert len(seen) == 1
    # Dense weights, the pruned ones included.
    assert all(torch.equal(a, b) for a, b in zip(parameters, latent, strict=True))


def test_names_globs_and_prefixes():
    def model():
        return nn.ModuleDict({"attn": nn.Linear(8, 8), "mlp": mlp()})

    exact = model()
    config = {"attn": SemiSparseActivationLinear, "mlp.2": SemiSparseLinear}
    swap_linear_with_semi_sparse_linear(exact, config)
    assert type(exact["attn"]) is SemiSparseActivationLinear
    assert [type(exact["mlp"][i]) for i in (0, 2)] == [nn.Linear, SemiSparseLinear]
    swap_semi_sparse_linear_with_linear(exact, include=["mlp.*"])
    assert type(exact["attn"]) is SemiSparseActivationLinear
    assert type(exact["mlp"][2]) is nn.Linear

    part = model()
    swap_linear_with_semi_sparse_linear(part["mlp"], {"mlp.*": SemiSparseLinear}, current="mlp")
    assert type(part["mlp"][0]) is type(part["mlp"][2]) is SemiSparseLinear
    assert type(part["attn"]) is nn.Linear


def test_a_swap_that_does_not_fit_changes_nothing():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 6))
    for config, message in (
        ({"0": SemiSparseLinear, "head": SemiSparseLinear}, r"'head' names no nn\.Linear.*0, 1"),
        ({"0": SemiSparseLinear, "1": SemiSparseLinear}, r"1 cannot be swapped: weight \[6, 8\]"),
    ):
        with pytest.raises(ValueError, match=message):
            swap_linear_with_semi_sparse_linear(model, config)
        assert type(model[0]) is type(model[1]) is nn.Linear


def test_every_change_of_the_weight_is_seen():
    layer = nn.Linear(4, 4, bias=False)
    swap_linear_with_semi_sparse_linear(layer, {"": SemiSparseLinear})
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for values in (SIGNED, SIGNED.flip(1), SIGNED.t() * 2):
        layer.weight.data.copy_(values)  # leaves the version counter alone
        mask = transposable_mask24(values, "greedy")
        for module in (layer, compiled, copy.deepcopy(layer)):
            assert torch.equal(module(torch.eye(4)), torch.where(mask, values, 0.0).t())
    torch._dynamo.reset()


@pytest.fixture
def made(monkeypatch):
    """The layouts of the products on packed matrices so far, as which all that can be are run."""
    found, product = [], at_run_time.mm24
    monkeypatch.setenv("SPARSE24_MATMUL", "cusparselt")
    monkeypatch.setattr(
        at_run_time, "mm24", lambda *a, **k: found.append(a[0].layout) or product(*a, **k)
    )
    monkeypatch.setattr(
        operands, "linear24", lambda *a, **k: found.append(a[0].layout) or linear24(*a, **k)
    )
    at_run_time._chosen.cache_clear()
    yield found
    at_run_time._chosen.cache_clear()


@pytest.mark.parametrize("packer", ["", "cusparselt"])
def test_products_run_sparse_without_a_further_call(made, monkeypatch, packer):
    """With biases, few tokens, and either packer; on a CPU the library is emulated."""
    monkeypatch.setenv(choice.PACKER_VARIABLE, packer)
    choice._library_layout.cache_clear()
    for cls, algorithm, each in (
        (SemiSparseLinear, "exact", 2),
        (SemiSparseActivationLinear, "greedy", 2),
        (SemiSparseActivationLinear, "rows", 1),
    ):
        kind = type("Kind", (cls,), {"algorithm": algorithm})
        torch.manual_seed(0)
        model = nn.Linear(64, 128, bias=each == 2).bfloat16()
        plain = copy.deepcopy(model)
        for one in (model, plain):
            swap_linear_with_semi_sparse_linear(one, {"": kind})
        made.clear()
        x, y, gradients = torch.randn(3, 7, 64).bfloat16(), [], []
        for one, matmul in ((model, "cusparselt"), (plain, "dense")):
            monkeypatch.setenv("SPARSE24_MATMUL", matmul)
            given = x.clone().requires_grad_()
            y.append(one(given))
            y[-1].float().square().mean().backward()
            gradients.append([given.grad, *(p.grad for p in one.parameters())])
        layout = VENDOR if packer else BUFFERED
        assert made == [layout] * each
        for got, want in zip([y[0], *gradients[0]], [y[1], *gradients[1]], strict=True):
            assert (got - want).float().norm() <= 2**-7 * want.float().norm()  # bf16's last bit
        monkeypatch.setenv("SPARSE24_MATMUL", "cusparselt")
        with torch.no_grad():
            assert torch.equal(model(x), y[0])
    choice._library_layout.cache_clear()
