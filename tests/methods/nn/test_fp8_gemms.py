"""The three GEMMs in FP8: which values they multiply, in which precision, what they keep, and who
runs them."""

import multiprocessing

import pytest
import torch
import torch.distributed as dist
from torch import nn

import methods
from common_kernels import fake_fp8, mvue24, quantize_fp8
from common_kernels.matmul import Measured
from methods.nn import acceleration
from methods.nn.acceleration import choose
from methods.nn.fp8_gemms import FP8, Fp8Linear
from methods.nn.gemms import DENSE, Products
from methods.nn.operands import Fp8

KEY = torch.tensor([7, 0])


def operands(tokens=24, inputs=16, outputs=12, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(tokens, n, generator=g).to(dtype) for n in (inputs, outputs))
    weight, bias = torch.randn(outputs, inputs, generator=g), torch.randn(outputs, generator=g)
    return x.requires_grad_(), weight.requires_grad_(), bias, dy


def products(recipe, x, weight, bias, dy, mvue=None):
    """y, dx, dw of the simulation."""
    formats = FP8[recipe]
    own = weight.detach()
    both = (Fp8(*quantize_fp8(own, fmt)) for fmt in (formats.fprop, formats.dgrad))
    y = Fp8Linear.apply(x, weight, *both, bias, KEY, mvue, formats, None, None, None)
    return y, *torch.autograd.grad(y, (x, weight), dy)


def expected(recipe, x, weight, bias, dy):
    """The definition, in fp32: plain products of what quantising and back gives."""
    dgrad = {"paper": "e5m2", "hybrid": "e4m3", "hopper": "e4m3"}[recipe]
    wgrad = {"paper": "e5m2", "hybrid": "e4m3", "hopper": "e5m2"}[recipe]
    x, w, dy8 = x.detach().float(), weight.detach(), fake_fp8(dy.float(), "e5m2")
    y = fake_fp8(x, "e4m3") @ fake_fp8(w, "e4m3").t()
    return y + bias, dy8 @ fake_fp8(w, dgrad), dy8.t() @ fake_fp8(x, wgrad)


def test_products_use_the_formats_of_the_recipe_and_round_once():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for recipe in ("paper", "hybrid", "hopper"):
            given = operands(dtype=dtype)
            y, dx, dw = products(recipe, *given)
            assert (y.dtype, dx.dtype, dw.dtype) == (dtype, dtype, torch.float32)
            for got, want in zip((y, dx, dw), expected(recipe, *given), strict=True):
                # Half a unit of the result's own type, beside sums of at most 24 products in fp32.
                unit = torch.finfo(got.dtype).eps / 2
                torch.testing.assert_close(got.float(), want, rtol=unit, atol=1e-5)


def test_sampling_comes_before_fp8():
    """MVUE needs the gradient's own magnitudes; its result is what is quantised: with a scale of
    its own, or with half of dY's."""
    for recipe in ("paper", "hopper"):
        x, weight, bias, dy = operands()
        # The largest entry of the sample is then half of this group's sum, 1.5 times that of dY.
        dy.clamp_(-2, 2)[:4, 0] = torch.tensor([3.0, 2.0, 2.0, 2.0])
        *_, dw = products(recipe, x, weight, bias, dy, mvue="exact")
        sample = mvue24(dy, 7, dim=0)
        quantised = {"paper": fake_fp8(sample, "e5m2")}
        scale = quantize_fp8(dy, "e5m2")[1] / 2
        quantised["hopper"] = (sample * scale).to(torch.float8_e5m2).float() / scale
        assert not torch.equal(quantised["paper"], quantised["hopper"])
        want = quantised[recipe].t() @ fake_fp8(x.detach(), "e5m2")
        torch.testing.assert_close(dw, want, rtol=0, atol=1e-5)


