"""act24: the network against autograd, its sparse products, what it converts, what it measures."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import methods
from common_kernels import fake_fp8, nm_mask
from methods.nn.acceleration import problems
from methods.nn.gemms import Products
from models.base import SquaredReLU
from models.gpt2 import GPT, GPTConfig
from models.vit import ViT, ViTConfig
from tests.methods.loop import training_step

GPT2 = GPTConfig(
    n_layer=2, n_head=2, n_embd=16, vocab_size=32, block_size=8, bias=True, gelu="relu2"
)


def network(width=16, hidden=32, bias=True):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(width, hidden, bias), SquaredReLU(), nn.Linear(hidden, width, bias)
    )


def converted(model, dtype=None, **options):
    method = methods.build("act24", **{"include": ["*"], "total_steps": 4, **options})
    method.convert(model, dtype)
    return method


def by_autograd(model, x, prune=True):
    """The network in plain PyTorch, with the mask of its hidden state."""
    z = F.linear(x, model[0].weight, model[0].bias)
    h = z.relu().square()
    h = h * nm_mask(h.detach()) if prune else h
    return F.linear(h, model[2].weight, model[2].bias), h


@pytest.mark.parametrize("bias", [True, False])
def test_a_network_is_that_of_autograd(bias):
    """Any number of tokens; pruned, and dense from the first step on with dense_fraction=1."""
    for options in ({}, {"dense_fraction": 1.0}, {"prune_evaluation": True}):
        prune = "dense_fraction" not in options
        plain, model = network(bias=bias), network(bias=bias)
        method = converted(model, **options)
        x, dy = torch.randn(2, 3, 5, 16).unbind(0)
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, want = model(ours), by_autograd(plain, theirs, prune)[0]
        torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-6)
        for result in (y, want):
            result.backward(dy)
        pairs = zip([ours, *model.parameters()], [theirs, *plain.parameters()], strict=True)
        for a, b in pairs:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            want = by_autograd(plain, x, "prune_evaluation" in options)[0]
            torch.testing.assert_close(model.eval()(x), want, rtol=1e-5, atol=1e-6)
        method.finalize(model)
        assert [type(m) for m in model] == [nn.Linear, SquaredReLU, nn.Linear]
        torch.testing.assert_close(model(x), by_autograd(plain, x, prune=False)[0])


@pytest.mark.parametrize(
    ("fp8", "dense"), [("off", 1.0), ("off", 0.25), ("hopper", 1.0), ("hopper_delayed", 1.0)]
)
def test_packed_products_are_those_on_dense_operands_up_to_rounding(fp8, dense):
    """None of them, one or both, emulated here, on tokens that fill no tile: results, the measured
    share and the magnitudes that are noted, in training alone; the second step has a history. Rows
    of padding, which see only the bias, count for no scale."""
    pytest.importorskip("triton", reason="cuSPARSELt is emulated where Triton's interpreter runs")
    found = []
    for packed in ((), ("0",), ("2",), ("0", "2")):
        model = network(64, 128)
        with torch.no_grad():  # 0 for all tokens, 9 without one
            model[0].weight[0], model[0].weight[0, 0], model[0].bias[0] = 0.0, -9.0, 9.0
        method = converted(
            model.to(torch.bfloat16), fp8=fp8, measure_every=1, prune_evaluation=True,
            dense_features=dense,
        )  # fmt: skip
        products = method.accelerate(100, "cusparselt") if packed else {}
        if packed:
            assert products["2"].fprop and products["0"].dgrad
            assert products["2"].wgrad == products["0"].wgrad == (dense < 1)
            of_dz = problems(model[0].candidates(), (128, 64), True, torch.bfloat16, 100)["wgrad"]
            assert (of_dz.rows, of_dz.columns, of_dz.tokens) == (128, 128, 64)
            assert products["2"].fp8 == products["0"].fp8 == (fp8 != "off")
        for name in products.keys() - {*packed}:
            model[int(name)].accelerate(Products(fp8=fp8 != "off"))
        x = torch.randn(100, 64).to(torch.bfloat16)
        x[:, 0] = 1.0
        x.requires_grad_()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for step in range(2):
            with training_step(method, step, optimizer):
                x.grad = None
                for _ in range(2):  # only in later ones do the bits depend on the number of tokens
                    method.open_micro_batch()
                y = model(x)
                y.backward(torch.ones_like(y))
                found.append([y, x.grad, *(p.grad.clone() for p in model.parameters())])
            found[-1].append(torch.tensor(method.metrics()["kept_magnitude"]))
        if fp8 == "hopper_delayed":
            assert model[0].has_history and model[2].has_history
            found[-1] += [layer.amax.clone() for layer in method.layers.values()]
        with torch.no_grad():
            found[-1].append(model.eval()(x))
        if fp8 == "hopper_delayed":
            assert not any(layer.amax_seen.any() for layer in method.layers.values())
    for index in range(2, len(found)):
        for a, b in zip(found[index], found[index % 2], strict=True):
            assert (a - b).norm() <= 2**-7 * b.norm()
    grads = []  # a sample of two tokens is exact, though rows of padding have a bias
    for _ in range(2):
        method.open_micro_batch()
        grads.append(torch.autograd.grad(model.train()(x[:2]).sum(), [*model.parameters()]))
    assert all(map(torch.equal, *grads))


def test_sums_over_a_sample_of_tokens_are_unbiased_and_exact_in_the_densest_features():
    """Within 5 sigma of 400 samples."""
    plain, model = network(bias=False), network(bias=False)
    method, x, dy = converted(model, dense_features=0.25), *torch.randn(2, 64, 16).unbind(0)
    y, h = by_autograd(plain, x)
    y.backward(dy)
    dense = (h[::17] != 0).sum(0).topk(8).indices
    method.on_step_begin(0)
    drawn: tuple[list, list] = [], []
    for _ in range(400):
        method.open_micro_batch()
        grads = torch.autograd.grad(model(x), [*model.parameters()], dy)
        for found, own in zip(drawn, (grads[0], grads[1].t()), strict=True):
            found.append(own)
    for found, want in zip(drawn, (plain[0].weight.grad, plain[2].weight.grad.t()), strict=True):
        own = torch.stack(found)
        torch.testing.assert_close(own[:, dense], want[dense].expand(400, -1, -1))
        sigma = own.std(0) / 20
        assert ((own.mean(0) - want).abs() <= 5 * sigma + 1e-5).all()
        assert (sigma > 1e-3).any(1).sum() > 16


@pytest.mark.parametrize(
    ("fp8", "formats"),  # of the gradients, of W1 and W2 in dgrad, of X and H' in wgrad
    [
        ("paper", ("e5m2", "e5m2", "e5m2", "e5m2")),
        ("hybrid", ("e5m2", "e4m3", "e4m3", "e4m3")),
        ("hopper", ("e5m2", "e5m2", "e4m3", "e4m3")),
        ("hopper_delayed", ("e5m2", "e5m2", "e4m3", "e4m3")),
    ],
)
def test_simulated_fp8_is_that_of_plain_formulas(fp8, formats):
    """In fp32, whose sums differ by up to 2^-20 of theirs: where codes are made of sums, so many of
    2^3 (e5m2) are other ones that the error is sqrt(2 * 2^-3 * 2^-20) in norm. The second step has
    a history. Evaluation and the dense phase have no FP8."""
    grad, back1, back2, wgrad = formats
    model = network(64, 128)
    method = converted(model, fp8=fp8, dense_fraction=0.5, prune_evaluation=True)
    (w1, b1), (w2, b2) = ((m.weight.detach(), m.bias.detach()) for m in (model[0], model[2]))
    x, dy = torch.randn(2, 12, 64).unbind(0)
    dy[:, 40:] *= 1e-3
    optimizer, ours = torch.optim.SGD(model.parameters(), lr=0.0), x.clone().requires_grad_()
    assert method.capabilities.ends_dense
    for step in range(4):
        with training_step(method, step, optimizer):
            assert method.phase() == ("dense" if step < 2 else "sparse")
            y = model(ours)
            ours.grad = None
            y.backward(dy)
            got = [y, ours.grad, *(p.grad.clone() for p in model.parameters())]
        z = (fake_fp8(x, "e4m3") @ fake_fp8(w1, "e4m3").t() if step > 1 else x @ w1.t()) + b1
        h = z.relu().square()
        if step < 2:
            torch.testing.assert_close(y, F.linear(h, w2, b2), rtol=1e-5, atol=1e-6)
            continue
        h, dy8 = h * nm_mask(h), fake_fp8(dy, grad)
        dz = 2 * (dy8 @ fake_fp8(w2, back2)) * h.sqrt()
        dz8 = fake_fp8(dz, grad)
        want = [fake_fp8(h, "e4m3") @ fake_fp8(w2, "e4m3").t() + b2, dz8 @ fake_fp8(w1, back1)]
        want += [dz8.t() @ fake_fp8(x, wgrad), dz.sum(0)]
        want += [dy8.t() @ fake_fp8(h, wgrad), dy.sum(0)]
        for a, b in zip(got, want, strict=True):
            assert (a - b).norm() <= 2**-10 * b.norm()
    with torch.no_grad():
        want = by_autograd(model, x)[0]
        torch.testing.assert_close(model.eval()(x), want, rtol=1e-5, atol=1e-6)
    method.finalize(model)
    assert not [*model.buffers()]


def test_the_share_of_magnitude_is_that_of_the_measured_step():
    model = network()
    method = converted(model, measure_every=2, flips_by_layer=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    shares = []
    for step in range(3):
        x = torch.randn(2, 4, 16)
        with training_step(method, step, optimizer):
            for micro in x:
                model(micro).sum().backward()
        z = F.linear(x, model[0].weight, model[0].bias).detach().relu().square()
        shares.append(float((z * nm_mask(z)).sum() / z.sum()))
        assert 0.5 < shares[-1] < 1
        told = method.metrics()
        assert told["kept_magnitude"] == pytest.approx(shares[step // 2 * 2], rel=1e-5)
        assert told["kept_magnitude.2"] == told["kept_magnitude"]
        assert told["density"] == 1 and "illegal_groups" not in told


def test_the_networks_of_gpt2_vit_and_nemotron():
    """Nemotron is LLaMA with two linears and squared ReLU. The state dict stays that of the
    model."""
    from transformers import GPT2Config, GPT2LMHeadModel, NemotronConfig, NemotronForCausalLM

    small = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    gpt2 = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=32, activation_function="relu2")
    shape = {"width": 16, "depth": 2, "heads": 2, "image_size": 8, "patch_size": 4, "n_classes": 4}
    ids = torch.ones(2, 8, dtype=torch.int64)
    for model, inputs in (
        (GPT(GPT2), {"input": torch.ones(2, 8, dtype=torch.int64)}),
        (ViT(ViTConfig(**shape, squared_relu=True)), {"input": torch.ones(2, 3, 8, 8)}),
        (NemotronForCausalLM(NemotronConfig(**small, **heads)), {"input_ids": ids}),
        (GPT2LMHeadModel(gpt2), {"input_ids": ids}),
    ):
        before = model.eval()(**inputs)[0]
        keys = model.state_dict().keys()
        method = converted(model, include="ffn", prune_evaluation=True)
        assert len(method.layers) == 4 and model.state_dict().keys() >= keys
        with torch.no_grad():
            assert not torch.equal(model(**inputs)[0], before)  # something was pruned
        method.finalize(model)
        assert torch.equal(model(**inputs)[0], before) and model.state_dict().keys() == keys


def test_what_is_refused():
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    with pytest.raises(ValueError, match=r"a squared ReLU, as a module, and.*set model\.gelu"):
        converted(model)
    children = [*network(16, 16)]
    for extra in nn.Dropout(0.5), nn.Dropout(0.5, inplace=True), nn.LayerNorm(16):
        with pytest.raises(ValueError, match=r"else between them.*dropout between them to 0"):
            converted(nn.Sequential(*children[:2], extra, children[2]))
    with pytest.raises(ValueError, match="nothing else between them"):
        converted(nn.Sequential(children[1], children[0], children[2]))
    other, x = nn.Sequential(nn.Linear(16, 16), children[1]), torch.ones(2, 16)  # of the activation
    before = other(x)
    converted(nn.Sequential(*children, nn.Dropout(0.5)))
    assert torch.equal(other(x), before)
