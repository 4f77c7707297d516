import itertools

import torch

from common_kernels import nm_mask, soft_threshold24
from common_kernels.backend import HAS_TRITON
from tests.each import each

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF, NAN = float("inf"), float("nan")


def test_by_hand():
    for group, gamma, want in (
        ((1, 1, 1, 1), 0.0, [0, 0, 0, 0]),
        ((2, 1, 2, 2), 0.0, [0, 0, 0, 0]),
        ((2, 2, 1, 1), 0.0, [1, 1, 0, 0]),
        ((-4, 1, 3, 2), 0.0, [-2, 0, 1, 0]),
        ((0, -5, 0, 0), 0.0, [0, -5, 0, 0]),
        ((-4, 1, 3, 2), 1.0, [-1, 0, 0, 0]),  # less the third smallest
        ((-4, 1, 3, 2), 0.5, [-1.5, 0, 0.5, 0]),
    ):
        assert soft_threshold24(torch.tensor(group).float(), gamma).tolist() == want


def test_lipschitz_where_the_hard_threshold_jumps(generator):
    """|S(a + d) - S(a)| <= 2 |d| in the maximum norm (S-STE, section 4.1), up to a rounding of each
    of two values.
    """
    a = torch.randn(20000, 4, generator=generator)
    d = torch.randn(20000, 4, generator=generator) * torch.logspace(-6, 0, 20000)[:, None]
    a[::2] = a[::2].round(decimals=1)  # ties and near-ties
    moved = (soft_threshold24(a + d) - soft_threshold24(a)).abs().amax(1)
    rounding = 8 * 2**-24 * (a.abs() + d.abs()).amax(1)
    assert (moved <= 2 * d.abs().amax(1) + rounding).all()
    x, y = torch.tensor([[1.0, 1.0 + 2**-20, 1, 0], [1.0, 1.0 - 2**-20, 1, 0]])
    assert (x * nm_mask(x) - y * nm_mask(y)).abs().amax() > 0.9


def test_homogeneous_for_powers_of_two(generator):
    x = torch.randn(64, 64, generator=generator)
    for c in (2.0**-20, -1.0, 2.0**30):
        assert torch.equal(soft_threshold24(c * x), c * soft_threshold24(x))


def test_non_finite_values_propagate_and_stay_legal():
    values = torch.tensor([0.0, -1.0, 2.0, INF, -INF, NAN])
    x = torch.tensor(list(itertools.product(values.tolist(), repeat=4)))
    for dtype, gamma in itertools.product(DTYPES, (0.0, 0.5, 1.0)):
        got = soft_threshold24(x.to(dtype), gamma)
        assert ((got != 0).sum(1) <= 2).all()
        assert torch.equal((~got.isfinite()).any(1), (~x.isfinite()).any(1))


@each("backend", ["cpu", *(["triton"] if HAS_TRITON else [])])
@each("dtype", DTYPES)
def test_zeros_have_one_sign(dtype, backend):
    """All are positive: of signed zeros, below the threshold, and where a cast rounds to one."""
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    if dtype == torch.bfloat16 and not torch.cuda.is_available():
        tiny *= 1 << 20  # Triton's interpreter reads these wrongly
    values = [0.0, -0.0, 1.0, -1.0, -tiny, 2 * tiny]
    x = torch.tensor(list(itertools.product(values, repeat=4)), dtype=dtype).to(DEVICE)
    for gamma in (0.0, 0.3):
        got = soft_threshold24(x, gamma, backend=backend)
        assert not (got.signbit() & (got == 0)).any()
