"""Every Triton kernel against plain PyTorch, bit for bit.

Compiled where there is a GPU, else under Triton's interpreter.
"""

import pytest
import torch

from common_kernels import (
    check24,
    check_nm,
    double_prune_mask,
    fake_fp8,
    flip_rate,
    masked_decay_,
    mvue24,
    nm_mask,
    quantize_fp8,
    soft_threshold24,
    transposable_mask24,
)
from common_kernels.backend import resolve

pytest.importorskip("triton", reason="no Triton for this platform")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
SHAPES = {"2d": (36, 48), "3d": (3, 8, 20), "one": (4, 4), "long": (4, 4100), "empty": (0, 8)}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
LAYOUTS = {
    "dense": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT,
    "strided": lambda x: x.repeat_interleave(2, -1)[..., ::2],
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def data(shape, dtype, layout=LAYOUTS["dense"], special=True):
    """Ties, zeros of both signs, a dominant entry and, where asked for, NaN and Inf."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    flat = x.view(-1)
    flat[::5] = flat[::5].round()
    flat[:4] = torch.tensor([100.0, -1.0, 1.0, 0.5])[: flat.numel()]
    flat[7:9] = torch.tensor([-0.0, 0.0])[: max(0, flat.numel() - 7)]
    if special and flat.numel() > 32:
        flat[20], flat[25:28] = float("nan"), float("inf")
    return layout(x.to(dtype)).to(DEVICE)


def same(got, want):
    """Equal in every bit but those of a NaN, and in shape, dtype and strides."""
    assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
    if got.is_floating_point():
        got, want = got.float(), want.float()
        assert torch.equal(got.isnan(), want.isnan())
        got, want = (x.nan_to_num(nan=0.0).view(torch.int32) for x in (got, want))
    assert torch.equal(got, want)


def both(operator, *args, **options):
    return [operator(*args, backend=backend, **options) for backend in ("triton", "cpu")]


def test_a_gpu_takes_triton_by_default():
    assert resolve(DEVICE) == ("triton" if DEVICE == "cuda" else "cpu")


@every_dtype
@every_shape
@every_layout
def test_masks(dtype, shape, layout):
    x = data(shape, dtype, layout)
    for n, m, dim in ((2, 4, -1), (2, 4, -2), (1, 2, -1), (3, 4, -2)):
        if shape[dim] % m == 0:
            same(*both(nm_mask, x, n, m, dim))


@every_dtype
def test_masks_of_many(dtype):
    x = data((24, 192), dtype)
    for n, m in ((2, 8), (4, 8), (2, 16), (5, 32), (0, 4), (4, 4), (5, 12), (2, 64)):
        same(*both(nm_mask, x, n, m))
    for n, m in ((2, 8), (1, 3), (5, 12)):
        same(*both(nm_mask, x, n, m, 0))
        same(*both(nm_mask, x.t().contiguous().t(), n, m))


@every_dtype
def test_groups_that_meet_the_end_of_a_row_within_a_block(dtype):
    x = data((16, 700), dtype)
    same(*both(nm_mask, x, 2, 4, 0))
    same(*both(mvue24, x, 7, 0, dim=0))


@every_dtype
def test_double_prune_mask(dtype):
    w = data((16, 24), dtype)
    same(*both(double_prune_mask, w * nm_mask(w, backend="cpu")))


@every_dtype
@every_layout
@pytest.mark.parametrize("algorithm", ["exact", "greedy", "two_approx"])
def test_transposable_mask(dtype, layout, algorithm):
    for shape in ((8, 20), (2, 4, 8), (0, 4), (4, 520)):
        if algorithm == "greedy" and DEVICE == "cpu" and shape[-1] == 520:
            continue  # slow under the interpreter
        same(*both(transposable_mask24, data(shape, dtype, layout), algorithm))


def test_transposable_mask_with_ties():
    w = torch.randint(-2, 3, (64, 64), generator=torch.Generator().manual_seed(0)).float()
    for algorithm in ("exact", "greedy"):
        same(*both(transposable_mask24, w.to(DEVICE), algorithm))


@every_dtype
@every_shape
@every_layout
def test_illegal_groups(dtype, shape, layout):
    x = data(shape, dtype)
    sparse = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.5
    x = layout(torch.where(sparse.to(DEVICE), torch.zeros_like(x), x))
    for n, m, dim in ((2, 4, -1), (2, 4, -2), (0, 1, -1), (1, 2, -2), (3, 4, -1)):
        if shape[dim] % m == 0:
            same(*both(check_nm, x, n, m, dim))


def test_illegal_groups_of_many():
    x = torch.randn(48, 384, generator=torch.Generator().manual_seed(0)).relu().to(DEVICE)
    for n, m in ((1, 3), (4, 8), (3, 12), (32, 64), (190, 384)):
        same(*both(check_nm, x, n, m))
        same(*both(check_nm, x.t().contiguous().t(), n, m))
        if m <= 12:
            same(*both(check_nm, x, n, m, 0))
    same(*both(check24, x > 0.5))  # another dtype


def test_illegal_groups_by_hand():
    x = torch.tensor([[1.0, -0.0, 2, 0], [1, float("nan"), float("-inf"), 0]], device=DEVICE)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert check24(x.to(dtype), backend="triton").item() == 1
        assert check_nm(x.t().to(dtype), 1, 2, 1, backend="triton").item() == 2


@every_shape
@every_layout
def test_flip_rate(shape, layout):
    generator = torch.Generator().manual_seed(0)
    old, new = (torch.rand(shape, generator=generator).to(DEVICE) < p for p in (0.5, 0.2))
    same(*both(flip_rate, layout(old), layout(new)))
    same(*both(flip_rate, old, layout(new)))


def test_flip_rate_of_pieces_that_are_no_whole_words():
    generator = torch.Generator().manual_seed(0)
    old, new = (torch.rand(40_003, generator=generator).to(DEVICE) < 0.5 for _ in range(2))
    for piece in (slice(None), slice(1, None), slice(6, 8), slice(3, 32_771)):
        same(*both(flip_rate, old[piece], new[piece]))
    same(*both(flip_rate, old[3:], new[:-3]))
    assert flip_rate(old, ~old, backend="triton").item() == 1  # every byte of every sum
    same(*both(flip_rate, old.float(), new.float()))  # another dtype


@every_dtype
@every_shape
@every_layout
def test_soft_threshold(dtype, shape, layout):
    x = data(shape, dtype, layout)
    same(*both(soft_threshold24, x))


@every_dtype
def test_soft_threshold_with_gamma(dtype):
    """The threshold is interpolated in fp32 by either path, in another order of operations."""
    x = data((16, 48), dtype, special=False)
    got, want = both(soft_threshold24, x, 0.3)
    torch.testing.assert_close(got, want, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@every_dtype
@every_shape
@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("offset", [0, 6, (1 << 35) + 4])
def test_mvue_draws_the_same_bits(dtype, shape, dim, offset):
    if shape[dim] % 4 == 0:
        same(*both(mvue24, data(shape, dtype), 12345678901234, offset, dim=dim))


@every_dtype
def test_mvue_of_hard_groups(dtype, hard_groups):
    x = hard_groups(512, dtype).to(DEVICE)
    same(*both(mvue24, x, 77))
    same(*both(mvue24, x.view(-1, 32, 4).mT.reshape(-1, 32), 77, dim=0))


@every_layout
def test_mvue_layouts_and_designs(layout):
    x = data((36, 48), torch.float32, layout)
    for design in ("exact", "sequential"):
        same(*both(mvue24, x, torch.tensor(3, device=DEVICE), 0, design))


@every_dtype
@every_layout
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_fp8(dtype, layout, fmt):
    for shape in ((36, 48), (0, 8), (5,)):
        x = data(shape, dtype, layout if len(shape) > 1 else LAYOUTS["dense"], special=False)
        same(*both(fake_fp8, x, fmt))
        for got, want in zip(*both(quantize_fp8, x, fmt), strict=True):
            same(got, want)
    with_nan = data((36, 48), dtype, layout)
    same(*both(fake_fp8, with_nan, fmt))
    same(*both(fake_fp8, torch.zeros(8, device=DEVICE, dtype=dtype), fmt))


@every_dtype
@every_layout
def test_masked_decay(dtype, layout):
    weight, mask = data((36, 48), torch.float32), data((36, 48), torch.float32) > 0
    grads = [data((36, 48), dtype, layout) for _ in range(2)]
    for grad, backend in zip(grads, ("triton", "cpu"), strict=True):
        assert masked_decay_(grad, weight, mask, 0.37, backend=backend) is grad
    same(*grads)
