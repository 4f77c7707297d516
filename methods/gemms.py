"""The three GEMMs of a linear layer, with a place for sparsity in each.

Shapes: T tokens, X [T, in], W [out, in], Y [T, out]; leading dims of X are flattened into T.

    Y  = X Wf^T + b      forward    Wf: the forward operand (2:4 along `in`)
    dX = dY Wb           dgrad      Wb: the backward operand
    dW = S(dY)^T X       wgrad      S: identity, or an unbiased 2:4 sample of groups of four
                                    consecutive tokens (MVUE, FST section 3.2)

A method chooses the operands; they are prepared once per optimizer step, so that a micro-batch
pays for nothing but its three products. dW flows unchanged to the dense master weight
(straight-through: not masked, not scaled). The bias gradient is the plain sum of dY.

FP8 is simulated as in S-STE (section 5): each operand of each product is quantised with one
scale per tensor and the product is taken in fp32. This is about numerics; it saves no time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from common_kernels import fake_fp8, mvue24


@dataclass(frozen=True)
class Fp8Formats:
    """FP8 format of each kind of operand, `e4m3` or `e5m2`."""

    forward: str  # X and W in the forward product
    gradient: str  # dY in both backward products
    backward: str  # W in dgrad, X in wgrad


FP8 = {
    "off": None,
    # S-STE: both operands of a product share a format, so the backward pass is all e5m2.
    "paper": Fp8Formats(forward="e4m3", gradient="e5m2", backward="e5m2"),
    # The usual recipe of FP8 training: only gradients need the range of e5m2.
    "hybrid": Fp8Formats(forward="e4m3", gradient="e5m2", backward="e4m3"),
}


class _SparseLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, forward_operand, backward_operand, bias, key, mvue, fp8):
        ctx.mvue, ctx.fp8, ctx.weight_dtype = mvue, fp8, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        if backward_operand is None:
            backward_operand = forward_operand
        if fp8 is None:
            ctx.save_for_backward(x, backward_operand, key)
            return F.linear(x, forward_operand, None if bias is None else bias.to(x.dtype))
        with torch.autocast(x.device.type, enabled=False):
            x_forward = fake_fp8(x.float(), fp8.forward)
            # With one format for both passes X is quantised once.
            x_saved = x_forward if fp8.backward == fp8.forward else x
            ctx.save_for_backward(x_saved, backward_operand, key)
            bias = None if bias is None else bias.float()
            y = F.linear(x_forward, forward_operand, bias)
            # A `to` that changes nothing, as the output, makes torch.compile of torch 2.11 drop
            # this function's backward pass without a word.
            return y if y.dtype == x.dtype else y.to(x.dtype)

    @staticmethod
    def backward(ctx, grad_y):
        with torch.autocast(grad_y.device.type, enabled=False):
            return _SparseLinear._backward(ctx, grad_y)

    @staticmethod
    def _backward(ctx, grad_y):
        x, backward_operand, key = ctx.saved_tensors
        fp8 = ctx.fp8
        dy = grad_y.reshape(-1, grad_y.shape[-1])
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            dy_dgrad = dy if fp8 is None else fake_fp8(dy.float(), fp8.gradient)
            grad_x = (dy_dgrad @ backward_operand).to(grad_y.dtype)
            grad_x = grad_x.reshape(*grad_y.shape[:-1], backward_operand.shape[1])
        if ctx.needs_input_grad[1]:
            sample = sample_tokens(dy, key, ctx.mvue) if ctx.mvue else dy
            x2d = x.reshape(-1, x.shape[-1])
            if fp8 is not None:
                sample = fake_fp8(sample.float(), fp8.gradient)
                if fp8.backward != fp8.forward:
                    x2d = fake_fp8(x2d.float(), fp8.backward)
            grad_weight = (sample.t() @ x2d).to(ctx.weight_dtype)
        if ctx.needs_input_grad[4]:
            grad_bias = dy.sum(0).to(ctx.bias_dtype)
        return grad_x, grad_weight, None, None, grad_bias, None, None, None


def sample_tokens(dy: Tensor, key: Tensor, design: str) -> Tensor:
    """Unbiased 2:4 sample of dY [T, out] along its tokens, without a transposed copy.

    The groups are numbered over the whole global batch, where micro-batch `key[1]` follows
    `key[1]` others of its own size. So the bits depend neither on how a batch is cut into equal
    micro-batches nor on the number of ranks that share it (if T is a multiple of 4). Unequal
    micro-batches, and a layer that is used twice in one forward pass, can see the same bits
    twice: each sample is unbiased all the same.
    """
    tokens, out = dy.shape
    padding = -tokens % 4
    if padding:
        dy = F.pad(dy, (0, 0, 0, padding))
    offset = key[1] * (dy.shape[0] // 4 * out)
    return mvue24(dy, key[0], offset, design=design, dim=0)[:tokens]


def sparse_linear(
    x: Tensor,
    weight: Tensor,
    forward_operand: Tensor,
    backward_operand: Tensor | None,
    bias: Tensor | None,
    key: Tensor,
    mvue: str | None = None,
    fp8: Fp8Formats | None = None,
) -> Tensor:
    """`x` [..., in] times the forward operand, with the backward pass of the module docstring.

    Args:
        weight: dense master weight [out, in]; it only receives dW.
        forward_operand, backward_operand: [out, in], in x's dtype (fp32 when `fp8` is set);
            None for the latter means the former.
        bias: [out] or None.
        key: int64 [2], (Philox seed of this layer and step, index of the micro-batch in the
            global batch).
        mvue: design of the sample of dY (`exact`, `sequential`), or None for the dense product.
        fp8: formats of the simulated FP8 products, or None.
    """
    return _SparseLinear.apply(x, weight, forward_operand, backward_operand, bias, key, mvue, fp8)
