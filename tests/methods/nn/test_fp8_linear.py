"""The option `fp8` of methods with a mask: which weights are quantised, when, and by whom."""

import pytest
import torch
from torch import nn

import methods
from common_kernels import Packed24, fake_fp8, unpack24
from common_kernels.matmul import unavailable
from methods.nn.fp8_linear import Fp8Linear
from methods.nn.gemms import DENSE, Products

pytest.importorskip("triton", reason="cuSPARSELt is emulated where Triton's interpreter runs")

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
TOKENS = 96
# Method, its options, its products on FP8 units.
CASES = [
    ("ste", {}, Products(fprop=True, fp8=True)),
    ("semi_sparse", {}, Products(fprop=True, dgrad=True, fp8=True)),
    ("fst", {"dense_fraction": 0.0}, Products(True, True, True, fp8=True)),
    ("fst", {"dense_fraction": 0.0, "mvue": "off"}, Products(True, True, fp8=True)),
    ("released.semi_sparse", {}, Products(fprop=True, dgrad=True, fp8=True)),
]
every_method = pytest.mark.parametrize(
    ("name", "options", "products"), CASES, ids=lambda case: str(case)[:40]
)


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    if not CUDA:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def converted(name, fp8, **options):
    torch.manual_seed(0)
    layer = nn.Linear(64, 128).to(DEVICE)
    method = methods.build(name, include=("*",), fp8=fp8, **options)
    method.convert(layer)
    assert isinstance(layer, Fp8Linear)
    return layer, method


def step(layer, method, number=0):
    """y, dX, dW of one step, and its input and gradient."""
    generator = torch.Generator().manual_seed(number)
    x, dy = (torch.randn(TOKENS, n, generator=generator).to(DEVICE) for n in (64, 128))
    x.requires_grad_()
    method.on_step_begin(number)
    method.open_micro_batch()
    y = layer(x)
    y.backward(dy)
    dw, layer.weight.grad = layer.weight.grad, None
    return (y.detach(), x.grad, dw), x.detach(), dy


def test_simulated_products_are_those_of_the_quantised_sparse_weight():
    """Products are those of quantised operands; `hopper` has W in e5m2 where dgrad is sparse."""
    for name, options, products in CASES:
        for recipe, dgrad, wgrad in (
            ("paper", "e5m2", "e5m2"),
            ("hybrid", "e4m3", "e4m3"),
            ("hopper", None, "e4m3"),
        ):
            layer, method = converted(name, recipe, **options)
            (y, dx, dw), x, dy = step(layer, method)
            weight, seen = layer.effective_weight(), fake_fp8(dy, "e5m2")
            dgrad = dgrad or ("e5m2" if products.dgrad else "e4m3")
            want = fake_fp8(x, "e4m3") @ fake_fp8(weight, "e4m3").t() + layer.bias.detach()
            # Sums of at most 128 products of order one, in fp32.
            torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(dx, seen @ fake_fp8(weight, dgrad), rtol=1e-5, atol=1e-4)
            if not layer.mvue:
                torch.testing.assert_close(dw, seen.t() @ fake_fp8(x, wgrad), rtol=1e-5, atol=1e-4)
            layer.eval()
            with torch.no_grad():  # without FP8
                torch.testing.assert_close(layer(x), nn.functional.linear(x, weight, layer.bias))


def test_products_on_units_are_those_of_the_simulation():
    """FP8 units give the simulated Y and dX, rounded to bf16, and the simulated dW."""
    for name, options, products in CASES:
        (simulated, plain), (real, method) = (
            converted(name, "hopper", **options) for _ in range(2)
        )
        assert real.candidates() == products
        real.accelerate(products)
        assert real.operand is None and real.codes is None
        results = zip(step(real, method)[0], step(simulated, plain)[0], strict=True)
        for (got, want), unit in zip(results, (2**-8, 2**-8, 0.0), strict=True):
            if CUDA:  # whose FP8 units keep some 14 bits of a sum
                unit += 2**-10
            assert (got - want).abs().max() <= unit * want.abs().max() + 1e-4


def test_what_is_packed_are_the_codes_of_the_simulation():
    """Packed operands hold the simulation's codes, also after steps that choose masks anew."""
    for name, options, products in CASES:
        (simulated, _), (real, method) = (converted(name, "hopper", **options) for _ in range(2))
        real.accelerate(products)
        optimizer = torch.optim.SGD(real.parameters(), lr=0.1)
        for number in range(2):
            *_, dw = step(real, method, number)[0]
            real.weight.grad = dw
            method.on_gradients(number, optimizer)
            optimizer.step()
            method.on_step_end(number)
        simulated.load_state_dict(real.state_dict())
        assert torch.equal(real.code_scales, simulated.code_scales)
        packed = unpack24(Packed24((real.packed,), (128, 64), E4M3))
        assert torch.equal(packed.float(), simulated.codes.float())
        if products.dgrad:
            packed = unpack24(Packed24((real.packed_transposed,), (64, 128), E5M2))
            assert torch.equal(packed.t().float(), simulated.codes_dgrad.float())
        else:
            assert torch.equal(real.codes_dgrad.t().float(), simulated.codes_dgrad.float())


