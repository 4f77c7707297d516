"""The option `fp8` of layers with a mask and of compressed ones: which weights are quantised, when,
and by whom."""

import pytest
import torch
from torch import nn

import common_kernels as ck
from methods.nn.compressed import CompressedLinear
from methods.nn.gemms import DENSE, Products
from tests.methods.loop import convert, training_step

pytest.importorskip("triton", reason="cuSPARSELt is emulated where Triton's interpreter runs")

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
BOTH = Products(fprop=True, dgrad=True, fp8=True)
# Method, its options, its products on FP8 units.
CASES = [
    ("ste", {}, Products(fprop=True, fp8=True)),
    ("fst", {"dense_fraction": 0.0}, Products(True, True, True, fp8=True)),
    ("fst", {"dense_fraction": 0.0, "mvue": "off"}, BOTH),
    ("s_ste", {"mvue": "off"}, Products(fprop=True, fp8=True)),
    ("slope", {"column_refresh": 2}, BOTH),
]


def converted(name, fp8, **options):
    torch.manual_seed(0)
    layer, method = convert(name, nn.Linear(64, 128).to(DEVICE), fp8=fp8, **options)
    assert (layer.precision is None) == (fp8 == "off")
    return layer, method


def step(layer, method, number=0, tokens=96, lr=0.0, scale=1.0, size=1.0, most=torch.inf):
    """y, dX and the gradients of the parameters by name, with the input and dY; these are `scale`
    times and `size` times as large as those of another step of this number, dY at most `most`."""
    generator = torch.Generator().manual_seed(number)
    x, dy = (torch.randn(tokens, n, generator=generator).to(DEVICE) for n in (64, 128))
    x, dy = (scale * x).requires_grad_(), size * dy.clamp(-most, most)
    with training_step(method, number, torch.optim.SGD(layer.parameters(), lr=lr)):
        method.open_micro_batch()
        y = layer(x)
        y.backward(dy)
        grads = {n: p.grad.clone() for n, p in layer.named_parameters() if p.grad is not None}
        if not lr:
            layer.zero_grad()  # a gradient that is not finite would reach the weight
    return (y.detach(), x.grad, grads), x.detach(), dy


def weights(layer):
    """The weights of fprop and of dgrad."""
    weight = layer.effective_weight()
    if not isinstance(layer, CompressedLinear):
        return weight, weight
    kept = ck.unpack_mask(layer.column_mask, layer.values.shape[1])
    values = torch.where(kept, layer.values.detach(), 0.0)
    return weight, ck.expand_nm(values, layer.row_mask, *layer.pattern)


def test_simulated_products_are_those_of_the_quantised_sparse_weight():
    """Products are those of quantised operands; `hopper` has W in e5m2 where dgrad is sparse. MVUE
    needs the gradient's own magnitudes: its sample is what is quantised, with a scale of its own,
    or with half of dY's."""
    for name, options, products in (*CASES, ("slope", {"n": 1}, BOTH)):
        for recipe, dgrad, wgrad in (
            ("paper", "e5m2", "e5m2"),
            ("hybrid", "e4m3", "e4m3"),
            ("hopper", "e5m2" if products.dgrad else "e4m3", "e4m3"),
        ):
            layer, method = converted(name, recipe, **options)
            weight, other = weights(layer)
            # So that the largest entry of a sample is larger than the largest of dY.
            (y, dx, grads), x, dy = step(layer, method, most=2.0)
            seen = ck.fake_fp8(dy, "e5m2")
            want = ck.fake_fp8(x, "e4m3") @ ck.fake_fp8(weight, "e4m3").t() + layer.bias.detach()
            # Sums of at most 128 products of order one, in fp32.
            close = {"rtol": 1e-5, "atol": 1e-4}
            torch.testing.assert_close(y, want, **close)
            torch.testing.assert_close(dx, seen @ ck.fake_fp8(other, dgrad), **close)
            if layer.mvue:
                seen, scale = ck.mvue24(dy, layer.key[0], dim=0), ck.quantize_fp8(dy, "e5m2")[1] / 2
                if recipe == "hopper":
                    seen, wgrad = (seen * scale).to(E5M2).float() / scale, "e5m2"
                else:
                    seen = ck.fake_fp8(seen, "e5m2")
            want = seen.t() @ ck.fake_fp8(x, wgrad)
            if name == "slope":
                want = ck.compress_nm(want, layer.row_mask, *layer.pattern)
            torch.testing.assert_close(
                grads["values" if name == "slope" else "weight"], want, **close
            )
            layer.eval()
            assert torch.equal(layer(x), y)  # a recipe may train in eval mode
            with torch.no_grad():  # without FP8
                torch.testing.assert_close(layer(x), nn.functional.linear(x, weight, layer.bias))


