"""Every operator, on every backend, against its definition in `reference.py`: values, strides of
the input, gradients where there are any.
"""

import pytest
import torch

import common_kernels as ck
from common_kernels.backend import HAS_TRITON
from common_kernels.compressed import reference as compressed
from common_kernels.decay import reference as decay
from common_kernels.fp8 import reference as fp8
from common_kernels.glu import reference as glu
from common_kernels.lowrank import reference as lowrank
from common_kernels.masks import reference as masks
from common_kernels.matmul import reference as matmul
from common_kernels.mvue import reference as mvue
from common_kernels.pack import reference as pack
from common_kernels.soft_threshold import reference as soft_threshold

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["cpu", *(["triton"] if HAS_TRITON else [])]
LAYOUTS = {
    "rows": lambda x: x,
    "columns": lambda x: x.t().contiguous().t(),
    "strided": lambda x: x.repeat_interleave(2, -1)[..., ::2],
}
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
)
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def numbers(*shape, dtype=torch.float32, seed=0, special=False):
    """Random numbers with ties and zeros of both signs, and on request with NaN and Inf."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x.view(-1)[::3] = x.view(-1)[::3].round()
    x.view(-1)[:4] = torch.tensor([100.0, -1.0, 1.0, 0.5])
    if special:
        x.view(-1)[20], x.view(-1)[25:28] = torch.nan, torch.inf
    return x.to(dtype)


def same(got, want):
    """Equal numbers, NaN beside NaN; a zero has no sign."""
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True)


@every_backend
@every_dtype
@every_layout
def test_masks(backend, dtype, layout):
    x = layout(numbers(16, 24, dtype=dtype, special=True))
    on = x.to(DEVICE)
    for n, m, dim in ((2, 4, -1), (2, 4, 0), (1, 2, -1), (2, 8, 0), (4, 8, 1), (3, 4, 0)):
        same(ck.nm_mask(on, n, m, dim, backend=backend), masks.nm_mask(x, n, m, dim))
        sparse = torch.where(numbers(16, 24, seed=1) > 0, x, 0.0)
        illegal = ck.check_nm(sparse.to(DEVICE), n, m, dim, backend=backend)
        assert illegal.item() == masks.check_nm(sparse, n, m, dim)
    w = torch.where(masks.nm_mask(x), x, 0.0)
    same(ck.double_prune_mask(w.to(DEVICE), backend=backend), masks.double_prune_mask(w))


@every_backend
@every_dtype
@pytest.mark.parametrize("algorithm", masks.ALGORITHMS)
def test_transposable_masks(backend, dtype, algorithm):
    tied = torch.randint(-2, 3, (8, 12), generator=torch.Generator().manual_seed(0))
    huge = (numbers(4, 8).clamp(-1, 1) * torch.finfo(dtype).max).to(dtype)
    for x in (numbers(12, 20, dtype=dtype), tied.to(dtype), huge):
        got = ck.transposable_mask24(x.to(DEVICE), algorithm, backend=backend)
        same(got, masks.transposable_mask24(x, algorithm))


@every_backend
def test_flip_rate(backend):
    old, new = (torch.rand(7, 13, generator=torch.Generator().manual_seed(s)) < 0.5 for s in (0, 1))
    got = ck.flip_rate(old.to(DEVICE), new.to(DEVICE), backend=backend).item()
    assert got == pytest.approx(masks.flip_rate(old, new), rel=2**-23)


@every_backend
@every_dtype
@every_layout
def test_soft_threshold(backend, dtype, layout):
    x = layout(numbers(12, 20, dtype=dtype, special=True))
    got = ck.soft_threshold24(x.to(DEVICE), backend=backend)
    same(got, soft_threshold.soft_threshold24(x))
    assert got.stride() == torch.empty_like(x).stride()


@every_backend
@every_dtype
@pytest.mark.parametrize("gamma", [0.25, 1.0])
def test_soft_threshold_with_gamma(backend, dtype, gamma):
    """Triton interpolates in another order of operations: some fp32 roundings of the magnitudes."""
    x = numbers(12, 20, dtype=dtype)
    got = ck.soft_threshold24(x.to(DEVICE), gamma, backend=backend).cpu()
    want = soft_threshold.soft_threshold24(x, gamma)
    atol = 4 * 2**-24 * float(x.abs().max())
    torch.testing.assert_close(got, want, rtol=torch.finfo(dtype).eps, atol=atol)


@every_backend
@every_dtype
@every_layout
@pytest.mark.parametrize("dim", [0, 1])
def test_mvue(backend, dtype, layout, dim):
    x = layout(numbers(12, 20, dtype=dtype))
    for seed, offset in ((7, 0), (2**40 + 3, 10**10 + 1)):
        got = ck.mvue24(x.to(DEVICE), seed, offset, dim=dim, backend=backend)
        same(got, mvue.mvue24(x, seed, offset, dim=dim))


@every_backend
def test_sequential_mvue(backend):
    """Probabilities in fp32 by some ten operations."""
    x = numbers(12, 20)
    got = ck.mvue24(x.to(DEVICE), 7, 5, "sequential", backend=backend).cpu()
    want = mvue.mvue24(x, 7, 5, "sequential")
    torch.testing.assert_close(got, want, rtol=16 * 2**-24, atol=0)


@every_backend
@every_dtype
@every_layout
def test_masked_decay(backend, dtype, layout):
    grad = layout(numbers(12, 20, dtype=dtype))
    weight, mask = numbers(12, 20, seed=1), numbers(12, 20, seed=2) > 0
    got = torch.empty_like(grad, device=DEVICE).copy_(grad)
    ck.masked_decay_(got, weight.to(DEVICE), mask.to(DEVICE), 0.37, backend=backend)
    same(got, decay.masked_decay(grad, weight, mask, 0.37))


@every_backend
@every_dtype
@every_layout
@pytest.mark.parametrize("fmt", fp8.DTYPES)
def test_fp8(backend, dtype, layout, fmt):
    x = layout(numbers(12, 20, dtype=dtype))
    codes, scale = ck.quantize_fp8(x.to(DEVICE), fmt, backend=backend)
    want, want_scale = fp8.quantize_fp8(x, fmt)
    assert codes.dtype == fp8.DTYPES[fmt]
    same(codes.float(), want)
    same(scale, want_scale)
    same(ck.fake_fp8(x.to(DEVICE), fmt, backend=backend), fp8.fake_fp8(x, fmt))


def near(got, want, terms, roundings):
    """One rounding to got's dtype, and some in fp32 of the terms that were added up."""
    info = torch.finfo(got.dtype)
    bound = info.eps / 2 * want.abs() + info.tiny + roundings * terms
    assert ((got.detach().cpu().double() - want).abs() <= bound).all()


