"""The three GEMMs in FP8, as S-STE has them (section 5 of the paper); notation as in gemms.py.

    GEMM   operands      paper          hybrid         hopper
    fprop  X, Wf         e4m3, e4m3     e4m3, e4m3     e4m3, e4m3
    dgrad  dY, Wb        e5m2, e5m2     e5m2, e4m3     e5m2, e4m3 (e5m2 where Wb is 2:4 along `out`)
    wgrad  S(dY), X      e5m2, e5m2     e5m2, e4m3     e5m2, e5m2 (e4m3 where dY is not sampled)

Every operand is quantised once in each format that a product needs, with one scale for a
micro-batch's whole tensor. A product of codes is divided by both scales in fp32 and rounded once.
The backward pass keeps X as codes of one byte. dY is sampled first, and the sample is quantised.

Simulated FP8 (all recipes, any device): bf16 represents every code exactly, so on a GPU the codes
are multiplied as bf16, with accumulation and result in fp32. This gives FP8's numerics but saves no
time.

FP8 units (compute capability 8.9 and later) serve `hopper`, whose formats they can multiply: in
dense products at most one operand may be e5m2, and in sparse products both have the same format.

    fprop  sparse (cuSPARSELt), or dense if faster                  result in bf16
    dgrad  dense (cuBLAS); with e5m2 sparse, or codes as bf16       result in bf16
    wgrad  sparse along the tokens, or codes as bf16 if faster      result in fp32
           dense (cuBLAS) if dY is not sampled

The results differ from the simulation of the same recipe by the FP8 units' accumulation and by the
rounding of Y and dX to bf16. To search dY for its largest magnitude only once, `hopper` gives the
sample of dY half of dY's scale instead of its own. `hopper_delayed` is `hopper` with delayed
scaling, which does not search X and dY at all (delayed.py).
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from common_kernels import quantize_fp8
from common_kernels.fp8 import fp8_numbers, fp8_numbers_and_codes
from common_kernels.fp8.cpu import codes_of
from common_kernels.fp8.operands import quantize_and_sample, quantize_both, rescale, scaled_linear
from common_kernels.matmul import mm24

from . import delayed
from .gemms import NOTHING, groups_of, sample_tokens, without_autocast
from .operands import Fp8, exact_product, flat, save, saved


@dataclass(frozen=True)
class Fp8Formats:
    """FP8 format of each kind of operand, `e4m3` or `e5m2`."""

    fprop: str  # X and W in fprop
    gradient: str  # dY in dgrad and wgrad
    dgrad: str  # W in dgrad
    wgrad: str  # X in wgrad
    on_units: bool = False  # FP8 units can multiply them; the sample of dY has half of dY's scale
    delayed: bool = False  # the scales of X and dY come from earlier steps (delayed.py)


FP8: dict[str, Any] = {
    "off": None,
    # S-STE: both operands of a product share a format, so the backward pass is all e5m2.
    "paper": Fp8Formats(fprop="e4m3", gradient="e5m2", dgrad="e5m2", wgrad="e5m2"),
    # The usual recipe of FP8 training: only gradients need the range of e5m2.
    "hybrid": Fp8Formats(fprop="e4m3", gradient="e5m2", dgrad="e4m3", wgrad="e4m3"),
    "hopper": Fp8Formats("e4m3", "e5m2", dgrad="e4m3", wgrad="e5m2", on_units=True),
}
FP8["hopper_delayed"] = replace(FP8["hopper"], delayed=True)


def recipe(name: str, both_ways: bool, samples: bool) -> Fp8Formats | None:
    """The formats of the recipe `name` in a layer; None for `off`.

    Args:
        both_ways: the weight is 2:4 along `out` as well, so dgrad can be sparse, and a sparse
            product needs both operands in one format.
        samples: wgrad takes a 2:4 sample of dY. If not, it is a dense product, in which at most one
            operand may be e5m2.
    """
    formats: Fp8Formats | None = FP8[name]
    if formats is None or not formats.on_units:
        return formats
    return replace(
        formats, dgrad="e5m2" if both_ways else "e4m3", wgrad="e5m2" if samples else "e4m3"
    )


def quantized_input(
    x: Tensor, formats: Fp8Formats, on_units: bool, amax: Tensor | None, seen: Tensor | None
) -> tuple[Fp8, Tensor, Tensor]:
    """X [..., in] quantised for fprop; for wgrad codes [T, in] (X^T's on FP8 units) and scale.

    amax, seen: as `delayed.of` gives them.
    """
    given = delayed.given(0, x, amax, seen)
    if on_units:
        codes, kept, scale, kept_scale = quantize_both(x, formats.fprop, formats.wgrad, *given)
        return Fp8(codes, scale), kept, kept_scale
    if not given:
        codes, scale, kept, kept_scale = fp8_numbers_and_codes(x, formats.fprop, formats.wgrad)
    else:
        codes, scale = kept, kept_scale = quantize_fp8(x, formats.fprop, *given)
        if formats.wgrad != formats.fprop:
            kept, kept_scale = quantize_fp8(x, formats.wgrad, *given)
    return Fp8(codes, scale), flat(kept), kept_scale


def quantized_gradient(
    dy: Tensor, formats: Fp8Formats, on_units: bool, amax: Tensor | None, seen: Tensor | None
) -> tuple[Fp8, Tensor | None]:
    """dY [..., out] quantised for dgrad, and the codes of its transpose if wgrad is a dense product
    on FP8 units (else None)."""
    given = delayed.given(1, dy, amax, seen)
    if on_units and formats.wgrad == "e4m3":
        codes, turned, scale, _ = quantize_both(dy, formats.gradient, formats.gradient, *given)
        return Fp8(codes, scale), turned
    if on_units or given:
        return Fp8(*quantize_fp8(dy, formats.gradient, *given)), None
    return Fp8(*fp8_numbers(dy, formats.gradient)), None


def weight_gradient(
    dy: Fp8, turned: Tensor | None, x: Tensor, x_scale: Tensor, on_units: bool, dtype: torch.dtype
) -> Tensor:
    """dY^T X [out, in], from the results of `quantized_gradient` and `quantized_input`."""
    if turned is not None:
        return scaled_linear(turned, x, dy.scale, x_scale, dtype=torch.float32).to(dtype)
    codes = flat(dy.codes)
    product = exact_product(codes.t(), x.t()[: len(codes)] if on_units else x)
    return rescale(product, dy.scale, x_scale, dtype=dtype)


class Fp8Linear(torch.autograd.Function):
    """`x` [..., in] times the operand of fprop, with the backward pass of the module docstring.

    weight: dense master weight [out, in], which only receives dW. fprop, dgrad: codes in the given
    formats, both for FP8 units or both for the simulation. bias, key, mvue, packs_sample: as for
    `gemms.sparse_linear`. amax, seen: as `delayed.of` gives them.
    """

    @staticmethod
    def forward(ctx, x, weight, fprop, dgrad, bias, key, mvue, formats, packs_sample, amax, seen):
        ctx.mvue, ctx.formats, ctx.packs_sample = mvue, formats, packs_sample
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        ctx.on_units = fprop.on_units
        with NOTHING if fprop.on_units else without_autocast(x):  # no other operator is cast
            codes, kept, scale = quantized_input(x, formats, fprop.on_units, amax, seen)
            ctx.seen = seen  # not saved by autograd: it changes before the backward pass
            save(ctx, dgrad, kept, scale, key, amax)
            return fprop.linear(codes, bias, x.dtype)

    @staticmethod
    def backward(ctx, dy):
        dgrad, x, x_scale, key, amax = saved(ctx)
        formats, (dtype, bias_dtype) = ctx.formats, ctx.dtypes
        of_x, of_weight, _, _, of_bias, *_ = ctx.needs_input_grad
        packs_sample = ctx.packs_sample if of_weight else ""
        grad_x = grad_weight = grad_bias = turned = None
        with without_autocast(dy):
            if packs_sample:
                given = delayed.given(1, dy, amax, ctx.seen)
                own, sample, scale = quantize_and_sample(
                    dy, key, groups_of(dy), formats.gradient, *given, layout=packs_sample
                )
                codes = Fp8(own, scale)
            else:
                codes, turned = quantized_gradient(dy, formats, ctx.on_units, amax, ctx.seen)
            if of_x:
                grad_x = dgrad.grad(codes, dy.dtype)
            if packs_sample:  # the sample has half of dY's scale
                scales = codes.scale, x_scale
                grad_weight = mm24(sample, x, dtype, transposed=True, scales=scales, factor=2)
            elif of_weight:
                if ctx.mvue:
                    codes = quantized_sample(flat(dy), codes.scale, key, ctx.mvue, formats)
                grad_weight = weight_gradient(codes, turned, x, x_scale, ctx.on_units, dtype)
            if of_bias:
                grad_bias = flat(dy).sum(0).to(bias_dtype)
        return grad_x, grad_weight, None, None, grad_bias, *(None,) * 6


def quantized_sample(dy: Tensor, scale: Tensor, key: Tensor, mvue: str, formats: Fp8Formats) -> Fp8:
    """The quantised sample of dY [T, out]; `scale` is dY's scale."""
    if not formats.on_units or mvue != "exact":
        return Fp8(*fp8_numbers(sample_tokens(dy, key, mvue), formats.gradient))
    # An entry of the sample is at most twice the largest of dY.
    scale = 0.5 * scale
    return Fp8(codes_of(sample_tokens(dy.float(), key, mvue), scale, formats.gradient), scale)
