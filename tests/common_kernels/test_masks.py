"""Masks and the soft threshold: ties, numbers that are not finite, and sizes beyond those of
test_operators.py."""

import itertools

import pytest
import torch

from common_kernels import check_nm, flip_rate, nm_mask, soft_threshold24
from common_kernels import transposable_mask24 as transposable
from common_kernels.backend import HAS_TRITON
from common_kernels.masks import reference
from tests.each import each

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["cpu", *(["triton"] if HAS_TRITON else [])]
INF, NAN = float("inf"), float("nan")
SPECIAL = torch.tensor([0.0, -1.0, 2.0, INF, -INF, NAN])


def tiles(w: torch.Tensor) -> torch.Tensor:
    """`[..., H, W]` to `[tiles, 16]`."""
    return w.unflatten(-2, (-1, 4)).unflatten(-1, (-1, 4)).transpose(-2, -3).reshape(-1, 16)


@each("dtype", DTYPES)
def test_every_tie_pattern_keeps_the_two_lowest_indices_of_the_largest(dtype, generator):
    groups = list(itertools.product((1, 2, 3, 4), repeat=4))
    signs = torch.randint(0, 2, (256, 4), generator=generator) * 2 - 1
    mask = nm_mask((torch.tensor(groups) * signs).to(dtype))
    for group, kept in zip(groups, mask.tolist(), strict=True):
        best = sorted(range(4), key=lambda i: (-group[i], i))[:2]
        assert [i for i in range(4) if kept[i]] == sorted(best)
    assert nm_mask(torch.tensor([-0.0, 0.0, -0.0, 0.0])).tolist() == [True, True, False, False]


def test_numbers_that_are_not_finite_stay_and_never_make_an_illegal_mask(generator):
    x = torch.cartesian_prod(*4 * [SPECIAL])
    for dtype in DTYPES:
        for mask in (nm_mask(x.to(dtype)), nm_mask(x.to(dtype).t(), dim=0).t()):
            assert torch.equal(mask, reference.nm_mask(x))  # NaN > Inf > finite
        for gamma in (0.0, 0.5, 1.0):
            got = soft_threshold24(x.to(dtype), gamma)
            assert ((got != 0).sum(1) <= 2).all()
            assert torch.equal((~got.isfinite()).any(1), (~x.isfinite()).any(1))
    w, lone = SPECIAL[torch.randint(0, 6, (64, 64), generator=generator)], torch.ones(4, 4)
    lone[2, 1] = NAN
    for algorithm in ("exact", "greedy", "two_approx"):
        mask = transposable(w, algorithm)
        for dim in (-1, -2):
            counts = mask.unflatten(dim, (-1, 4)).sum(dim)
            assert (counts == 2).all() if algorithm == "exact" else (counts <= 2).all()
        assert transposable(lone, algorithm)[2, 1]


@pytest.mark.skipif(not HAS_TRITON, reason="no Triton for this platform")
def test_every_kernel_of_other_patterns(generator):
    """Sorting networks of any width, groups too large for a thread, sums of any number."""
    x = torch.randn(48, 384, generator=generator).relu().to(DEVICE)

    def agree(function, *args):
        got, want = (function(*args, backend=backend) for backend in ("triton", "cpu"))
        assert torch.equal(got, want) and got.stride() == want.stride()

    for n, m in ((2, 8), (4, 8), (2, 16), (5, 32), (5, 12), (2, 64), (1, 3)):
        for dtype in DTYPES:
            y = x[:24, :192].to(dtype)
            agree(nm_mask, y, n, m)
        agree(nm_mask, y.t().contiguous().t(), n, m)
        if 24 % m == 0:
            agree(nm_mask, y, n, m, 0)
    for n, m in ((1, 3), (4, 8), (3, 12), (32, 64), (190, 384)):
        agree(check_nm, x, n, m)
    old, new = (torch.rand(40_003, generator=generator).to(DEVICE) < 0.5 for _ in range(2))
    for piece in (slice(None), slice(6, 8), slice(3, 32_771)):
        agree(flip_rate, old[piece], new[piece])
    agree(flip_rate, old[3:], new[:-3])
    assert flip_rate(old, ~old, backend="triton").item() == 1  # every byte of every sum


@each("backend", BACKENDS)
@each("dtype", [torch.float32, torch.bfloat16])
def test_sums_near_the_largest_number_do_not_overflow(dtype, backend, generator):
    """The masks of large tiles, some of them beside small ones, are those of numbers below 1."""
    small = torch.rand(32, 64, generator=generator)
    small[8:16] = small[8:16].round(decimals=1)  # ties
    top = 1 - torch.finfo(dtype).eps / 2
    small[::8, ::8] = top
    small = small.clamp_max(top).to(dtype).to(DEVICE)
    w = small.clone()
    w[:, 16:] = (w[:, 16:] * 2.0**127) * 2
    assert w.max() == torch.finfo(dtype).max
    got = transposable(w, backend=backend)
    assert torch.equal(got, transposable(small, backend=backend))
    w[:4, 60] = torch.tensor([1, INF, 1, 1])  # a sum of finite numbers does not equal it
    assert transposable(w, backend=backend)[1, 60]


@each("backend", BACKENDS)
def test_ties_go_to_the_first_pattern_and_near_ties_are_resolved_in_fp32(backend, generator):
    """Small integers: scores are exact and ties are everywhere. Two patterns may differ by less
    than TF32 or bf16 resolve."""
    w = torch.randint(-2, 3, (64, 64), generator=generator).float()
    patterns = torch.stack(reference.PATTERNS).flatten(1).double()
    scores = tiles(w.double().abs()) @ patterns.t()
    first = (scores == scores.amax(1, keepdim=True)).double().argmax(1)
    mask = transposable(w.to(DEVICE), backend=backend).cpu()
    assert torch.equal(tiles(mask).double(), patterns[first])
    w = torch.ones(4, 4, device=DEVICE)
    w[0, 2:] = 1 + 1e-5
    assert transposable(w, backend=backend)[0].tolist() == [False, False, True, True]
