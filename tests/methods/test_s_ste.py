"""S-STE: the scale beta, the operands, the options of the paper's tables."""

import pytest
import torch
from torch import nn

from common_kernels import fake_fp8, mvue24, soft_threshold24
from methods import s_ste
from tests.each import each
from tests.methods.loop import convert, training_step


def converted(out=32, inputs=64, weight=None, **options):
    torch.manual_seed(0)
    layer = nn.Linear(inputs, out, bias=False)
    if weight is not None:
        layer.weight.data = weight
    return convert("s_ste", layer, **options)


def test_beta_of_gaussian_weights():
    """1.484 whatever the scale, and 25.8 % of the energy is left out; 2.515 to keep the L1 norm."""
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(768, 3072, generator=generator)
    for std in (1e-3, 0.02, 1.0):
        layer, _ = converted(weight=std * normal)
        assert layer.scale.dtype == torch.float32
        assert float(layer.scale) == pytest.approx(1.484, abs=0.005)
        left = (layer.weight.detach() - layer.effective_weight()).square().sum()
        assert float(left / layer.weight.detach().square().sum()) == pytest.approx(0.258, abs=0.003)
    layer, _ = converted(weight=normal, beta="keep_l1")
    assert float(layer.scale) == pytest.approx(2.515, abs=0.02)
    kept = layer.effective_weight().abs().sum()
    torch.testing.assert_close(kept, normal.abs().sum(), rtol=1e-5, atol=0)


def test_beta_is_the_least_squares_scale():
    layer, _ = converted()
    weight = layer.weight.detach()
    projected = soft_threshold24(weight)
    inner = ((weight - layer.scale * projected) * projected).sum()
    assert abs(float(inner)) <= 1e-6 * float(weight.square().sum())
    assert float(layer.scale) >= 1.0
    scaled, _ = converted(weight=8.0 * weight)
    assert torch.equal(scaled.scale, layer.scale)
    nothing, _ = converted(weight=torch.zeros(4, 8))
    assert nothing.scale == 1.0 and not nothing.effective_weight().any()


def train(layer, method, steps=5):
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(3)
    for step in range(steps):
        with training_step(method, step, optimizer):
            method.open_micro_batch()
            layer(
                torch.randn(16, layer.in_features, generator=generator)
            ).square().mean().backward()


def test_beta_is_frozen_except_in_the_dynamic_recipe():
    for recipe in ("none", "keep_l1", "mse", "mse_dynamic"):
        layer, method = converted(beta=recipe)
        before = layer.scale.clone()
        train(layer, method)
        if recipe == "mse_dynamic":
            weight = layer.weight.detach()
            expected = s_ste.projection_scale(weight, soft_threshold24(weight), "mse")
            assert torch.equal(layer.scale, expected)
            assert not torch.equal(layer.scale, before)
        else:
            assert torch.equal(layer.scale, before)
        if recipe == "none":
            assert float(layer.scale) == 1.0


def test_gamma_moves_the_threshold():
    weight = torch.tensor([[4.0, -3.0, 2.0, 1.0]]).repeat(4, 1)
    # Second smallest 2, third smallest 3: thresholds 2, 2.5 and 3.
    for gamma, expected in ((0.0, [2.0, -1.0]), (0.5, [1.5, -0.5]), (1.0, [1.0, 0.0])):
        layer, _ = converted(weight=weight.clone(), gamma=gamma, beta="none")
        assert layer.effective_weight()[0].tolist() == [*expected, 0.0, 0.0]


@each(("recipe", "backward"), [("paper", "e5m2"), ("hybrid", "e4m3")])
def test_fp8_operands_have_the_formats_of_the_recipe(recipe, backward):
    """After training as well; the sample of the weight is drawn and then rounded."""
    layer, method = converted(fp8=recipe, mvue_weight=True)
    for steps in (0, 3):
        train(layer, method, steps)
        sparse = layer.effective_weight()
        method.on_step_begin(steps)
        sample = mvue24(sparse, layer.key[0], s_ste._WEIGHT_STREAM, dim=0)
        fprop, dgrad = layer.codes.float(), layer.codes_dgrad.float()
        assert torch.equal(fprop / layer.code_scales[0], fake_fp8(sparse, "e4m3"))
        assert torch.equal(dgrad / layer.code_scales[1], fake_fp8(sample, backward))


def test_the_sample_of_the_weight_has_random_numbers_of_its_own():
    """With those of dY, which count up from 0, the two samples of a step would be dependent."""
    layer, method = converted(mvue_weight=True)
    sparse = layer.effective_weight()
    assert torch.equal(layer.operand_dgrad, sparse)  # no step has begun
    method.on_step_begin(0)
    method.open_micro_batch()
    seed, micro_batch = layer.key
    assert micro_batch == 0 and torch.equal(layer.operands(torch.float32)[0].matrix, sparse)
    sample = mvue24(sparse, seed, s_ste._WEIGHT_STREAM, dim=0)
    assert torch.equal(layer.operands(torch.float32)[1].matrix, sample)
    assert not torch.equal(sample, mvue24(sparse, seed, 0, dim=0))
    again = layer.operand_dgrad.clone()
    layer.draw()
    assert torch.equal(layer.operand_dgrad, again)
    # Not even a step of 2^40 tokens through 2^16 outputs counts up to them.
    assert s_ste._WEIGHT_STREAM > 2**40 // 4 * 2**16


def test_the_gradient_is_sampled_by_the_chosen_design():
    for design in ("exact", "sequential", "off"):
        layer, method = converted(mvue=design)
        method.on_step_begin(4)
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(16, 64, generator=generator)
        dy = torch.randn(16, 32, generator=generator)
        expected = {"off": dy.t() @ x} | {
            name: mvue24(dy, layer.key[0], 0, design=name, dim=0).t() @ x
            for name in ("exact", "sequential")
        }
        method.open_micro_batch()
        layer(x).backward(dy)
        tolerance = {"rtol": 0, "atol": 1e-4}  # sums of 16 products of up to a few tens, in fp32
        torch.testing.assert_close(layer.weight.grad, expected[design], **tolerance)
        for name in expected.keys() - {design}:
            assert (layer.weight.grad - expected[name]).abs().max() > 1
