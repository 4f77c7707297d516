"""The products of a feed-forward network whose hidden activations are 2:4 (act24), as one
operation: methods/act24.py has the formulas.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common_kernels.matmul import mm24, sample_mm24
from common_kernels.pack import check_form
from common_kernels.pack.operands import MULTIPLE, fill_up, sample_pack24
from common_kernels.relu24 import relu24, relu24_backward, relu24_codes, relu24_packed

from .fp8_gemms import quantized_gradient, quantized_input, weight_gradient
from .gemms import groups_of, sample_tokens, without_autocast
from .operands import Fp8, flat, save, saved, with_leading_dims


class FeedForward(torch.autograd.Function):
    """x [..., in] -> [..., out], and the sums of H' and H (fp32 [2]) if `measures`, else [0]. w1
    [hidden, in], w2 [out, hidden] and biases or None are of x's dtype. layouts: of H' and of dZ,
    packed; "" for a dense product. up, down: `Linear.in_fp8` of both for FP8 units, else (). With
    them w1 and w2 are the master weights, of which only the gradients are made here. sampled: for
    sums over a sample of the tokens the number of features that are not sampled, the layouts of
    dZ's and of H's sample, and two keys; else ()."""

    @staticmethod
    def forward(ctx, x, w1, b1, w2, b2, prune, layouts, measures, up, down, sampled):
        given, dtype = flat(x), torch.float8_e4m3fn if up else x.dtype
        tokens, forms = len(given), [check_form((0, 0), dtype, one) for one in layouts if one]
        packs = bool(forms) or any(sampled[1:3])
        padding = -tokens % math.lcm(MULTIPLE if packs else 1, *(form.rows for form in forms))
        given = fill_up(given, padding)
        if up:
            (fprop, dgrad, formats, *amax), (fprop2, dgrad2, formats2, *amax2) = up, down
            codes, given, scale = quantized_input(given, formats, True, *amax)
            z = fprop.linear(codes, b1, x.dtype)
            z[tokens:] = 0  # else b1 would count for the scale of H'
            if layouts[0]:
                h, codes, kept = packed_codes(z, None, formats2.fprop, layouts[0], *amax2)
            else:
                h = relu24(z)
                codes, kept, _ = quantized_input(h, formats2, True, *amax2)
            y = fprop2.linear(codes, b2, x.dtype)
            y = y[:tokens].clone() if padding else y
            save(ctx, dgrad, given, kept, h, *dgrad2[:2], scale, codes.scale, amax[0], amax2[0])
            # What was seen is not saved by autograd: it changes before the backward pass.
            ctx.own = formats, amax[1], formats2, amax2[1], w1.dtype, w2.dtype
        else:
            z = F.linear(given, w1, b1)
            if padding:
                z[tokens:] = 0  # else b1 would enter the sample's last group
            if layouts[0]:
                h, packed = relu24_packed(z, layouts[0])
                y = mm24(packed, w2, transposed=True)
                y = y[:tokens].clone() if padding else y
                y = y if b2 is None else y.add_(b2)
            else:
                h = relu24(z, prune)
                y = F.linear(h[:tokens], w2, b2)
            ctx.save_for_backward(given, w1, w2, h, *sampled[3:])
        sums = sums_of(z[:tokens], h[:tokens]) if measures else y.new_empty(0)
        ctx.mark_non_differentiable(sums)
        ctx.fp8, ctx.padding, ctx.layout, ctx.like = bool(up), padding, layouts[1], x.shape
        ctx.sampled = sampled[:3]
        return with_leading_dims(y, x), sums

    @staticmethod
    def backward(ctx, dy, _):
        needs, dx = ctx.needs_input_grad, None
        with without_autocast(dy):
            dy = fill_up(flat(dy), ctx.padding)
            if ctx.fp8:
                dz, dx, dw1, dw2 = gradients_in_fp8(ctx, dy, needs)
            else:
                given, w1, w2, h, *keys = ctx.saved_tensors
                dz, packed = relu24_backward(dy @ w2, h, ctx.layout)
                if needs[0]:
                    dx = dz @ w1 if packed is None else mm24(packed, w1)
                dw1 = dw2 = None
                if ctx.sampled:
                    tokens, (count, *own) = len(h) - ctx.padding, ctx.sampled
                    # Some tokens are enough, of all positions in sequences of a power of 2.
                    counts = (h[:tokens:17] != 0).sum(0, dtype=torch.int32)
                    dense = counts.argsort(descending=True)[:count].sort().values
                    if needs[1]:
                        dw1 = of_a_sample(dz, given, tokens, keys[0], own[0], dense)
                    if needs[3]:
                        dw2 = of_a_sample(h, dy, tokens, keys[1], own[1], dense, transposed=True)
                else:
                    dw1 = dz.t() @ given if needs[1] else None
                    dw2 = dy.t() @ h if needs[3] else None
            if dx is not None:
                dx = dx[: len(dx) - ctx.padding].view(ctx.like)
            db1, db2 = (g.sum(0) if n else None for g, n in ((dz, needs[2]), (dy, needs[4])))
        return dx, dw1, db1, dw2, db2, *(None,) * 6


def of_a_sample(
    a: Tensor, b: Tensor, tokens: int, key: Tensor, layout: str, dense: Tensor,
    transposed: bool = False,
) -> Tensor:  # fmt: skip
    """a^T b [features, n], or its transpose, where an unbiased 2:4 sample along the tokens takes
    the place of a [T, features], but in the features `dense`. After the first `tokens` come rows of
    padding, which draw no random bits. layout: of the sample, packed."""
    product: Tensor
    stride = groups_of(a[:tokens])
    if layout and transposed:
        packed = sample_pack24(a, key, stride, layout=layout)
        product = mm24(packed, b, result_transposed=True)
    elif layout:
        product = sample_mm24(a, b, key, stride, layout=layout)
    else:
        a, b = a[:tokens], b[:tokens]
        sample = sample_tokens(a, key, "exact")
        product = b.t() @ sample if transposed else sample.t() @ b
    if not len(dense):
        return product
    exact = a.index_select(1, dense)
    if transposed:
        return product.index_copy_(1, dense, b.t() @ exact)
    return product.index_copy_(0, dense, exact.t() @ b)


def gradients_in_fp8(ctx: Any, dy: Tensor, needs: tuple[bool, ...]) -> tuple[Any, ...]:
    """dZ, dX, dW1 and dW2."""
    dgrad, given, kept, h, w2, w2_scale, scale, scale2, amax, amax2 = saved(ctx)
    formats, seen, formats2, seen2, dtype, dtype2 = ctx.own
    codes, turned = quantized_gradient(dy, formats2, True, amax2, seen2)
    dh = Fp8(w2, w2_scale, True).grad(codes, dy.dtype)
    dw2 = weight_gradient(codes, turned, kept, scale2, True, dtype2) if needs[3] else None
    if ctx.layout:
        dz, codes, turned = packed_codes(dh, h, formats.gradient, ctx.layout, amax, seen)
    else:
        dz = relu24_backward(dh, h)[0]
        codes, turned = quantized_gradient(dz, formats, True, amax, seen)
    dw1 = weight_gradient(codes, turned, given, scale, True, dtype) if needs[1] else None
    return dz, dgrad.grad(codes, dy.dtype), dw1, dw2


def packed_codes(
    x: Tensor, h: Tensor | None, fmt: str, layout: str, amax: Tensor | None, seen: Tensor | None
) -> tuple[Tensor, Fp8, Tensor]:
    """H' from Z, or dZ from dH and H', with its packed codes and those of its transpose."""
    place = 0 if h is None else 1
    scaling = (None if t is None else t[place] for t in (amax, seen))
    out, packed, turned, scale = relu24_codes(x, h, fmt, layout, *scaling)
    return out, Fp8(packed.buffer, scale, True, packed.shape, layout), turned


def sums_of(z: Tensor, h: Tensor) -> Tensor:
    """The sums of H' and H, fp32 [2]."""
    return torch.stack([h.float().sum(), z.float().relu().square().sum()])
