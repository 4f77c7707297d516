import pytest
import torch

from common_kernels.pack import cpu

LEARNT = "cusparselt_learnt_invented"  # as if learnt from a library that has this order
ORDERS = {1: "g r r5 r1 g3 r4 r0 g2 g0 r2 g1 r3", 2: "g r g3 r5 r2 r1 r0 r4 g2 r3 g1 g0"}


@pytest.fixture(autouse=True)
def invented_layout(monkeypatch):
    forms = {size: cpu.Form(64, 64, torch.uint8, order) for size, order in ORDERS.items()}
    monkeypatch.setitem(cpu.LAYOUTS, LEARNT, cpu.Layout(forms))


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Uninitialised memory holds NaN (or the largest integer): an entry nobody wrote shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.fixture
def hard_groups():
    """A function that makes groups of four, `[7 count, 4]`, whose samples are easily got wrong:
    ties; an entry that is the sum of the others, give or take two ulps; rounded sums; subnormals;
    sums that overflow; NaN and Inf; one non-zero at most."""
    generator = torch.Generator().manual_seed(3)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    def make(count: int, dtype: torch.dtype) -> torch.Tensor:
        def choice(*values: float) -> torch.Tensor:
            return torch.tensor(values)[integers(0, len(values), count, 4)]

        info, shape = torch.finfo(dtype), (count, 4)
        near = torch.rand(shape, generator=generator).to(dtype).float() * integers(0, 2, *shape)
        near[:, 3] = near[:, :3].sum(1) * (1 + info.eps * integers(-2, 3, count))
        near = near.gather(1, torch.rand(shape, generator=generator).argsort(1))
        rounded = (1 + info.eps * integers(-2, 3, *shape)) / 2.0 ** integers(0, 12, *shape)
        tiny = (info.smallest_normal * info.eps * integers(0, 5, *shape).double()).float()
        if dtype == torch.bfloat16 and not torch.cuda.is_available():
            tiny *= 1 << 20  # Triton's interpreter reads these wrongly
        huge = choice(info.max, info.max / 2, info.max / 3, 0.0, 1.0)
        special = choice(float("inf"), float("nan"), 0.0, 1.0, 5.0)
        one = torch.zeros(shape).scatter_(1, integers(0, 4, count, 1), 0.3)
        one[::3] = 0
        x = torch.cat([choice(0.0, 1.0, 2.0, 3.0), near, rounded, tiny, huge, special, one])
        return (x * (2 * integers(0, 2, *x.shape) - 1)).to(dtype)

    return make
