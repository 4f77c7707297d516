from copy import deepcopy as copy
from dataclasses import replace

import torch

from common_kernels import nm_mask, soft_threshold24, transposable_mask24
from common_kernels.adamw import Rates, Rule, Weight24, adamw24_
from common_kernels.adamw.reference import adamw
from common_kernels.pack import BUFFERED, VENDOR, Packed24
from common_kernels.pack.cpu import pack
from tests.common_kernels.conftest import LEARNT
from tests.each import each

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ("cpu", "triton")
CUTLASS = ("cutlass_sm90", "cutlass_sm90_k128")
RATES = Rates(lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
SHAPES = ((8, 12), (68, 132), (64, 128))  # in one block, across borders, whole blocks
NAN = float("nan")


def number(value):
    return torch.tensor(value, device=DEVICE)


def given(shape, seed=0, grad=torch.float32, operand=torch.bfloat16, layouts=(None, None)):
    generator = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(shape, generator=generator).to(DEVICE)

    packed, transposed = (
        layout and Packed24.empty(s, operand, torch.device(DEVICE), layout)
        for layout, s in zip(layouts, (shape, shape[::-1]), strict=True)
    )
    return Weight24(
        weight=normal(),
        grad=normal().to(grad),
        exp_avg=0.1 * normal(),
        exp_avg_sq=0.1 + normal().square(),
        step=number(4.0),
        mask=transposable_mask24(normal()),
        scale=number(1.25),
        dense=torch.empty(shape, dtype=operand, device=DEVICE),
        packed=packed,
        transposed=transposed,
    )


def within_rounding(after, before, rates=RATES, alpha=0.0, grad_scale=1.0):
    """True if weight and moments are those of the definition.

    Each is a few roundings of terms that may cancel: eight of the largest term's, where a term's
    own relative error (of g in v, of v in the update) counts in.
    """
    steps = int(before.step) + 1
    want = adamw(
        before.weight, before.grad, before.exp_avg, before.exp_avg_sq, steps, before.mask,
        lr=float(rates.lr), betas=rates.betas, eps=rates.eps, weight_decay=rates.weight_decay,
        alpha=alpha, grad_scale=grad_scale,
    )  # fmt: skip
    exp_avg_sq = want[2]
    beta1, beta2 = rates.betas
    g = before.grad.double().abs() / grad_scale + alpha * before.weight.double().abs()
    m, v = before.exp_avg.abs() + g, before.exp_avg_sq + g * g
    root = (exp_avg_sq / (1 - beta2**steps)).sqrt() + rates.eps
    move = float(rates.lr) / (1 - beta1**steps) * m / root * (1 + v / exp_avg_sq)
    terms = (before.weight.abs() + move, m, v)
    got = after.weight, after.exp_avg, after.exp_avg_sq
    return all(
        ((a - b).abs() <= 8 * 2**-24 * term).all()
        for a, b, term in zip(got, want, terms, strict=True)
    )


@each("backend", BACKENDS)
@each("shape", SHAPES)
def test_update_by_definition(backend, shape):
    """Weights of both kinds and an empty one in one call, with decay; gradients are left alone, and
    autograd knows what was written."""
    weights = [given(shape), given(shape, 1, torch.bfloat16), given((0, 4))]
    before = [copy(w) for w in weights]
    versions = [w.weight._version for w in weights]
    adamw24_(weights, RATES, Rule(alpha=0.3), backend=backend)
    for weight, old, version in zip(weights[:2], before, versions, strict=False):
        assert within_rounding(weight, old, alpha=0.3)
        assert torch.equal(weight.grad, old.grad) and torch.equal(weight.mask, old.mask)
        assert weight.step == 5 and (backend == "cpu" or weight.weight._version > version)
        assert torch.equal(weight.dense, torch.where(old.mask, weight.weight, 0).bfloat16())


@each("backend", BACKENDS)
def test_first_step_and_a_beta_of_zero(backend):
    """1 - beta2^t is 0.001 at t = 1: its rounding must not show, and eps is not divided by it."""
    for betas, eps in (((0.9, 0.999), 0.1), ((0.0, 0.0), 1e-8)):
        weight, rates = given((8, 12)), Rates(lr=number(0.01), betas=betas, eps=eps)
        weight.step.zero_()
        before = copy(weight)
        adamw24_([weight], rates, Rule(), backend=backend)
        assert within_rounding(weight, before, rates)


@each("backend", BACKENDS)
@each(
    ("choose", "source"),
    [*((c, "mask") for c in (None, "rows", "exact", "greedy")), (None, "soft"), ("rows", "whole")],
)
def test_masks_and_operands_are_those_of_the_new_weight(backend, choose, source):
    """Weights with operands in every layout, and one without, in one call."""
    weights, both = [given((68, 132))], source == "mask" and choose != "rows"
    if source != "whole":
        for layout in (BUFFERED, *((LEARNT, VENDOR) if choose in (None, "exact") else ())):
            weights.append(given((64, 128), layouts=(layout, layout if both else None)))
        weights.append(
            replace(given((64, 128), 2, layouts=(VENDOR, VENDOR if both else None)), dense=None)
        )
    if choose == "exact":
        weights += [given((128, 128), layouts=pair) for pair in (CUTLASS, (CUTLASS[1], BUFFERED))]
    masks = [w.mask.clone() for w in weights]
    buffers = [w.packed.buffer for w in weights if w.packed is not None]
    versions = [buffer._version for buffer in buffers]
    adamw24_(weights, RATES, Rule(choose=choose, source=source, alpha=0.1), backend=backend)
    assert all(b._version > v for b, v in zip(buffers, versions, strict=True))
    for weight, mask in zip(weights, masks, strict=True):
        new = weight.weight
        if choose is not None:
            mask = nm_mask(new) if choose == "rows" else transposable_mask24(new, choose)
        assert torch.equal(weight.mask, mask)
        if source == "soft":
            mask, want = nm_mask(new), 1.25 * soft_threshold24(new)
        else:
            want = new if source == "whole" else torch.where(mask, new, 0)
        want = want.bfloat16()
        assert weight.dense is None or torch.equal(weight.dense, want)
        for out, x, kept in (weight.packed, want, mask), (weight.transposed, want.t(), mask.t()):
            if out is not None:
                assert out.buffer.equal(pack(x.contiguous(), kept.contiguous(), out.layout))


@each("backend", BACKENDS)
def test_gradient_scale_and_a_step_that_is_left_out(backend):
    weight = given((8, 12))
    before = copy(weight)
    scale, fine = number(7.0), number(0.0)
    adamw24_([weight], RATES, Rule(alpha=0.3), grad_scale=scale, found_inf=fine, backend=backend)
    assert weight.step == 5
    assert within_rounding(weight, before, alpha=0.3, grad_scale=7.0)

    before = copy(weight)
    broken = replace(weight, grad=torch.full_like(weight.grad, NAN))
    adamw24_([broken], RATES, Rule(choose="rows"), found_inf=number(1.0), backend=backend)
    for name in ("weight", "exp_avg", "exp_avg_sq", "step"):
        assert torch.equal(getattr(broken, name), getattr(before, name))
    assert torch.equal(broken.mask, nm_mask(before.weight))  # a choice that was due was made
    assert torch.equal(broken.dense, torch.where(broken.mask, before.weight, 0).bfloat16())


@each("backend", BACKENDS)
def test_nan_and_ties(backend):
    weight = given((8, 8))
    weight.weight.fill_(1.0)
    for tensor in (weight.grad, weight.exp_avg):
        tensor.zero_()
    weight.grad[0, 3] = NAN
    adamw24_([weight], RATES, Rule(choose="rows"), backend=backend)
    # The lower index wins.
    assert weight.mask[:2, :4].tolist() == [[True, False, False, True], [True, True, False, False]]
    for tensor in (weight.weight, weight.exp_avg, weight.exp_avg_sq, weight.dense):
        assert tensor[0, 3].isnan() and tensor.isnan().sum() == 1


@each("backend", BACKENDS)
def test_any_strides(backend):
    """Transposed, shifted and gapped tensors take the same step, to the bit on one path."""
    want = given((8, 12))
    adamw24_([apart := copy(want)], RATES, Rule(alpha=0.3, choose="exact"), backend="cpu")
    gap = torch.zeros(8, 24, device=DEVICE)
    gap[:, ::2] = want.exp_avg
    strange = replace(
        copy(want),
        weight=want.weight.t().contiguous().t(),
        grad=want.grad.t().contiguous().t(),
        exp_avg=gap[:, ::2],
        mask=torch.cat([number([False]), want.mask.flatten()])[1:].view(8, 12),
    )
    adamw24_([strange], RATES, Rule(alpha=0.3, choose="exact"), backend=backend)
    for name in ("weight", "exp_avg", "exp_avg_sq", "mask", "dense"):
        assert torch.equal(getattr(strange, name), getattr(apart, name)), name
    assert (gap[:, 1::2] == 0).all()


@each("backend", BACKENDS)
def test_the_largest_magnitude_of_the_operand(backend):
    """It is that of what is kept, for two weights of which one has its largest entry where it is
    pruned; without eps 0 / 0 lies outside of the matrix."""
    for choose in (None, "rows", "exact", "greedy"):
        weights = [replace(given(shape, i), amax=number(NAN)) for i, shape in enumerate(SHAPES[1:])]
        for weight in weights:
            weight.weight[~weight.mask] *= 3.0
        adamw24_(weights, replace(RATES, eps=0.0), Rule(choose=choose), backend=backend)
        for weight in weights:
            assert weight.amax == torch.where(weight.mask, weight.weight, 0.0).abs().max()
    adamw24_(weights, RATES, Rule(source="soft"), backend=backend)
    for weight in weights:
        assert weight.amax == (weight.scale * soft_threshold24(weight.weight)).abs().max()
