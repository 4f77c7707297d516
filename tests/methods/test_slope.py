"""SLoPe: static masks, compressed weights, double pruning, lazy adapters, memory."""

import math
from fnmatch import fnmatchcase

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from common_kernels import check24, double_prune_mask, expand_nm, nm_mask, unpack_mask
from methods import slope
from methods.nn.lowrank import SparsePlusLowRank, attach, merge
from models.gpt2 import GPT, GPTConfig
from tests.each import each
from tests.methods.loop import convert, dgrad_operand, training_step

PATTERNS = [(1, 2), (2, 4), (2, 8), (4, 8), (3, 6)]
TINY = GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=32, block_size=16, bias=True)


def converted(out_features, in_features, bias=False, dtype=torch.float32, **options):
    """A linear with Gaussian weights, and its method."""
    torch.manual_seed(0)
    layer = nn.Linear(in_features, out_features, bias=bias, dtype=dtype)
    nn.init.normal_(layer.weight)
    return convert("slope", layer, exclude=[], **options)


def row_mask(layer):
    return unpack_mask(layer.row_mask, layer.in_features)


def twice_pruned(weight, n=2, m=4):
    return weight * double_prune_mask(weight, n, m)


@each(("n", "m"), PATTERNS)
@each("rule", ["random", "magnitude"])
def test_masks_and_products_by_definition(n, m, rule):
    """Y is that of the masked weight, dX of the one pruned twice, and dW is compressed."""
    torch.manual_seed(0)
    dense = nn.init.normal_(nn.Linear(48, 96).weight.detach())
    layer, method = converted(96, 48, bias=True, n=n, m=m, mask=rule)
    mask = row_mask(layer)
    assert (mask.unflatten(1, (-1, m)).sum(-1) == n).all()
    assert torch.equal(layer.weight, dense * mask)
    assert rule == "random" or torch.equal(mask, nm_mask(dense, n, m))
    metrics = method.metrics()
    found = metrics["density"], metrics["illegal_groups"], metrics["flip_rate"]
    assert found == (n / m, 0, 0)
    twice = twice_pruned(layer.weight, n, m)
    assert torch.equal(dgrad_operand(layer), twice)
    x, dy = torch.randn(4, 16, 48, requires_grad=True), torch.randn(4, 16, 96)
    y = layer(x)
    y.backward(dy)
    assert torch.equal(y, F.linear(x, layer.weight, layer.bias))
    torch.testing.assert_close(x.grad, (dy.view(-1, 96) @ twice).view(x.shape))
    whole = dy.view(-1, 96).t() @ x.detach().view(-1, 48)
    assert torch.equal(layer.values.grad, whole[mask].view(96, -1))
    assert torch.equal(expand_nm(layer.values.grad, layer.row_mask, n, m), whole * mask)
    assert torch.equal(layer.bias.grad, dy.view(-1, 96).sum(0))


def test_random_masks_are_uniform_and_depend_on_seed_and_name_alone():
    def masks(seed=0, weight_seed=0):
        torch.manual_seed(weight_seed)
        model = nn.ModuleDict({"a": nn.Linear(256, 256), "b": nn.Linear(256, 256)})
        state = torch.get_rng_state()
        slope.Method(slope.Config(include=["*"], exclude=[], seed=seed)).convert(model)
        assert torch.equal(torch.get_rng_state(), state)
        return row_mask(model["a"]), row_mask(model["b"])

    a, b = masks()
    for other in (b, *masks(seed=1)):
        # Independent masks agree in half of their bits; 4 sigma of 65,536 bits.
        assert abs((a == other).double().mean().item() - 0.5) < 4 * 0.5 / 256
    assert all(map(torch.equal, (a, b), masks(weight_seed=7)))
    codes = (a.unflatten(1, (-1, 4)) * torch.tensor([1, 2, 4, 8])).sum(-1).flatten()
    shares = torch.bincount(codes, minlength=16)[[3, 5, 6, 9, 10, 12]] / codes.numel()
    assert (abs(shares - 1 / 6) < 4 * math.sqrt(1 / 6 * 5 / 6 / codes.numel())).all()