def test_products_round_once_and_keep_a_byte_of_each_activation():
    kept = []
    layer, method = converted("ste", "paper")
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with hooks, torch.autocast(DEVICE, BF16):
        (y, dx, grads), x, dy = step(layer, method)
    assert {t.element_size() for t in kept if t.numel() == x.numel()} == {1}
    assert (y.dtype, grads["weight"].dtype) == (BF16, torch.float32)
    x, dy = (ck.fake_fp8(t.to(BF16).float(), f) for t, f in ((x, "e4m3"), (dy, "e5m2")))
    weight, unit = layer.effective_weight(), torch.finfo(BF16).eps / 2
    for got, want in (
        (y, x @ ck.fake_fp8(weight, "e4m3").t() + layer.bias.detach()),
        (dx, dy @ ck.fake_fp8(weight, "e5m2")),
    ):  # half a unit of bf16, beside sums in fp32
        torch.testing.assert_close(got.float(), want, rtol=unit, atol=1e-4)


def test_scales_beyond_each_other_do_not_overflow():
    """The gradient of a last layer may be tiny, and its scale huge."""
    (_, tiny, of_tiny), (_, one, of_one) = (
        step(*converted("ste", "paper"), size=size)[0] for size in (1e-30, 1.0)
    )
    torch.testing.assert_close(1e30 * tiny, one, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(1e30 * of_tiny["weight"], of_one["weight"], rtol=1e-5, atol=1e-4)


def test_products_on_units_are_those_of_the_simulation():
    """FP8 units give the simulated Y and dX, rounded to bf16, and the simulated gradients. Dense
    products of codes stay FP8 where they are faster, for it is another arithmetic; cuBLAS has no
    product of e5m2 by e5m2, so that one takes bf16 codes."""
    for name, options, products in CASES:
        for on, tokens in ((products, 96), (Products(fp8=True), 40)):
            if name == "fst" and on != products and options.get("mvue") != "off":
                continue  # the sample would be taken in another place
            for recipe in ("hopper", "hopper_delayed"):
                (simulated, plain), (real, method) = (
                    converted(name, recipe, **options) for _ in range(2)
                )
                assert real.candidates() == products and simulated.products == DENSE
                real.accelerate(on)
                if name != "slope":
                    assert real.codes is None or on != products
                    dgrad = real.operands(torch.float32)[1]
                    assert on == products or dgrad.on_units != products.dgrad
                for number in (0, 2):
                    if number:  # with new weights, and masks or columns where they are due
                        step(real, method, 1, lr=0.1)
                        simulated.load_state_dict(real.state_dict())
                    got, want = (
                        step(*of, number, tokens)[0] for of in ((real, method), (simulated, plain))
                    )
                    main = "values" if name == "slope" else "weight"
                    pairs = [*zip(got[:2], want[:2], strict=True), (got[2][main], want[2][main])]
                    for (a, b), unit in zip(pairs, (2**-8, 2**-8, 0.0), strict=True):
                        if CUDA:  # whose FP8 units keep some 14 bits of a sum
                            unit += 2**-10
                        assert (a - b).abs().max() <= unit * b.abs().max() + 1e-4


def test_a_dense_phase_has_no_fp8():
    for fp8, accelerated in (("paper", False), ("hopper", True)):
        layer, method = converted("fst", fp8, dense_fraction=0.5, total_steps=4)
        if accelerated:
            layer.accelerate(layer.candidates())
        for number, dense in ((0, False), (2, True), (3, True)):
            (y, dx, _), x, dy = step(layer, method, number)
            assert layer.is_dense is dense
            if dense:
                torch.testing.assert_close(y, nn.functional.linear(x, layer.weight, layer.bias))
                torch.testing.assert_close(dx, dy @ layer.weight)
                assert layer.packed is None
            else:
                want = ck.fake_fp8(x, "e4m3") @ ck.fake_fp8(layer.effective_weight(), "e4m3").t()
                assert (y - layer.bias - want).abs().max() <= 2**-8 * want.abs().max()
                assert (dx - dy @ layer.effective_weight()).abs().max() > 1e-3  # dY is quantised


def test_adapters_are_not_quantised():
    """Adapters beside a weight of zeros give every value, and each is what it is without FP8."""
    options = {"adapter_rank": 4, "adapter_fraction": 0.5, "total_steps": 2}
    seen = []
    for fp8 in ("off", "hopper"):
        layer, method = converted("slope", fp8, **options)
        with torch.no_grad():
            layer.values.zero_()
        assert "left" not in step(layer, method, 0)[0][2]
        right = torch.randn(layer.right.shape, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            layer.right.copy_(right)
        (y, dx, grads), *_ = step(layer, method, 1)
        assert y.abs().max() > 1 and dx.abs().max() > 1
        seen.append([y, dx, *(grads[name] for name in ("left", "right", "bias"))])
    torch.testing.assert_close(*seen)
