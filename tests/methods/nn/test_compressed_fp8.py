"""Tests of SLoPe's products in FP8: which values they take, on which units, and what stays."""

import pytest
import torch
from torch import nn

import methods
from common_kernels import Packed24, compress_nm, expand_nm, fake_fp8, unpack24, unpack_mask
from methods.nn.compressed_fp8 import Fp8CompressedLinear
from methods.nn.gemms import DENSE, Products

pytest.importorskip("triton", reason="cuSPARSELt is emulated where Triton's interpreter runs")

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
SPARSE = Products(fprop=True, dgrad=True, fp8=True)
FORMATS = {"paper": ("e5m2", "e5m2"), "hybrid": ("e4m3", "e4m3"), "hopper": ("e5m2", "e4m3")}


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    if not CUDA:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def converted(fp8, **options):
    torch.manual_seed(0)
    layer = nn.Linear(64, 128).to(DEVICE)
    method = methods.build("slope", include=("*",), fp8=fp8, **options)
    method.convert(layer)
    assert isinstance(layer, Fp8CompressedLinear)
    return layer, method


def step(layer, method, number=0, tokens=96):
    """y, dX and the gradients of the parameters by name, with the input and dY."""
    generator = torch.Generator().manual_seed(number)
    x, dy = (torch.randn(tokens, n, generator=generator).to(DEVICE) for n in (64, 128))
    x.requires_grad_()
    method.on_step_begin(number)
    method.open_micro_batch()
    y = layer(x)
    y.backward(dy)
    grads = {name: p.grad for name, p in layer.named_parameters()}
    layer.zero_grad()
    return (y.detach(), x.grad, grads), x.detach(), dy


def twice_pruned(layer):
    kept = unpack_mask(layer.column_mask, layer.values.shape[1])
    values = torch.where(kept, layer.values.detach(), 0.0)
    return expand_nm(values, layer.row_mask, *layer.pattern)


def test_simulated_products_are_those_of_the_quantised_weights():
    for n, m in ((2, 4), (1, 4)):
        for recipe in FORMATS:
            layer, method = converted(recipe, n=n, m=m)
            (y, dx, grads), x, dy = step(layer, method)
            dgrad, wgrad = FORMATS[recipe]
            weight, seen = layer.effective_weight(), fake_fp8(dy, "e5m2")
            want = fake_fp8(x, "e4m3") @ fake_fp8(weight, "e4m3").t() + layer.bias.detach()
            # Sums of at most 128 products of order one, in fp32.
            torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-4)
            want = seen @ fake_fp8(twice_pruned(layer), dgrad)
            torch.testing.assert_close(dx, want, rtol=1e-5, atol=1e-4)
            want = compress_nm(seen.t() @ fake_fp8(x, wgrad), layer.row_mask, n, m)
            torch.testing.assert_close(grads["values"], want, rtol=1e-5, atol=1e-4)
            layer.eval()
            with torch.no_grad():  # without FP8
                torch.testing.assert_close(layer(x), nn.functional.linear(x, weight, layer.bias))


def test_products_on_units_are_those_of_the_simulation():
    """FP8 units give the simulated Y and dX, rounded to bf16, and the simulated gradients."""
    for tokens in (96, 40):
        for products in (SPARSE, Products(fp8=True)):
            for recipe in ("hopper", "hopper_delayed"):
                (simulated, plain), (real, method) = converted(recipe), converted(recipe)
                assert real.candidates() == SPARSE and simulated.products == DENSE
                real.accelerate(products)
                for number in range(2):
                    got, want = (
                        step(*of, number, tokens)[0] for of in ((real, method), (simulated, plain))
                    )
                    units = (2**-8, 2**-8, 0.0)
                    pairs = [
                        *zip(got[:2], want[:2], strict=True),
                        (got[2]["values"], want[2]["values"]),
                    ]
                    for (a, b), unit in zip(pairs, units, strict=True):
                        if CUDA:  # whose FP8 units keep some 14 bits of a sum
                            unit += 2**-10
                        assert (a - b).abs().max() <= unit * b.abs().max() + 1e-4
                    for of in (method, plain):
                        of.on_gradients(number)
                        of.on_step_end(number)


def test_what_is_packed_are_the_codes_of_the_simulation():
    """Packed operands hold the simulation's codes, also after steps in which columns are pruned
    anew, or by an older weight."""
    for column_refresh in (1, 2):
        options = {"column_refresh": column_refresh}
        (simulated, _), (real, method) = (converted("hopper", **options) for _ in range(2))
        real.accelerate(SPARSE)
        assert real.codes is None and real.codes_dgrad is None
        optimizer = torch.optim.SGD(real.parameters(), lr=0.1)
        for number in range(3):
            grads = step(real, method, number)[0][2]
            for name, parameter in real.named_parameters():
                parameter.grad = grads[name]
            method.on_gradients(number, optimizer)
            optimizer.step()
            method.on_step_end(number)
        simulated.load_state_dict(real.state_dict())
        assert torch.equal(real.code_scales, simulated.code_scales)
        packed = unpack24(Packed24((real.packed,), (128, 64), torch.float8_e4m3fn))
        assert torch.equal(packed.float(), simulated.codes.float())
        packed = unpack24(Packed24((real.packed_transposed,), (64, 128), torch.float8_e5m2))
        assert torch.equal(packed.t().float(), simulated.codes_dgrad.float())


def test_adapters_are_not_quantised():
    """Adapters beside a weight of zeros give every value, and each is what it is without FP8."""
    for sparse in (False, True):
        seen = []
        for fp8 in ("off", "hopper"):
            layer, method = converted(
                fp8, adapter_rank=4, adapter_left_sparse=sparse, adapter_fraction=0.5, total_steps=2
            )
            with torch.no_grad():
                layer.values.zero_()
            assert step(layer, method, 0)[0][2]["left"] is None
            method.on_gradients(0)
            right = torch.randn(layer.right.shape, generator=torch.Generator().manual_seed(1))
            with torch.no_grad():
                layer.right.copy_(right)
            method.on_step_end(0)
            (y, dx, grads), *_ = step(layer, method, 1)
            assert y.abs().max() > 1 and dx.abs().max() > 1
            seen.append([y, dx, *(grads[name] for name in ("left", "right", "bias"))])
        for got, want in zip(*seen, strict=True):
            torch.testing.assert_close(got, want)


def test_a_finished_layer_keeps_nothing_of_fp8():
    layer, method = converted("hopper_delayed")
    step(layer, method)
    method.on_gradients(0)
    method.on_step_end(0)
    assert layer.has_history
    weight = layer.effective_weight()
    method.finalize(layer)
    assert type(layer) is nn.Linear and torch.equal(layer.weight, weight)
    assert not {"recipe", "has_history", "operand"} & set(vars(layer))


def test_which_methods_have_it():
    assert methods.build("slope", fp8="paper").quantizes
    assert not methods.build("slope").quantizes
    assert converted("paper")[0].candidates() == DENSE  # simulated alone
    for name in ("released.slope", "released.slope_mask"):
        with pytest.raises(ValueError, match=rf"fp8=hopper; {name} has no FP8 products"):
            methods.build(name, fp8="hopper")
