"""The operators as torch knows them, and the choice of their backend."""

import pytest
import torch

from common_kernels import backend, fake_fp8, masked_decay_, mvue24, nm_mask, soft_threshold24
from tests.each import each

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
X = torch.randn(16, 24, generator=torch.Generator().manual_seed(0))


@pytest.mark.filterwarnings("ignore:Error detected in")  # and where, says torch, too
def test_no_gradient_is_invented():
    """The straight-through rule is the caller's; also when compiled."""
    torch._dynamo.reset()
    compiled = torch.compile(soft_threshold24, fullgraph=True, backend="aot_eager")
    functions = soft_threshold24, lambda x: mvue24(x, 1), lambda x: fake_fp8(x, "e4m3"), compiled
    for function in functions:
        x = X.clone().requires_grad_()
        with pytest.raises(RuntimeError, match="autograd"):
            function(x).sum().backward()


@each("name", ["cpu", "triton"])
@each("mode", [torch.enable_grad, torch.no_grad])
@each("requires_grad", [False, True])
def test_a_mutation_is_seen_by_autograd(name, mode, requires_grad):
    """It is noticed in a tensor saved for a backward, though Triton writes unseen by torch."""
    saved, x = X[:2, :4].clone().to(DEVICE), X[:2, :4].to(DEVICE).requires_grad_()
    y = x * saved
    with mode():
        weight = x if requires_grad else x.detach()
        masked_decay_(saved, weight, weight > 0, 0.1, backend=name)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


class Seen(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.operators.append(operator)
        return operator(*args, **(kwargs or {}))


def test_modes_and_lazy_tensors_are_not_passed_by():
    """The dispatcher's work beside autograd is done: modes, negation that is yet to be made."""
    x = X.clone().requires_grad_()
    with Seen() as seen:
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                nm_mask(x)
    assert seen.operators.count(torch.ops.sparse24.nm_mask.default) == 2
    negated = torch._neg_view(X)
    assert negated.is_neg()
    assert torch.equal(soft_threshold24(negated), soft_threshold24(-X))
    assert torch.equal(masked_decay_(X.clone(), negated, X > 0, 0.5), X - 0.5 * X * (X <= 0))


def test_writing_into_what_requires_grad_is_refused_as_by_torch():
    weight, mask = torch.ones(2, 4), torch.zeros(2, 4, dtype=torch.bool)
    leaf = torch.zeros(2, 4, requires_grad=True)
    for tensor in (leaf, leaf * 1, leaf[:, :]):
        with pytest.raises(RuntimeError, match="masked_decay_ writes into a tensor that requires"):
            masked_decay_(tensor, weight, mask, 0.5)
    assert not leaf.any()
    with torch.no_grad():
        masked_decay_(leaf, weight, mask, 0.5)
    assert (leaf == 0.5).all() and leaf.grad_fn is None


def test_the_device_the_argument_and_the_environment_choose_the_backend(monkeypatch):
    monkeypatch.delenv("SPARSE24_BACKEND", raising=False)
    assert backend.resolve("cpu") == "cpu"
    assert DEVICE == "cpu" or backend.resolve("cuda") == "triton"
    monkeypatch.setenv("SPARSE24_BACKEND", "triton")
    assert backend.resolve("cpu", "cpu") == "cpu"
    # Nothing is launched on meta.
    assert backend.resolve("meta") == backend.resolve("meta", "triton") == "cpu"
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for call in (lambda: backend.resolve("cpu", "triton"), lambda: nm_mask(torch.ones(4))):
        with pytest.raises(RuntimeError, match=r"triton.*'cpu'.*TRITON_INTERPRET=1"):
            call()
    with pytest.raises(ValueError, match=r"'cutlass'.*cpu, triton"):
        nm_mask(torch.ones(4), backend="cutlass")