@every_backend
@every_dtype
@every_layout
@pytest.mark.parametrize("name", ["geglu", "swiglu"])
def test_gated_activations_forward_and_backward(backend, dtype, layout, name):
    x = layout(3 * torch.randn(9, 24, generator=torch.Generator().manual_seed(0)))
    x, dy = x.clamp(-6, 6).to(dtype), numbers(9, 12, seed=1).clamp(-6, 6).to(dtype)
    exact = x.double().requires_grad_()
    want = getattr(glu, name)(exact)
    want.backward(dy.double())
    on = torch.empty_like(x, device=DEVICE).copy_(x).requires_grad_()
    got = getattr(ck, name)(on, backend=backend)
    got.backward(dy.to(DEVICE))
    value, gate = x.double().abs().chunk(2, -1)
    terms = value * (1 + gate)  # exp at an argument z adds 2 + |z| exp(-|z|) roundings at most
    near(got, want.detach(), terms, 16 * 2**-24)
    upstream = dy.double().abs()
    assert exact.grad is not None and on.grad is not None
    near(on.grad, exact.grad, torch.cat([upstream * (1 + gate), upstream * terms], -1), 16 * 2**-24)


@every_backend
@every_dtype
def test_lowrank(backend, dtype):
    z, r = numbers(9, 12 + 4).to(dtype), numbers(4, 12, seed=1).to(dtype)
    y1, y2, bias = z[:, :12], z[:, 12:], numbers(12, seed=2).to(dtype)
    for b in (None, bias):
        on = [t if t is None else t.to(DEVICE) for t in (y1, y2, r, b)]
        got = ck.lowrank_addmm(*on, 0.25, backend=backend)
        sizes = [t if t is None else t.double().abs() for t in (y1, y2, r, b)]
        unit = 2**-24 if backend == "cpu" else 2**-22  # tensor cores truncate two bits
        near(got, lowrank.lowrank_addmm(y1, y2, r, b, 0.25),
             lowrank.lowrank_addmm(*sizes, 0.25), (4 + 3) * unit)  # fmt: skip


