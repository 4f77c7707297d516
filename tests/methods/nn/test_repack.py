"""An operand of dgrad packed in each backward pass gives a kept one's bits in less memory."""

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import methods
from common_kernels.matmul import unavailable
from experiments.support.memory import buffer_bytes
from methods.nn.gemms import Products
from tests.methods.loop import training_step

pytest.importorskip("triton", reason="cuSPARSELt is emulated where Triton's interpreter runs")

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
TOKENS, BF16 = 48, torch.bfloat16
REPACKED = Products(fprop=True, dgrad=True, repack=True)


def build(repack, matmul="cusparselt", name="slope", **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(DEVICE)
    method = methods.build(name, **{"include": ("*",), "exclude": (), **options})
    method.convert(model, BF16)
    method.accelerate(TOKENS, matmul, repack)
    return model, method


def passes(model, seed, run=None, times=1):
    """Run a micro-batch forward and backward, `times` through the model; returns dX and the
    gradients so far."""
    generator = torch.Generator().manual_seed(seed)
    x = inputs = torch.randn(TOKENS, 64, generator=generator).to(DEVICE).requires_grad_()
    with torch.autocast(DEVICE, BF16):
        for _ in range(times):
            x = (run or model)(x)
    x.float().square().mean().backward()
    return [inputs.grad, *(p.grad.clone() for p in model.parameters())]


def equal(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("matmul", ["cusparselt", "cuda"])
def test_training_is_that_with_kept_operands(matmul):
    """Steps of two micro-batches give the same bits; columns are pruned anew after every second."""
    if matmul == "cuda" and (reason := unavailable("cuda", DEVICE, BF16)):
        pytest.skip(reason)
    runs = [build(repack, matmul, column_refresh=2) for repack in (True, False)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model, _ in runs]
    masks = []
    for step in range(3):
        grads = []
        for (model, method), optimizer in zip(runs, optimizers, strict=True):
            with training_step(method, step, optimizer):
                grads.append(passes(model, 2 * step) + passes(model, 2 * step + 1))
        assert equal(*grads)
        masks.append(runs[0][0][0].column_mask.clone())
    assert [torch.equal(*pair) for pair in pairwise(masks)] == [False, True]
    states = [model.state_dict() for model, _ in runs]
    assert list(states[0]) == list(states[1]) and equal(*(state.values() for state in states))


def test_what_is_held_has_one_operand_less():
    (ours, method), (theirs, _) = build(True), build(False)
    assert {layer.accelerated for layer in method.sparse_layers.values()} == {REPACKED}
    passes(ours, 0)
    for layer, other in zip(ours[::2], theirs[::2], strict=True):
        assert layer.packed_transposed is None
        # Half of the values, of two bytes, and a bit a weight for where they are.
        assert buffer_bytes(layer, "packed") == 64 * 128 * 9 // 8
        assert buffer_bytes(other, "packed") == 2 * buffer_bytes(layer, "packed")
        for kind in ("masks", "operands"):
            assert buffer_bytes(layer, kind) == buffer_bytes(other, kind)
    in_vain = "; repack_backward has no effect: dgrad is dense"
    assert in_vain not in str(method.acceleration)
    method.accelerate(TOKENS, "cusparselt")
    assert equal(ours.buffers(), theirs.buffers())
    method.accelerate(TOKENS, "dense", True)
    assert str(method.acceleration).endswith(in_vain)
    assert not any(buffer_bytes(layer, "packed") for layer in ours[::2])


def test_nothing_packed_waits_for_the_backward_pass():
    model, _ = build(True)
    held = [layer.packed for layer in model[::2]]
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        saved = []
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.append(t) or t, lambda t: t
        )
        with hooks, torch.autocast(DEVICE, BF16):
            run(torch.randn(TOKENS, 64, device=DEVICE, requires_grad=True))
        packed = {t.data_ptr() for t in saved if t.shape == held[0].shape}
        assert packed <= {t.data_ptr() for t in held}


@pytest.mark.skipif(CUDA, reason="compiled products on a GPU are timed in `bench train`")
def test_compiled_checkpointed_twice_in_a_pass_or_copied():
    """In each of these cases the model gives what the plain one with kept operands gives."""
    (model, _), (reference, _) = build(True), build(False)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    recomputed = lambda x: checkpoint(model, x, use_reentrant=False)  # noqa: E731
    for run, of in ((compiled, model), (recomputed, model), (None, copy.deepcopy(model))):
        for times in (1, 2):
            assert equal(passes(of, 1, run, times), passes(reference, 1, None, times))
            of.zero_grad(), reference.zero_grad()


def test_what_cannot_be_packed_so_is_refused():
    for name, options in (("fst", {"dense_fraction": 0.0}), ("slope", {"fp8": "hopper"})):
        with pytest.raises(ValueError, match=r"repack_backward=True: no layer .* slope with 2:4"):
            build(True, "dense", name, **options)
