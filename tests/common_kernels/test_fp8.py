import pytest
import torch

from common_kernels import fake_fp8, quantize_fp8
from common_kernels.backend import HAS_TRITON
from common_kernels.fp8 import fp8_numbers_and_codes
from common_kernels.fp8.cpu import codes_of, scale_from
from common_kernels.library import KERNELS
from tests.each import each

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["cpu", *(["triton"] if HAS_TRITON else [])]

FORMATS = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}
both = each("fmt", FORMATS)


@both
def test_every_code_and_everything_between(fmt):
    """All finite codes, all midpoints and their fp32 neighbours; the largest code makes the scale
    1.
    """
    dtype, top = FORMATS[fmt]
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    codes = codes[codes.isfinite()].unique()
    assert len(codes) == {"e4m3": 253, "e5m2": 247}[fmt]
    middle = (codes[1:] + codes[:-1]) / 2
    up, down = torch.full((), torch.inf), torch.full((), -torch.inf)
    x = torch.cat((codes, middle, middle.nextafter(up), middle.nextafter(down)))
    x = torch.cat((x, torch.linspace(-top, top, 100001)))
    want = x.to(dtype).float()
    for backend in BACKENDS:
        got, scale = quantize_fp8(x.to(DEVICE), fmt, backend=backend)
        assert scale.item() == 1 and got.dtype == dtype
        assert torch.equal(got.cpu().float(), want)
        assert torch.equal(fake_fp8(x.to(DEVICE), fmt, backend=backend).cpu(), want)


@both
def test_zeros_subnormals_and_what_is_not_finite(fmt):
    for zeros in (torch.full((8,), -0.0), torch.zeros(0)):
        codes, scale = quantize_fp8(zeros, fmt)
        assert scale.isfinite() and not codes.float().any() and not fake_fp8(zeros, fmt).any()
    assert fake_fp8(torch.tensor([2.0**-149, -(2.0**-149), 2.0**-140]), fmt).isfinite().all()
    for bad in (torch.nan, torch.inf, -torch.inf):
        assert not fake_fp8(torch.tensor([1.0, bad, 2.0]), fmt).isfinite().all()


@each("backend", BACKENDS)
@each("dtype", [torch.float32, torch.bfloat16])
def test_delayed_scaling(dtype, backend):
    """A scale from elsewhere: what is larger becomes the largest code; the largest is seen."""
    x = torch.randn(100, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    largest, amax = x.abs().max().float(), torch.tensor(1.5, device=DEVICE)
    scale = scale_from(amax, "e5m2")
    want = codes_of(x, scale, "e5m2").float()
    assert want.abs().max() == 57344 and (x.float().abs() > 1.5).any()
    for before, after in ((0.5, largest), (2 * largest, 2 * largest)):
        seen = torch.tensor(float(before), device=DEVICE)
        codes, used = quantize_fp8(x, "e5m2", amax, seen, backend=backend)
        assert torch.equal(codes.float(), want) and used == scale and seen == after


@each("number", [0.0, 1e-37, torch.nan, torch.inf])  # 1e-37 meets the largest scale
@each("backend", BACKENDS)
def test_numbers_without_a_scale(backend, number):
    x = torch.zeros(8, 8, device=DEVICE)
    x[2, 3] = number
    numbers, _, codes, _ = fp8_numbers_and_codes(x, "e4m3", "e5m2", backend=backend)
    for got, fmt in ((numbers, "e4m3"), (codes, "e5m2")):
        want = quantize_fp8(x, fmt)[0].float()
        torch.testing.assert_close(got.float(), want, rtol=0, atol=0, equal_nan=True)
    empty = fp8_numbers_and_codes(x[:0], "e4m3", "e5m2", backend=backend)
    assert empty[0].shape == empty[2].shape == (0, 8) and empty[1] == empty[3] == 1


@pytest.mark.skipif(not HAS_TRITON, reason="no Triton for this platform")
def test_the_first_launch_of_a_kernel_for_cpp_leaves_its_operands():
    """C++ launches it again: the first product of each shape was rescaled twice."""
    y = torch.randn(64, 64, device=DEVICE)
    before, scale = y.clone(), torch.tensor(8.0, device=DEVICE)
    KERNELS["rescale"](1, y, y, scale, scale)
    assert torch.equal(y, before)
