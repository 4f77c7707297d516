from copy import deepcopy as copy
from dataclasses import replace

import pytest
import torch

from common_kernels import nm_mask, soft_threshold24, transposable_mask24
from common_kernels.adamw import Rates, Rule, Weight24, adamw24_
from common_kernels.adamw.reference import adamw
from common_kernels.pack import BUFFERED, Packed24, convert24
from common_kernels.pack.operands import pack24_, pack_both24_
from tests.each import each

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ("cpu", "triton")
CUTLASS = ("cutlass_sm90", "cutlass_sm90_k128")
RATES = Rates(lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
SHAPES = ((8, 12), (68, 132), (64, 128))  # in one block, across borders, whole blocks
NAN = float("nan")


def number(value):
    return torch.tensor(value, device=DEVICE)


def given(shape, seed=0, grad=torch.float32, operand=torch.bfloat16, packs=(False, False)):
    generator = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(shape, generator=generator).to(DEVICE)

    packed, transposed = (
        Packed24.empty(s, operand, torch.device(DEVICE)) if p else None
        for p, s in zip(packs, (shape, shape[::-1]), strict=True)
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
@each("grad", [torch.float32, torch.bfloat16])
@each("shape", SHAPES)
def test_update_by_definition(backend, grad, shape):
    """Two weights in one call, with decay: each by the definition; gradients are left alone."""
    weights = [given(shape, seed, grad) for seed in range(2)]
    before = [copy(w) for w in weights]
    adamw24_(weights, RATES, Rule(alpha=0.3), backend=backend)
    for weight, old in zip(weights, before, strict=True):
        assert within_rounding(weight, old, alpha=0.3)
        assert torch.equal(weight.grad, old.grad) and torch.equal(weight.mask, old.mask)
        assert weight.step == 5
        assert torch.equal(weight.dense, torch.where(old.mask, weight.weight, 0).bfloat16())


def test_without_decay_it_is_torchs_adamw_to_the_bit():
    weight = given((8, 12))
    parameter = torch.nn.Parameter(weight.weight.clone())
    optimizer = torch.optim.AdamW([parameter], fused=True)
    for _ in range(2):
        parameter.grad = weight.grad.clone()
        optimizer.step()
    state = optimizer.state[parameter]
    weight.exp_avg.zero_(), weight.exp_avg_sq.zero_(), weight.step.zero_()
    for _ in range(2):
        adamw24_([weight], Rates(lr=1e-3), Rule(source="whole"), backend="cpu")
    assert torch.equal(weight.weight, parameter)
    assert torch.equal(weight.exp_avg, state["exp_avg"])
    assert torch.equal(weight.exp_avg_sq, state["exp_avg_sq"])


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
@each("choose", ["rows", "exact", "greedy"])
@each("shape", SHAPES[1:])
def test_masks_and_operands_are_those_of_the_new_weight(backend, choose, shape):
    transposable = choose != "rows"
    packs = (True, transposable) if shape == (64, 128) else (False, False)
    weight = given(shape, packs=packs)
    adamw24_([weight], RATES, Rule(choose=choose, alpha=0.1), backend=backend)
    new = weight.weight
    mask = transposable_mask24(new, choose) if transposable else nm_mask(new)
    assert torch.equal(weight.mask, mask)
    assert torch.equal(weight.dense, torch.where(mask, new, 0).bfloat16())
    if packs[0]:
        packed, transposed = (
            Packed24.empty(s, torch.bfloat16, torch.device(DEVICE)) for s in (shape, shape[::-1])
        )
        if transposable:
            pack_both24_(packed, transposed, new, mask)
        else:
            pack24_(packed, new, "mask", mask)
        assert weight.packed.buffer.equal(packed.buffer)
        assert not transposable or weight.transposed.buffer.equal(transposed.buffer)


@each("backend", BACKENDS)
@each("layouts", [CUTLASS, (CUTLASS[1], BUFFERED)])
def test_operands_in_the_order_of_cutlass(backend, layouts):
    """A weight for each pair of layouts, in one call."""
    shape, device = (128, 128), torch.device(DEVICE)
    plain = given(shape, packs=(True, True))
    packed, transposed = (Packed24.empty(shape, torch.bfloat16, device, n) for n in layouts)
    other = replace(copy(plain), packed=packed, transposed=transposed)
    adamw24_([plain, other], RATES, Rule(choose="exact", alpha=0.1), backend=backend)
    assert torch.equal(plain.weight, other.weight) and torch.equal(plain.mask, other.mask)
    for got, want in (other.packed, plain.packed), (other.transposed, plain.transposed):
        want = convert24(want, got.layout)
        assert torch.equal(got.values, want.values) and torch.equal(got.meta, want.meta)


@each("backend", BACKENDS)
def test_operands_of_a_kept_mask_of_the_soft_threshold_and_of_the_whole_weight(backend):
    shape = (64, 64)
    kept = given(shape, packs=(True, True))
    before = copy(kept)
    adamw24_([kept], RATES, Rule(), backend=backend)
    packed, transposed = (
        Packed24.empty(shape, torch.bfloat16, torch.device(DEVICE)) for _ in range(2)
    )
    pack_both24_(packed, transposed, kept.weight, before.mask)
    assert kept.packed.buffer.equal(packed.buffer)
    assert kept.transposed.buffer.equal(transposed.buffer)

    soft = given(shape, packs=(True, False))
    adamw24_([soft], RATES, Rule(source="soft"), backend=backend)
    pack24_(packed, soft.weight, "soft", scale=soft.scale)
    assert soft.packed.buffer.equal(packed.buffer)
    assert torch.equal(soft.dense, (1.25 * soft_threshold24(soft.weight)).bfloat16())

    whole = given(shape)
    adamw24_([whole], RATES, Rule(source="whole", choose="rows"), backend=backend)
    assert torch.equal(whole.mask, nm_mask(whole.weight))
    assert torch.equal(whole.dense, whole.weight.bfloat16())


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
    first = number([True, True, False, False])  # the lower index wins
    assert torch.equal(weight.mask[1:], first.repeat(7, 2))
    assert torch.equal(weight.mask[0, :4], number([True, False, False, True]))
    for tensor in (weight.weight, weight.exp_avg, weight.exp_avg_sq, weight.dense):
        assert tensor[0, 3].isnan() and tensor.isnan().sum() == 1


@each("backend", BACKENDS)
def test_any_strides(backend):
    """Transposed, shifted and gapped tensors take the same step, to the bit on one path."""
    want = given((8, 12))
    adamw24_([apart := copy(want)], RATES, Rule(alpha=0.3, choose="exact"), backend="cpu")
    parts = {name: t for name, t in copy(want).tensors.items() if t is not None}
    gap = torch.zeros(8, 24, device=DEVICE)
    gap[:, ::2] = want.exp_avg
    strange = Weight24(
        **parts
        | {
            "weight": parts["weight"].t().contiguous().t(),
            "grad": parts["grad"].t().contiguous().t(),
            "exp_avg": gap[:, ::2],
            "mask": torch.cat([number([False]), want.mask.flatten()])[1:].view(8, 12),
        }
    )
    adamw24_([strange], RATES, Rule(alpha=0.3, choose="exact"), backend=backend)
    for name in ("weight", "exp_avg", "exp_avg_sq", "mask", "dense"):
        assert torch.equal(getattr(strange, name), getattr(apart, name)), name
    assert (gap[:, 1::2] == 0).all()


def test_a_kernel_tells_autograd_what_it_wrote():
    weight = given((8, 12))
    versions = weight.weight._version, weight.mask._version
    adamw24_([weight], RATES, Rule(choose="rows"), backend="triton")
    assert weight.weight._version > versions[0] and weight.mask._version > versions[1]


def test_kinds_and_empty_weights_in_one_call():
    weights = [given((8, 12)), given((0, 4)), given((12, 8), grad=torch.bfloat16), given((8, 12))]
    before = [copy(w) for w in weights]
    adamw24_(weights, RATES, Rule(), backend="triton")
    adamw24_([], RATES, Rule())
    assert all(
        within_rounding(a, b) for a, b in zip(weights, before, strict=True) if a.weight.numel()
    )


def test_errors():
    weight = given((8, 12))
    with pytest.raises(ValueError, match=r"choose='best'.*rows, exact, greedy"):
        Rule(choose="best")
    with pytest.raises(ValueError, match=r"source='hard'"):
        Rule(source="hard")
    with pytest.raises(TypeError, match=r"weight must be float32, not torch\.bfloat16"):
        adamw24_([replace(weight, weight=weight.weight.bfloat16())], RATES, Rule())
    with pytest.raises(ValueError, match=r"shape \(8, 6\).*multiples of 4"):
        adamw24_([replace(weight, weight=torch.ones(8, 6))], RATES, Rule())
    with pytest.raises(ValueError, match=r"weight and grad.*\(8, 12\) and \(8, 8\)"):
        adamw24_([replace(weight, grad=torch.ones(8, 8))], RATES, Rule())
    with pytest.raises(ValueError, match=r"needs a mask"):
        adamw24_([replace(weight, mask=None)], RATES, Rule(alpha=0.1, source="whole"))
    both = given((64, 64), packs=(True, False))
    with pytest.raises(ValueError, match=r"bfloat16 and torch\.float32.*must share one"):
        adamw24_([replace(both, dense=torch.empty(64, 64))], RATES, Rule())
    with pytest.raises(ValueError, match=r"float8_e4m3fn.*16-bit if packed"):
        adamw24_([given((64, 64), operand=torch.float8_e4m3fn, packs=(True, False))], RATES, Rule())
    with pytest.raises(ValueError, match=r"is not 2:4 and cannot be packed"):
        adamw24_([given((64, 64), packs=(True, False))], RATES, Rule(source="whole"))


@each("backend", BACKENDS)
@each("choose", [None, "rows", "exact", "greedy"])
@each("shape", SHAPES)
def test_the_largest_magnitude_of_the_operand(backend, choose, shape):
    """It is that of what is kept, for two weights of which one has its largest entry where it is
    pruned; without eps 0 / 0 lies outside of the matrix."""
    weights = [replace(given(shape, seed), amax=number(NAN)) for seed in range(2)]
    for weight in weights:
        weight.weight[~weight.mask] *= 3.0
    adamw24_(weights, replace(RATES, eps=0.0), Rule(choose=choose), backend=backend)
    for weight in weights:
        assert weight.amax == torch.where(weight.mask, weight.weight, 0.0).abs().max()
    adamw24_(weights, RATES, Rule(source="soft"), backend=backend)
    for weight in weights:
        assert weight.amax == (weight.scale * soft_threshold24(weight.weight)).abs().max()
    with pytest.raises(ValueError, match="needs a source other than"):
        adamw24_(weights, RATES, Rule(source="whole"), backend=backend)