@every_backend
@pytest.mark.parametrize(
    ("n", "m", "columns"), [(2, 4, 24), (1, 2, 16), (4, 8, 16), (2, 4, 12), (3, 7, 21)], ids=str
)
def test_compressed_form(backend, n, m, columns):
    x, mask = numbers(m * 4, columns), masks.nm_mask(numbers(m * 4, columns, seed=1), n, m)
    x[:4, ::5] = 0.0  # kept zeros
    bits = ck.pack_mask(mask.to(DEVICE), backend=backend)
    same(bits, compressed.pack_mask(mask))
    same(ck.unpack_mask(bits, columns, backend=backend), mask)
    same(compressed.unpack_mask(bits.cpu(), columns), mask)
    values = ck.compress_nm(x.to(DEVICE), bits, n, m, backend=backend)
    same(values, compressed.compress_nm(x, bits.cpu(), n, m))
    both = values.cpu(), bits.cpu()
    same(ck.expand_nm(values, bits, n, m, backend=backend), compressed.expand_nm(*both, n, m))
    second = ck.double_prune_bits(values, bits, n, m, backend=backend)
    same(second, compressed.double_prune_bits(*both, n, m))


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("layout", pack.LAYOUTS)
@pytest.mark.parametrize("shape", [(64, 256), (64, 48)], ids=str)
def test_packed_matrices(backend, dtype, layout, shape):
    """Groups with two, one and no entry kept."""
    if dtype.itemsize not in pack_forms(layout):
        pytest.skip("a type that the layout does not hold")
    if shape[1] % 128 and (layout, dtype.itemsize) != ("cusparselt_sm90", 2):
        pytest.skip("columns that the layout does not hold")
    x = (20 * numbers(*shape, seed=3)).to(dtype)
    mask = masks.nm_mask(numbers(*shape)) & (numbers(*shape, seed=1) > -0.5)
    packed = ck.pack24(x.to(DEVICE), mask.to(DEVICE), layout, backend=backend)
    values, nibbles = pack.compress(x, mask)
    same(packed.values, values)
    same(packed.meta.cpu().flatten().view(torch.uint8),
         pack.metadata(nibbles, layout, dtype.itemsize))  # fmt: skip
    same(ck.unpack24(packed), torch.where(mask, x, 0))


def pack_forms(layout):
    return {"neutral": (1, 2, 4), "cutlass_sm90_k128": (2,)}.get(layout, (1, 2))


def test_products_of_packed_matrices():
    a, x, bias = numbers(64, 128), numbers(5, 128, seed=1), numbers(64, seed=2)
    a = torch.where(masks.nm_mask(a), a, 0.0)
    for dtype in (torch.float32, torch.bfloat16):
        on = [t.to(dtype) for t in (a, x, bias)]
        packed = ck.pack24(on[0], on[0] != 0)
        sizes = matmul.matmul24(*(t.abs() for t in on))
        roundings = (128 + 1) * torch.finfo(dtype).eps  # the bias is added in x's dtype
        near(ck.matmul24(packed, *on[1:]), matmul.matmul24(*on), sizes, roundings)
