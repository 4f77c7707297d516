import torch

from common_kernels import transposable_mask24
from common_kernels.backend import HAS_TRITON
from common_kernels.masks.reference import PATTERNS
from tests.each import each

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

INF, NAN = float("inf"), float("nan")
ALGORITHMS = ["exact", "greedy", "two_approx"]


def all_patterns() -> torch.Tensor:
    """`[90, 16]`, fp64."""
    return torch.stack(PATTERNS).flatten(1).double()


def tiles(w: torch.Tensor) -> torch.Tensor:
    """`[..., H, W]` to `[tiles, 16]`."""
    return w.unflatten(-2, (-1, 4)).unflatten(-1, (-1, 4)).transpose(-2, -3).reshape(-1, 16)


def assert_24_both_ways(mask: torch.Tensor, exactly: bool = True):
    for dim in (-1, -2):
        counts = mask.unflatten(dim, (-1, 4)).sum(dim)
        assert (counts == 2).all() if exactly else (counts <= 2).all()


@each("backend", ["cpu", *(["triton"] if HAS_TRITON else [])])
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
    got = transposable_mask24(w, backend=backend)
    assert torch.equal(got, transposable_mask24(small, backend=backend))
    w[:4, 60] = torch.tensor([1, INF, 1, 1])  # a sum of finite numbers does not equal it
    assert transposable_mask24(w, backend=backend)[1, 60]


def test_ties_go_to_the_first_pattern(generator):
    """Small integers: scores are exact and ties are everywhere."""
    w = torch.randint(-2, 3, (64, 64), generator=generator).float()
    scores = tiles(w.double().abs()) @ all_patterns().t()
    first = (scores == scores.amax(1, keepdim=True)).double().argmax(1)
    for backend in ("cpu", *(["triton"] if HAS_TRITON else [])):
        mask = transposable_mask24(w.to(DEVICE), backend=backend).cpu()
        assert torch.equal(tiles(mask).double(), all_patterns()[first])


def test_literal_tile():
    """Column 0 holds the three largest entries and must give up the smallest of them, the 9."""
    w = torch.tensor([[10.0, 8, 0, 0], [-10, 0, 8, 0], [9, 2, 0, 8], [0, 0, 3, 8]])
    want = [[1, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1], [0, 0, 1, 1]]
    assert transposable_mask24(w).int().tolist() == want


def test_near_tie_is_resolved_in_fp32():
    """Relative to the tile's sum the two best patterns differ by less than TF32 or bf16 resolve."""
    w = torch.ones(4, 4)
    w[0, 2], w[0, 3] = 1 + 1e-5, 1 + 1e-5
    assert transposable_mask24(w)[0].tolist() == [False, False, True, True]


@each("algorithm", ALGORITHMS)
def test_non_finite_values_never_make_an_illegal_mask(algorithm, generator):
    choice = torch.randint(0, 6, (64, 64), generator=generator)
    w = torch.tensor([0.0, 1.0, -2.0, INF, -INF, NAN])[choice]
    assert_24_both_ways(transposable_mask24(w, algorithm), exactly=algorithm == "exact")
    w = torch.ones(4, 4)
    w[2, 1] = NAN
    assert transposable_mask24(w, algorithm)[2, 1]


def test_greedy_may_stop_at_seven():
    """16 down to 11 fill rows 0 to 2 and columns 0 to 2, which leaves the 2 in the corner."""
    w = torch.tensor([[13.0, 11, 10, 7], [12, 9, 14, 6], [3, 15, 16, 1], [5, 4, 8, 2]])
    want = [[1, 1, 0, 0], [1, 0, 1, 0], [0, 1, 1, 0], [0, 0, 0, 1]]
    assert transposable_mask24(w, "greedy").int().tolist() == want


def test_two_approx_prunes_from_the_smallest_up():
    """1 to 4 take one entry of each row and column, 5 to 8 the second; nothing lacks one then."""
    w = torch.tensor([[1.0, 5, 9, 13], [14, 2, 6, 10], [11, 15, 3, 7], [8, 12, 16, 4]])
    want = [[0, 0, 1, 1], [1, 0, 0, 1], [1, 1, 0, 0], [0, 1, 1, 0]]
    assert transposable_mask24(w, "two_approx").int().tolist() == want


def test_baselines_are_legal_and_no_better(generator):
    """A full tile cannot beat the best one. (Seven entries can: they need not fit any pattern.)"""
    w = torch.randn(128, 128, generator=generator)
    best = tiles(w.abs() * transposable_mask24(w)).sum(1)
    totals = [best.sum().item()]
    for algorithm in ("greedy", "two_approx"):
        mask = transposable_mask24(w, algorithm)
        assert_24_both_ways(mask, exactly=False)
        kept, full = tiles(w.abs() * mask).sum(1), tiles(mask).sum(1) == 8
        assert full.any() and (kept[full] <= best[full] * (1 + 16 * 2**-24)).all()
        totals.append(kept.sum().item())
    assert totals == sorted(totals, reverse=True)


def test_retained_magnitude_of_a_gaussian(generator):
    """L1 retained: 0.703 +- 0.002 (row-wise 2:4 reaches 0.745); density exactly a half."""
    w = torch.randn(1024, 1024, generator=generator)
    mask = transposable_mask24(w)
    assert mask.sum().item() == w.numel() // 2
    assert abs((w.abs() * mask).sum() / w.abs().sum() - 0.703).item() < 0.002
