"""The operators that `ops` measures, the bytes they must move, and other ways to do the same."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.adamw import adamw

import common_kernels as ck
from common_kernels.adamw import Rates, Rule, Weight24, adamw24_
from common_kernels.pack import BUFFERED, Packed24
from common_kernels.pack.operands import pack24_, pack_both24_, sample_pack24
from experiments.support.errors import UserError

aten = torch.ops.aten
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
OWN = "cutlass_sm90"  # the layout of our own kernels
GREEDY = "largest_abs_values_greedy"  # the search of other libraries
Arguments = tuple[Any, ...]
Function = Callable[..., Any]


@dataclass(frozen=True)
class Op:
    """An operator.

    run: called with what `prepare` makes of a weight, and the keyword `backend`; returns a tensor,
        or the matrices that it has packed.
    moved: the least bytes read and written per entry of the weight, given the bytes of an entry.
    plain: a plain formulation, timed eager and compiled on a GPU; `through` turns it into a
        counterpart of `run`.
    libraries: other libraries' calls for the same work by name, for the same arguments.
    gpu_only: not measured on a CPU. fp32: only in fp32. figures: further ones of its row.
    """

    run: Function
    moved: Callable[[float], float]
    prepare: Callable[[Tensor], Arguments] = lambda w: (w,)
    plain: Function | None = None
    through: Callable[[Function], Function] = lambda function: function
    libraries: dict[str, Function] = field(default_factory=dict)
    gpu_only: bool = False
    figures: dict[str, float] = field(default_factory=dict)
    fp32: bool = False


def check(name: str, w: Tensor, **options: Any) -> None:
    """Raise a `UserError` if the operator with these options differs from plain PyTorch on this
    device: masks and packed bytes must be equal, other numbers to a few units in the last place."""
    op = OPS[name]
    found, want = (results(op.run(*op.prepare(w), **options, backend=b)) for b in (None, "cpu"))
    if not all(map(agree, found, want)):
        on = f"shape {tuple(w.shape)}, {w.dtype}"
        again = "no time is reported; run `pytest tests/common_kernels`"
        raise UserError(f"{name} differs from plain PyTorch on {on}: {again}")


def results(output: Any) -> list[Tensor]:
    """Copies of the tensors of an operator's output."""
    several = output if isinstance(output, tuple) else (output,)
    return [(x.buffer if isinstance(x, Packed24) else x).detach().clone() for x in several]


def agree(got: Tensor, want: Tensor) -> bool:
    """True if two results are equal, numbers up to a few units in the last place."""
    if not want.is_floating_point() or want.itemsize == 1:
        return torch.equal(got.float(), want.float())
    eps = torch.finfo(want.dtype).eps
    limit = 4 * eps * want.float().abs().amax().item()
    return torch.allclose(got.float(), want.float(), rtol=4 * eps, atol=limit)


# --- plain formulations, which a compiler can fuse -----------------------------------------------


def groups(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, 4))


def compared(w: Tensor) -> Tensor:
    """The 2:4 mask of w: an entry is kept if fewer than two others of its group beat it."""
    a = groups(w.abs())
    i = torch.arange(4, device=w.device)
    one, other = a.unsqueeze(-1), a.unsqueeze(-2)
    beaten = (other > one) | ((other == one) & (i < i[:, None]))
    return (beaten.sum(-1) < 2).flatten(-2)


def compared_soft(w: Tensor) -> Tensor:
    a, b, c, d = groups(w.abs()).unbind(-1)
    least, most = torch.minimum, torch.maximum
    t = least(most(least(a, b), least(c, d)), least(most(a, b), most(c, d)))
    return (groups(w).sign() * (groups(w.abs()) - t.unsqueeze(-1)).relu()).flatten(-2)


def e4m3_codes(w: Tensor) -> tuple[Tensor, Tensor]:
    amax = w.float().abs().amax()
    scale = torch.full_like(amax, 448) / amax  # number / tensor would round differently
    return (w.float() * scale).clamp(-448, 448).to(FP8), scale


def through_e4m3(w: Tensor) -> Tensor:
    codes, scale = e4m3_codes(w)
    return (codes.float() / scale).to(w.dtype)


