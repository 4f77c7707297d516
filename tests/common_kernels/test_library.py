"""The operators as torch.library operators: schema, fake tensors, torch.compile without a graph
break.
"""

import pytest
import torch

from common_kernels import (
    check24,
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

X = torch.randn(16, 24, generator=torch.Generator().manual_seed(0))
SEED, OFFSET = torch.tensor(3), torch.tensor(5)
OPERATORS = {
    "nm_mask": (X, 2, 4, 1, "naive"),
    "transposable_mask24": (X, "exact", "naive"),
    "soft_threshold24": (X, 0.0, "naive"),
    "mvue24": (X, SEED, OFFSET, "exact", 0, "naive"),
    "quantize_fp8": (X, "e4m3", "naive"),
    "fake_fp8": (X, "e5m2", "naive"),
    "masked_decay_": (X.clone(), X, X > 0, 0.1, "naive"),
}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("layout", ["rows", "columns", "empty"])
def test_opcheck(name, layout):
    change = {
        "rows": lambda t: t,
        "columns": lambda t: t.t().contiguous().t(),
        "empty": lambda t: t[:0],
    }[layout]
    arguments = [
        change(a) if isinstance(a, torch.Tensor) and a.ndim else a for a in OPERATORS[name]
    ]
    torch.library.opcheck(getattr(torch.ops.sparse24, name).default, arguments)


def everything(x: torch.Tensor, seed: torch.Tensor) -> tuple[torch.Tensor, ...]:
    mask = nm_mask(x)
    codes, scale = quantize_fp8(x, "e4m3")
    sample = mvue24(x, seed, 2, dim=0)
    soft = soft_threshold24(x.t(), 0.5).t()
    decayed = masked_decay_(x * 2, x, mask, 0.1)
    both = transposable_mask24(x), double_prune_mask(x)
    return (
        mask, codes.float(), scale, sample, soft, decayed, *both, fake_fp8(x, "e5m2"),
        check24(x), flip_rate(*both),
    )  # fmt: skip


def test_compiled_without_a_graph_break():
    torch._dynamo.reset()
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager")
    for seed in (1, 2):  # a tensor seed is not baked in
        for got, want in zip(
            compiled(X, torch.tensor(seed)), everything(X, torch.tensor(seed)), strict=True
        ):
            assert torch.equal(got, want) and got.stride() == want.stride()


def test_fake_tensors():
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = everything(mode.from_tensor(X), mode.from_tensor(SEED))
    for fake, real in zip(fakes, everything(X, SEED), strict=True):
        assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


@pytest.mark.parametrize(
    "operator", [soft_threshold24, lambda x: mvue24(x, 1), lambda x: fake_fp8(x, "e4m3")]
)
def test_no_gradient_is_invented(operator):
    """The straight-through rule is the caller's."""
    x = X.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="autograd"):
        operator(x).sum().backward()
