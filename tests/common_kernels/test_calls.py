"""The calls of torchao and 2by4-pretrain, by hand and beside the definitions of our operators."""

import pytest
import torch
import torch.nn.functional as F
from torch.sparse import _semi_structured_conversions as conversions

from common_kernels import calls, matmul24, transposable_mask24, unpack24
from common_kernels.masks import reference as masks
from common_kernels.mvue import reference as mvue
from common_kernels.soft_threshold import reference as soft_threshold

HAND = torch.tensor([[1.0, -2, 3, -4], [2, 2, 2, 2], [0, 0, -5, 0]])
LARGEST = torch.tensor([[0.0, 0, 3, -4], [2, 2, 0, 0], [0, 0, -5, 0]])  # the lower index wins


def matrix(rows=8, columns=16):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("transposed", [False, True])
def test_each_combination_of_to_sparse_semi_structured(transposed):
    of = calls.to_sparse_semi_structured
    packed = of(HAND, transposed)
    assert (packed.dtype, packed.layout, packed.shape) == (torch.float16, "neutral", (3, 4))
    assert torch.equal(unpack24(packed), LARGEST.half())
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 0, 1], [0, 0, 0, 1]])
    x = matrix()
    for dtype in (torch.float16, torch.bfloat16, torch.float8_e5m2, torch.int8):
        for kept in (mask, mask.float(), mask.bool()):
            own = of(HAND, transposed, mask=kept, dtype=dtype)
            assert own.dtype == dtype
            assert torch.equal(unpack24(own).float(), HAND * mask)
        torch.manual_seed(1)
        own = of(x, transposed, MVUE24=True, dtype=dtype)
        torch.manual_seed(1)
        seed = int(torch.randint(2**31, ()))
        want = mvue.mvue24(x, seed, design="sequential")
        torch.testing.assert_close(unpack24(own).float(), want.to(dtype).float())
    y = torch.tensor([[1.0, 2, 0, -1], [0, 1, 1, 3]]).half()
    assert matmul24(packed, y).tolist() == [[4, 6, 0], [-9, 2, -5]]
    with pytest.raises(ValueError, match="takes no mask; leave one of them out"):
        of(HAND, transposed, MVUE24=True, mask=mask)


def test_masks_soft_threshold_samples_and_decay():
    for dtype in (torch.float32, torch.bfloat16):
        x = matrix().to(dtype)
        kept = masks.nm_mask(x)
        sparse, mask = calls.sparse24_triton(x)
        assert torch.equal(sparse, x * kept) and torch.equal(mask, kept.to(dtype))
        assert sparse.dtype == mask.dtype == dtype
        sparse, mask = calls.soft_threshold24_triton(x.t().contiguous().t())
        assert torch.equal(sparse, soft_threshold.soft_threshold24(x))
        assert torch.equal(mask, kept.to(dtype))
        sparse, mask = calls.transposable_sparse(x)
        assert torch.equal(mask, masks.transposable_mask24(x)) and mask.dtype == torch.bool
        assert torch.equal(sparse, x * mask)
        grad = torch.ones_like(x)
        assert calls.masked_add_(grad, x, kept.to(dtype), alpha=0.5) is None
        torch.testing.assert_close(grad, 1 + 0.5 * x * ~kept)


def test_samples_have_the_mean_of_the_matrix_and_follow_the_seed_of_torch():
    x = torch.tensor([[1.0, -2, 3, 4]])
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(calls.MVUE24_approx_triton(x.expand(20000, 4)))
    torch.testing.assert_close(drawn[0].mean(0, keepdim=True), x, rtol=0, atol=0.06)
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


@pytest.fixture
def products():
    """torch's operators for its CUTLASS tensors, on the CPU."""
    dense = conversions.sparse_semi_structured_to_dense_cutlass
    library = torch.library.Library("aten", "IMPL")
    library.impl("_sparse_semi_structured_mm", lambda a, m, b, **_: dense(a, m) @ b, "CPU")
    library.impl(
        "_sparse_semi_structured_addmm",
        lambda bias, a, m, b, **_: bias[:, None] + dense(a, m) @ b,
        "CPU",
    )
    yield
    library._destroy()


@pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor")
def test_semi_structured_sparsify_multiplies_and_passes_gradients_straight_through(products):
    w = matrix(64, 128).bfloat16()
    greedy, own = transposable_mask24(w, "greedy"), transposable_mask24(w.roll(1, 1))
    x, bias = matrix(8, 128).bfloat16(), matrix(1, 64)[0].bfloat16()
    for algo, mask in (("", None), ("largest_abs_values_greedy", None), ("", own)):
        for b in ((), (bias,)):
            kept = greedy if mask is None else mask
            own, other = ([t.clone().requires_grad_() for t in (x, w, *b)] for _ in range(2))
            sparse = calls.semi_structured_sparsify(own[1], algo, mask=mask)
            straight = other[1] + (w * kept - other[1]).detach()
            ys = F.linear(own[0], sparse, *own[2:]), F.linear(other[0], straight, *other[2:])
            for y in ys:
                (y.float() * torch.arange(64)).sum().backward()
            torch.testing.assert_close(*ys, rtol=2**-6, atol=0.1)
            for found, want in zip(own, other, strict=True):
                torch.testing.assert_close(found.grad, want.grad, rtol=2**-6, atol=2.0)
                assert found.grad.count_nonzero() == want.grad.count_nonzero()
