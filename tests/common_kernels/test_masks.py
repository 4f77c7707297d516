import itertools

import pytest
import torch

from common_kernels import check24, check_nm, double_prune_mask, flip_rate, nm_mask
from common_kernels.backend import HAS_TRITON
from common_kernels.masks import reference
from tests.each import each

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF, NAN = float("inf"), float("nan")


@each("dtype", DTYPES)
def test_every_tie_pattern_keeps_the_two_lowest_indices_of_the_largest(dtype, generator):
    groups = list(itertools.product((1, 2, 3, 4), repeat=4))
    signs = torch.randint(0, 2, (256, 4), generator=generator) * 2 - 1
    x = (torch.tensor(groups) * signs).to(dtype)
    mask = nm_mask(x)
    for group, kept in zip(groups, mask.tolist(), strict=True):
        best = sorted(range(4), key=lambda i: (-group[i], i))[:2]
        assert [i for i in range(4) if kept[i]] == sorted(best)
    assert torch.equal(nm_mask(x * mask), mask)  # pruning what is pruned changes nothing
    assert nm_mask(torch.tensor([-0.0, 0.0, -0.0, 0.0])).tolist() == [True, True, False, False]


def test_non_finite_values_never_make_an_illegal_mask():
    values = torch.tensor([0.0, -1.0, 2.0, INF, -INF, NAN])
    x = torch.cartesian_prod(values, values, values, values)
    for dtype in DTYPES:
        for mask in (nm_mask(x.to(dtype)), nm_mask(x.to(dtype).t(), dim=0).t()):
            assert (mask.sum(1) == 2).all()
            assert torch.equal(mask, reference.nm_mask(x))  # NaN > Inf > finite


def test_double_prune_by_hand():
    w = torch.tensor([[3.0, 0, 2, 0], [0, 5, 0, 1], [4, 0, 0, 6], [0, 0, 7, 8]])
    want = [[1, 1, 1, 0], [0, 1, 0, 0], [1, 0, 0, 1], [0, 0, 1, 1]]
    assert double_prune_mask(w).int().tolist() == want


def test_check24_counts_groups():
    x = torch.tensor([[1.0, 1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, -0.0, 0]])
    assert check24(x).item() == 2
    assert check24(x.t().contiguous(), dim=0).item() == 2
    assert check24(torch.tensor([NAN, NAN, NAN, 0.0])).item() == 1
    x = torch.tensor([[1.0, 1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0]])
    assert check_nm(x, 4, 8).item() == 1 and check_nm(x, 2, 8).item() == 2
    assert check_nm(x, 1, 2).item() == 4 and check_nm(x, 1, 2, dim=0).item() == 4


def test_flip_rate():
    mask = torch.tensor([True, True, False, False] * 4)
    swapped = mask.clone()
    swapped[:4] = torch.tensor([True, False, True, False])
    assert flip_rate(mask, mask).item() == 0
    assert flip_rate(mask, ~mask).item() == 1
    assert flip_rate(mask, swapped).item() == 2 / 16
    assert flip_rate(mask[:0], mask[:0]).item() == 0


def test_retained_magnitude_of_a_gaussian(generator):
    """L1 retained by row-wise 2:4: 0.7446, so 0.745 +- 0.002 on 2^20 numbers."""
    w = torch.randn(1024, 1024, generator=generator)
    mask = nm_mask(w)
    assert mask.sum().item() == w.numel() // 2
    assert abs((w.abs() * mask).sum() / w.abs().sum() - 0.745).item() < 0.002


@pytest.mark.skipif(not HAS_TRITON, reason="no Triton for this platform")
def test_every_kernel_of_other_patterns(generator):
    """Sorting networks of any width, groups too large for a thread, sums of any number."""
    x = torch.randn(48, 384, generator=generator).relu().to(DEVICE)

    def agree(function, *args):
        got, want = (function(*args, backend=backend) for backend in ("triton", "cpu"))
        assert torch.equal(got, want) and got.stride() == want.stride()

    for dtype in DTYPES:
        y = x[:24, :192].to(dtype)
        for n, m in ((2, 8), (4, 8), (2, 16), (5, 32), (5, 12), (2, 64), (1, 3)):
            agree(nm_mask, y, n, m)
            agree(nm_mask, y.t().contiguous().t(), n, m)
            if 24 % m == 0:
                agree(nm_mask, y, n, m, 0)
    for n, m in ((1, 3), (4, 8), (3, 12), (32, 64), (190, 384)):
        agree(check_nm, x, n, m)
        agree(check_nm, x.t().contiguous().t(), n, m)
    agree(check24, x > 0.5)  # another dtype
    old, new = (torch.rand(40_003, generator=generator).to(DEVICE) < 0.5 for _ in range(2))
    for piece in (slice(None), slice(1, None), slice(6, 8), slice(3, 32_771)):
        agree(flip_rate, old[piece], new[piece])
    agree(flip_rate, old[3:], new[:-3])
    agree(flip_rate, old.float(), new.float())
    assert flip_rate(old, ~old, backend="triton").item() == 1  # every byte of every sum