def gated(w: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    value, gate = w.float().chunk(2, -1)
    return (value * activation(gate)).to(w.dtype)


def gradients(function: Function) -> Function:
    """A function (x, dy) -> gradient of x, which runs forward and backward of `function`."""
    return lambda x, dy, **how: torch.autograd.grad(function(x, **how), x, dy)[0]


# --- arguments -----------------------------------------------------------------------------------


def leaf_and_gradient(w: Tensor) -> Arguments:
    return w.detach().clone().requires_grad_(), w.chunk(2, -1)[0].contiguous()


def with_key(offset: int) -> Callable[[Tensor], Arguments]:
    """A function w -> (w, seed, offset) with seed and offset as tensors on w's device."""
    return lambda w: (w, *(torch.tensor(k, device=w.device) for k in (1, offset)))


def with_bits(w: Tensor) -> Arguments:
    return w, ck.pack_mask(ck.nm_mask(w))


class ToPack:
    """The inputs of all packers: a matrix w, its transposable mask, a scale, a random key, and
    buffers to pack into; `pruned` is w pruned to 2:4 along its rows, in the buffers' dtype."""

    def __init__(self, w: Tensor, dtype: torch.dtype, layout: str) -> None:
        self.w, self.mask, device = w, ck.transposable_mask24(w), w.device
        self.scale = torch.tensor(1.5, device=device)
        self.key = torch.tensor([77, 1], device=device)
        self.pruned = (w * ck.nm_mask(w)).to(dtype)
        self.out = Packed24.empty(w.shape, dtype, device, layout)
        self.transposed = Packed24.empty(w.shape[::-1], dtype, device, layout)


def one_way(i: ToPack, source: str, backend: str | None = None) -> Packed24:
    mask, scale = i.mask if source == "mask" else None, i.scale if source == "soft" else None
    pack24_(i.out, i.w, source, mask, scale, backend=backend)
    return i.out


def two_ways(
    i: ToPack, searched: bool = False, backend: str | None = None
) -> tuple[Packed24, Packed24]:
    pack_both24_(i.out, i.transposed, i.w, None if searched else i.mask, backend=backend)
    return i.out, i.transposed


def sample(i: ToPack, backend: str | None = None) -> Packed24:
    stride, layout = i.w.numel() // 4, i.out.layout
    return sample_pack24(i.w, i.key, stride, dtype=BF16, layout=layout, backend=backend)


# --- a weight's optimizer step -------------------------------------------------------------------

# The least bytes: weight, moments, gradient and (if needed) mask read once; weight, moments, a new
# mask and the packed operands written once. Those of separate passes are counted in the same way.
RATES = Rates(lr=1e-5, weight_decay=0.1)
ALPHA = 1e-6  # small, because the separate passes add to the same gradient repeatedly
UPDATE = 16 + 12  # weight, gradient and two moments read, all but the gradient written
PACKED = 1.125  # bytes of values and positions per entry of a 16-bit type


def optimizer_state(w: Tensor, both: bool) -> Weight24:
    """The fp32 state of an optimizer step of `w` [64 a, 64 b]. both: also pack for dgrad."""
    return Weight24(
        weight=w.clone(),
        grad=w.flip(0),
        exp_avg=w.flip(1),
        exp_avg_sq=w.square() + 1e-6,  # in a large step torch's kernel is inexact
        step=torch.tensor(10.0, device=w.device),
        mask=ck.transposable_mask24(w),
        scale=torch.tensor(1.5, device=w.device),
        packed=Packed24.empty(w.shape, torch.bfloat16, w.device),
        transposed=(Packed24.empty(w.shape[::-1], torch.bfloat16, w.device) if both else None),
    )


def one_pass(rule: Rule, given: Weight24, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """The weight and its first moment after the step in one pass."""
    adamw24_([given], RATES, rule, backend=backend)
    return given.weight, given.exp_avg


def apart(rule: Rule, given: Weight24) -> None:
    """Do the same step by separate operators."""
    weight, mask = given.weight, given.mask
    assert mask is not None and given.packed is not None
    if rule.alpha:
        ck.masked_decay_(given.grad, weight, mask, rule.alpha)
    adamw(
        [weight], [given.grad], [given.exp_avg], [given.exp_avg_sq], [], [given.step],
        fused=True, amsgrad=False, maximize=False, lr=RATES.lr, eps=RATES.eps,
        beta1=RATES.betas[0], beta2=RATES.betas[1], weight_decay=RATES.weight_decay,
    )  # fmt: skip
    if rule.choose == "rows":
        mask.copy_(ck.nm_mask(weight))
    elif rule.choose:
        mask.copy_(ck.transposable_mask24(weight, rule.choose))
    if given.transposed is not None:
        pack_both24_(given.packed, given.transposed, weight, mask)
    elif rule.source == "soft":
        pack24_(given.packed, weight, "soft", scale=given.scale)
    else:
        pack24_(given.packed, weight, "mask", mask)


def optimizer_step(rule: Rule, both: bool = False) -> Op:
    """The step in one pass beside the same step by separate operators."""
    packed = PACKED * (1 + both)
    reads_mask = rule.alpha or not (rule.choose or rule.source == "soft")
    moved = UPDATE + bool(reads_mask) + bool(rule.choose) + packed
    separately = 13 * bool(rule.alpha) + (4 + 1 + 2) * bool(rule.choose) + UPDATE + packed
    figures = {"bytes a weight": moved}
    figures["bytes a weight, separate passes"] = separately + 4 + (rule.source == "mask")
    return Op(
        partial(one_pass, rule), lambda _: moved, lambda w: (optimizer_state(w, both),),
        libraries={"separate passes": partial(apart, rule)}, gpu_only=True, fp32=True,
        figures=figures,
    )  # fmt: skip


# --- the operators -------------------------------------------------------------------------------


def packer(
    run: Function, moved: float, dtype: torch.dtype = BF16, layout: str = BUFFERED, **more: Any
) -> Op:
    """A packer that moves as many bytes per entry besides those of the matrix itself."""
    libraries = {"_cslt_compress": lambda i: aten._cslt_compress(i.pruned)}
    if run is two_ways:
        tile = "_sparse_semi_structured_tile"
        libraries = {tile: lambda i: getattr(aten, tile)(i.w, GREEDY)}
    return Op(
        partial(run, **more), lambda b: b + moved, lambda w: (ToPack(w, dtype, layout),),
        libraries=libraries, gpu_only=True,
    )  # fmt: skip


def gated_rows(name: str, run: Function, activation: Function) -> dict[str, Op]:
    """A gated activation, alone and with its backward pass."""
    plain = partial(gated, activation=activation)
    both = Op(gradients(run), lambda b: 4 * b, leaf_and_gradient, plain, gradients)
    return {name: Op(run, lambda b: 1.5 * b, plain=plain), f"{name}, forward and backward": both}


OPS = {
    "nm_mask": Op(ck.nm_mask, lambda b: b + 1, plain=compared),
    "nm_mask, dim 0": Op(partial(ck.nm_mask, dim=0), lambda b: b + 1, gpu_only=True),
    "nm_mask, 2:8": Op(partial(ck.nm_mask, n=2, m=8), lambda b: b + 1, gpu_only=True),
    "double_prune_mask": Op(
        ck.double_prune_mask, lambda b: b + 1, prepare=lambda w: (w * ck.nm_mask(w),)
    ),
    "transposable_mask24": Op(ck.transposable_mask24, lambda b: b + 1),
    "transposable_mask24, greedy": Op(
        partial(ck.transposable_mask24, algorithm="greedy"), lambda b: b + 1, gpu_only=True
    ),
    "soft_threshold24": Op(ck.soft_threshold24, lambda b: 2 * b, plain=compared_soft),
    "mvue24": Op(ck.mvue24, lambda b: 2 * b, prepare=with_key(0)),
    "mvue24, dim 0": Op(partial(ck.mvue24, dim=0), lambda b: 2 * b, prepare=with_key(0)),
    "mvue24, odd offset": Op(ck.mvue24, lambda b: 2 * b, prepare=with_key(3), gpu_only=True),
    "masked_decay_": Op(
        partial(ck.masked_decay_, alpha=0.1), lambda b: 3 * b + 1,
        prepare=lambda w: (torch.zeros_like(w), w, ck.nm_mask(w)),
        plain=lambda grad, w, mask: grad.add_(torch.where(mask, 0.0, 0.1 * w)),
    ),
    "fake_fp8": Op(partial(ck.fake_fp8, fmt="e4m3"), lambda b: 3 * b, plain=through_e4m3),
    "quantize_fp8": Op(
        partial(ck.quantize_fp8, fmt="e4m3"), lambda b: 2 * b + 1,
        plain=lambda w: e4m3_codes(w)[0], gpu_only=True,
    ),
    **gated_rows("geglu", ck.geglu, partial(F.gelu, approximate="tanh")),
    **gated_rows("swiglu", ck.swiglu, F.silu),
    "compress_nm": Op(ck.compress_nm, lambda b: 1.5 * b + 1 / 8, prepare=with_bits),
    "expand_nm": Op(
        ck.expand_nm, lambda b: 1.5 * b + 1 / 8,
        prepare=lambda w: (ck.compress_nm(*with_bits(w)), with_bits(w)[1]),
    ),
    "check24": Op(ck.check24, lambda b: b),
    "flip_rate": Op(
        ck.flip_rate, lambda b: 2, prepare=lambda w: (ck.nm_mask(w), ~ck.nm_mask(w))
    ),
    "pack, magnitude": packer(one_way, 1.125, source="magnitude"),
    "pack, soft threshold and scale": packer(one_way, 1.125, source="soft"),
    "pack, soft threshold and scale, fp8": packer(one_way, 0.625, FP8, source="soft"),
    "pack, given mask": packer(one_way, 2.125, source="mask"),
    "pack both ways, given mask": packer(two_ways, 3.25),
    "pack both ways, exact search": packer(two_ways, 2.25, searched=True),
    "pack sample of a gradient": packer(sample, 1.125),
    "pack, given mask, for our own kernels": packer(one_way, 2.125, source="mask", layout=OWN),
    "pack both ways, given mask, for our own kernels": packer(two_ways, 3.25, layout=OWN),
    "pack sample of a gradient, for our own kernels": packer(sample, 1.125, layout=OWN),
    "step, decay, pack both ways": optimizer_step(Rule(alpha=ALPHA), both=True),
    "step, decay, exact search, pack both ways": optimizer_step(
        Rule(alpha=ALPHA, choose="exact"), both=True
    ),
    "step, greedy search, pack both ways": optimizer_step(Rule(choose="greedy"), both=True),
    "step, decay, mask by rows, pack": optimizer_step(Rule(alpha=ALPHA, choose="rows")),
    "step, soft threshold and scale, pack": optimizer_step(Rule(source="soft")),
}  # fmt: skip