def test_the_backward_weight_follows_every_update():
    """Values at every step; the column mask when it is due, in between it stays."""
    for period in (1, 3, 0):
        layer, method = converted(32, 32, column_refresh=period)
        generator = torch.Generator().manual_seed(1)
        kept = dgrad_operand(layer) != 0
        changed = 0
        for step in range(7):
            method.on_step_begin(step)
            assert torch.equal(dgrad_operand(layer), layer.weight * kept)
            with torch.no_grad():
                layer.values += 2.0 * torch.randn(layer.values.shape, generator=generator)
            method.on_step_end(step)
            if period and (step + 1) % period == 0:
                before, kept = kept, twice_pruned(layer.weight) != 0
                changed += not torch.equal(before, kept)
            assert torch.equal(dgrad_operand(layer), layer.weight * kept)
        assert changed == {1: 7, 3: 2, 0: 0}[period]


def batch(step, sequences=8):
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, TINY.vocab_size, (sequences, 17), generator=generator)
    return {"input": ids[:, :-1], "target": ids[:, 1:]}


def gpt(**options):
    torch.manual_seed(0)
    model = GPT(TINY)
    method = slope.Method(slope.Config(**options))
    return model, method, method.convert(model)


def train(model, method, optimizer, steps, clip=1.0):
    for step in steps:
        with training_step(method, step, optimizer):
            method.loss(model, batch(step)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip)


def adapted(dtype=torch.float32, bias=True, rank=4):
    """A layer in its adapter phase, with R away from zero."""
    layer, method = converted(24, 16, bias, dtype, adapter_rank=rank, total_steps=100)
    method.on_step_begin(99)
    nn.init.normal_(layer.right)
    return layer, method


def factors(layer):
    return layer.left.detach().t(), layer.right


def test_adapters_sleep_until_their_phase_and_wake_without_a_jump():
    model, method, _ = gpt(adapter_rank=2, adapter_fraction=0.4, total_steps=5)
    plain, plain_method, _ = gpt()
    runs = [
        (m, by, torch.optim.AdamW(m.parameters(), lr=1e-2))
        for m, by in ((model, method), (plain, plain_method))
    ]
    optimizer, adapters = runs[0][2], {*dict(model.named_parameters())} - {*plain.state_dict()}
    assert method.adapter_start == 3
    for run in runs:
        train(*run, range(3))
    # Until then: no gradient, no moments, and the very training of a model without.
    assert method.phase() == "sparse"
    for name, parameter in model.named_parameters():
        if name in adapters:
            assert parameter.grad is None and parameter not in optimizer.state
        else:
            assert torch.equal(parameter, plain.get_parameter(name))
    # The first step with them: R is zero, so loss and gradients are the same up to rounding.
    losses = []
    for run, by, _ in runs:
        by.on_step_begin(3)
        losses.append(by.loss(run, batch(3)))
        losses[-1].backward()
    assert method.phase() == "adapters"
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    for name, parameter in plain.named_parameters():
        grad = model.get_parameter(name).grad
        torch.testing.assert_close(grad, parameter.grad, rtol=1e-4, atol=1e-7)
    for name in adapters:  # L has a gradient of zero while R is zero
        assert bool(model.get_parameter(name).grad.any()) == name.endswith(".right")


def test_sleeping_adapters_have_no_moments_no_gradient_and_no_part_in_the_end():
    """DDP gives gradients of zero, torch.distributed.checkpoint moments of zero; the first step of
    the adapters, 98, must find none."""
    for step, stay in ((97, False), (98, False), (99, True)):
        layer, method = converted(8, 8, adapter_rank=2, adapter_fraction=0.02, total_steps=100)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
        for adapter in (layer.left, layer.right):
            optimizer.state[adapter] = {"step": torch.tensor(float(step))}
            adapter.grad = torch.zeros_like(adapter)
        method.on_step_begin(step)
        method.on_gradients(step, optimizer)
        assert (layer.left in optimizer.state) == (layer.right in optimizer.state) == stay
        assert (layer.left.grad is None) == (layer.right.grad is None) == (step == 97)
        if step == 97:
            assert type(method.finalize(layer)) is nn.Linear
            assert list(layer.state_dict()) == ["weight"]