def test_a_dense_phase_has_no_fp8():
    for accelerated in (False, True):
        for fp8 in ("paper", "hopper"):
            layer, method = converted("fst", fp8, dense_fraction=0.5, total_steps=4)
            if accelerated:
                layer.accelerate(layer.candidates())
            for number, dense in ((0, False), (2, True), (1, False)):
                (y, dx, _), x, dy = step(layer, method, number)
                assert layer.is_dense is dense
                if dense:
                    torch.testing.assert_close(y, nn.functional.linear(x, layer.weight, layer.bias))
                    torch.testing.assert_close(dx, dy @ layer.weight)
                    assert layer.packed is None
                else:
                    want = fake_fp8(x, "e4m3") @ fake_fp8(layer.effective_weight(), "e4m3").t()
                    error = (y - layer.bias - want).abs().max()
                    assert error <= 2**-8 * want.abs().max()
                    assert (
                        dx - dy @ layer.effective_weight()
                    ).abs().max() > 1e-3  # dY is quantised


def test_dense_products_of_codes_where_these_are_faster():
    """FP8 stays on with matmul=dense, for it is another arithmetic; cuBLAS has no product of e5m2
    by e5m2, so that one takes bf16 codes."""
    for name in ("ste", "fst"):
        options = {"dense_fraction": 0.0, "mvue": "off"} if name == "fst" else {}
        (simulated, plain), (real, method) = (
            converted(name, "hopper", **options) for _ in range(2)
        )
        real.accelerate(Products(fp8=True))
        _, dgrad = real.operands(torch.float32)
        assert dgrad.on_units == (name == "ste")
        for got, want in zip(step(real, method)[0], step(simulated, plain)[0], strict=True):
            assert (got - want).abs().max() <= 2**-8 * want.abs().max() + 1e-4


def test_options_that_do_not_go_together():
    with pytest.raises(ValueError, match="fp8=hopper needs mode=weight"):
        methods.build("semi_sparse", mode="activation", fp8="hopper")
    with pytest.raises(ValueError, match="fp8='e4m3'; choose one of off, paper, hybrid, hopper"):
        methods.build("ste", fp8="e4m3")
    for name in ("ste", "fst", "semi_sparse"):
        assert methods.build(name, fp8="paper").quantizes and not methods.build(name).quantizes
    assert converted("ste", "paper")[0].candidates() == DENSE  # simulated alone


@pytest.mark.parametrize("mvue", ["exact", "off"])
def test_our_own_kernels_multiply_codes_as_cusparselt_does(mvue):
    """Our kernels give cuSPARSELt's products, with one rounding to bf16 in the place of two; their
    inputs come in multiples of 128."""
    if reason := unavailable("cuda", DEVICE, E4M3):
        pytest.skip(reason)
    generator, seen = torch.Generator().manual_seed(0), []
    x, dy = (torch.randn(100, n, generator=generator).to(DEVICE, BF16) for n in (128, 192))
    for kernels in ("cuda", "cusparselt"):
        torch.manual_seed(0)
        layer = nn.Linear(128, 192).to(DEVICE)
        options = {"fp8": "hopper", "dense_fraction": 0.0, "mvue": mvue}
        method = methods.build("fst", include=["*"], **options)
        method.convert(layer, BF16)
        (products,) = method.accelerate(100, kernels).values()
        assert products.kernels("fprop") == kernels and products.kernels("dgrad") == "cusparselt"
        assert products.kernels("wgrad") == ("" if mvue == "off" else kernels)
        method.on_step_begin(0)
        method.open_micro_batch()
        own = x.clone().requires_grad_()
        with torch.autocast(DEVICE, BF16):
            y = layer(own)
        y.backward(dy)
        seen.append((y.detach(), own.grad, layer.weight.grad, layer.bias.grad))
    unit = torch.finfo(BF16).eps
    for name, a, b in zip(("y", "dx", "dw", "db"), *seen, strict=True):
        bound = 2**-9 if name == "dw" else unit  # FP8 units keep some 14 bits of a sum
        torch.testing.assert_close(a, b, rtol=unit, atol=bound * float(b.abs().max()), msg=name)