def test_what_is_kept_of_an_activation_is_a_byte_a_number():
    x, weight, bias, dy = operands(dtype=torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        products("paper", x, weight, bias, dy)
    assert {t.element_size() for t in kept if t.numel() == x.numel()} == {1}


def test_scales_beyond_each_other_do_not_overflow():
    """The gradient of a last layer may be tiny, and its scale huge."""
    x, weight, bias, dy = operands()
    tiny, of_one = (products("paper", x, weight, bias, by * dy)[1:] for by in (1e-30, 1.0))
    torch.testing.assert_close([1e30 * t for t in tiny], [*of_one], rtol=1e-5, atol=1e-5)


@pytest.fixture
def gpu(monkeypatch):
    """A device with FP8 units, on which every sparse product is the faster one."""
    monkeypatch.setattr(acceleration, "unavailable", lambda *_: None)
    monkeypatch.setattr(acceleration, "fastest", lambda *_: Measured("cusparselt_sm90", 1.0, 2.0))
    monkeypatch.setattr(acceleration, "measured", lambda *_: None)
    monkeypatch.setattr(acceleration, "library_layout", lambda *_: "cusparselt_sm90")
    for name in ("own_layout", "library_layout_for"):
        monkeypatch.setattr(acceleration, name, lambda *_: "cusparselt_sm90")
    monkeypatch.delenv(acceleration.MATMUL_VARIABLE, raising=False)
    return torch.device("cuda")


def chosen(device, matmul, **options):
    layer = nn.Linear(64, 128)
    method = methods.build("s_ste", include=["*"], **options)
    method.convert(layer, dtype=torch.bfloat16)
    return choose(layer.candidates(), (128, 64), True, torch.bfloat16, device, 256, matmul).products


def test_hopper_alone_runs_on_fp8_units_and_wherever_there_are_any(gpu, monkeypatch):
    """`matmul` says which of its products run sparse: that is about speed."""
    for matmul in acceleration.MATMULS:
        for recipe in ("paper", "hybrid"):
            assert chosen(gpu, matmul, fp8=recipe) == DENSE
        assert not chosen(gpu, matmul).fp8
        sparse = matmul != "dense"
        want = Products(fprop=sparse, wgrad=sparse, fp8=True)
        assert chosen(gpu, matmul, fp8="hopper") == want
    monkeypatch.setattr(acceleration, "fastest", lambda *_: Measured("cusparselt_sm90", 2.0, 1.0))
    assert chosen(gpu, "auto", fp8="hopper") == Products(fp8=True)
    monkeypatch.setattr(acceleration, "unavailable", lambda *_: "no FP8 units")
    for matmul in ("auto", "dense"):
        assert chosen(gpu, matmul, fp8="hopper") == DENSE  # simulated


def _choose_differently(rank, queue):
    """Two ranks of which each finds other products to be faster."""
    found = acceleration.Chosen(Products(fprop=rank == 0, wgrad=rank == 1), {})
    acceleration.choose = lambda *_: found
    layer = nn.Linear(64, 128)
    method = methods.build("s_ste", include=["*"])
    method.convert(layer, dtype=torch.bfloat16)
    agreed = method.accelerate(256)

    def refuse(*_):
        raise RuntimeError(f"rank {rank} cannot")

    acceleration.choose = refuse
    try:
        method.accelerate(256)
    except RuntimeError as error:
        refused = str(error)
    everyone = [None, None]
    dist.all_gather_object(everyone, (agreed, layer.products, refused))
    if rank == 0:
        queue.put(everyone)


def test_ranks_run_what_rank_0_chose(start_ranks):
    queue = multiprocessing.get_context("forkserver").SimpleQueue()
    start_ranks(_choose_differently, queue)
    products = Products(fprop=True)
    assert queue.get() == [({"": products}, products, "rank 0 cannot")] * 2


def test_a_cast_of_the_model_leaves_codes_and_scales_right():
    """fp16 holds no scale of a small weight."""
    layer = nn.Linear(64, 128)
    nn.init.normal_(layer.weight, std=1e-3)
    methods.build("s_ste", include=["*"], fp8="paper").convert(layer)
    layer.half()
    want = fake_fp8(layer.exact_weight(), "e5m2")
    assert torch.equal(layer.codes_dgrad.float() / layer.code_scales[1], want)