def test_adapter_gradients_are_those_of_autograd():
    """The function is Y = X W^T + (X L) R / rank + b for each sample by itself (the released
    accuracy code gives all the first one's), but the sparse part of dX takes the pruned weight."""
    for bias in (False, True):
        layer, _ = adapted(bias=bias)
        x = torch.randn(3, 5, 16, requires_grad=True)
        dy = torch.randn(3, 5, 24)
        layer(x).backward(dy)
        left, right = (f.detach().double().requires_grad_() for f in factors(layer))
        weight = layer.weight.double().requires_grad_()
        x64 = x.detach().double().requires_grad_()
        y = x64 @ weight.t() + x64 @ left @ right / 4 + (layer.bias.double() if bias else 0)
        close = {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(layer(x).double(), y, **close)
        y.backward(dy.double())
        torch.testing.assert_close(layer.right.grad.double(), right.grad, **close)
        torch.testing.assert_close(layer.left.grad.double(), left.grad.t(), **close)
        values = (weight.grad[row_mask(layer)]).view(24, -1)
        torch.testing.assert_close(layer.values.grad.double(), values, **close)
        want = x64.grad + dy.double() @ (twice_pruned(layer.weight) - layer.weight).double()
        torch.testing.assert_close(x.grad.double(), want, **close)


def test_the_merged_form_has_the_scale_of_training():
    """Y1 = X W^T and Y2 = X L, then Y1 + Y2 R / rank + b: bit for bit as in training. Its state
    loads into a plain model, which can be one of dense linears."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        layer, method = adapted(dtype)
        x = torch.randn(2, 7, 16).to(dtype)
        (left, right), weight = factors(layer), layer.weight
        trained = layer(x).detach()
        with torch.no_grad():
            evaluated = layer.eval()(x)
        method.finalize(layer)
        assert type(layer) is SparsePlusLowRank
        assert sorted(layer.state_dict()) == ["bias", "left", "right", "weight"]
        assert torch.equal(layer.weight, weight) and int(check24(layer.weight)) == 0
        assert torch.equal(layer.left, left.t())
        merged = layer(x)
        state = {f"fc.{name}": value for name, value in layer.state_dict().items()}
        plain = attach(nn.ModuleDict({"fc": nn.Linear(16, 24, dtype=dtype)}), state)
        plain.load_state_dict(state)
        for other in (trained, evaluated, layer(x), plain["fc"](x)):
            assert torch.equal(merged, other)
        if dtype == torch.float32:
            merge(plain)
            assert type(plain["fc"]) is nn.Linear
            torch.testing.assert_close(plain["fc"](x), merged)
        y1, y2 = x.double() @ weight.t().double(), x.double() @ left.double()
        want = y1 + y2 @ right.double() / 4 + layer.bias.double()
        # Y1 and Y2 are rounded to the dtype, and so is the sum.
        size = y1.abs() + y2.abs() @ right.double().abs() / 4 + layer.bias.double().abs()
        size += x.double().abs() @ weight.t().double().abs()
        assert ((merged.double() - want).abs() <= 2 * torch.finfo(dtype).eps * size).all()


def test_adapters_train_in_the_last_share_of_the_steps_but_in_one_at_least():
    for steps, start in ((1, 0), (10, 9), (300, 297)):
        assert slope.Method(slope.Config(adapter_rank=2, total_steps=steps)).adapter_start == start
    layer, _ = converted(512, 1024, adapter_rank=64, total_steps=100)
    assert layer.left.shape == (64, 1024) and layer.right.shape == (64, 512)
    error = 4 * math.sqrt(2 / layer.left.numel())
    assert abs(layer.left.var().item() - 1) < error and not layer.right.any()


def test_names_shapes_and_dtypes_of_the_state():
    layer, _ = converted(24, 16, True, torch.bfloat16, adapter_rank=4, total_steps=100)
    state = {k: (tuple(v.shape), v.dtype) for k, v in layer.state_dict().items()}
    assert state == {
        "values": ((24, 8), torch.bfloat16),
        "bias": ((24,), torch.bfloat16),
        "row_mask": ((24, 2), torch.uint8),
        "column_mask": ((24, 1), torch.uint8),
        "left": ((4, 16), torch.bfloat16),
        "right": ((4, 24), torch.bfloat16),
    }


def test_training_memory_is_that_of_the_formula():
    """(2 w + 8) n / m + 1 / 8 + n / (8 m) bytes a weight, w the bytes of its dtype, with Adam's
    moments in fp32. 2:4 with bf16 weights: 6.1875 of 12, 0.516 of dense."""
    for n, m in PATTERNS:
        for dtype in (torch.bfloat16, torch.float32):
            layer, method = converted(96, 192, dtype=dtype, n=n, m=m)
            weight = dtype.itemsize
            method.on_step_begin(0)
            layer(torch.randn(8, 192, dtype=dtype)).sum().backward()
            held = [*layer.parameters(), *layer.buffers(), *(p.grad for p in layer.parameters())]
            measured = (sum(t.nbytes for t in held) + 8 * layer.values.numel()) / (96 * 192)
            assert measured == (2 * weight + 8) * n / m + 1 / 8 + n / (8 * m)


def test_default_names_of_other_models():
    excluded = slope.Config().exclude
    for dense, pruned in (
        ("bert.encoder.layer.0.attention.self.query", "bert.encoder.layer.10.attention.self.query"),
        ("classifier", "bert.pooler.dense"),
        ("blocks.0.attn.qkv", "blocks.0.attn.proj"),
        ("h.0.attn.c_attn", "h.10.attn.c_attn"),
        ("model.layers.0.self_attn.q_proj", "model.layers.10.self_attn.q_proj"),
    ):
        assert any(fnmatchcase(dense, glob) for glob in excluded)
        assert not any(fnmatchcase(pruned, glob) for glob in excluded)


def test_a_pattern_per_block_range():
    model, method, _ = gpt(patterns=["*.h.1.*=2:8", "*.h.1.attn.*=1:4"])
    layers = method.sparse_layers
    for name, layer in layers.items():
        block, attention = name.split(".")[2], "attn" in name
        assert layer.pattern == ((2, 4) if block == "0" else (1, 4) if attention else (2, 8))
    train(model, method, torch.optim.AdamW(model.parameters(), lr=1e-2), range(2))
    assert method.metrics()["illegal_groups"] == 0
    kept, whole = (
        sum(getattr(m, n).numel() for m in layers.values()) for n in ("values", "weight")
    )
    assert method.metrics()["density"] == kept / whole


def test_an_optimizer_made_before_the_conversion_is_refused():
    """It holds the weights that `values` replaced, and would silently train nothing."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    early = torch.optim.AdamW(model.parameters())
    _, method = convert("slope", model, exclude=[])
    method.on_step_begin(0)
    model(torch.randn(4, 8)).sum().backward()
    with pytest.raises(ValueError, match=r"0\.values.*after method\.convert"):
        method.on_gradients(0, early)
    method.on_gradients(0, torch.optim.AdamW(model.parameters()))


def test_the_zeros_of_an_earlier_phase_stay_whatever_the_seed():
    """BERT's second phase starts from the weights of the first; other random masks would halve
    them."""
    first, method = converted(16, 32, seed=0)
    method.finalize(first)
    kept = first.weight != 0
    assert kept.float().mean() == 0.5
    slope.Method(slope.Config(seed=7, exclude=())).convert(first)
    assert torch.equal(first.weight != 0, kept)
