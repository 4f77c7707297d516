"""The three GEMMs of a linear layer, each of which can be sparse.

Shapes: T tokens, X [T, in], W [out, in], Y [T, out]; leading dims of X are flattened into T.

    fprop    Y  = X Wf^T + b      Wf: the operand of fprop (2:4 along `in`)
    dgrad    dX = dY Wb           Wb: the operand of dgrad
    wgrad    dW = S(dY)^T X       S: identity, or an unbiased 2:4 sample of groups of four
                                  consecutive tokens (MVUE, FST section 3.2)

A method chooses the operands. They are prepared once per optimizer step, so that a micro-batch only
pays for its three products. dW goes unchanged to the dense master weight (straight-through: neither
masked nor scaled). The bias gradient is the plain sum of dY.

An operand is `Dense`, `Packed` if it is 2:4 along the summed dim and the sparse product is faster
(see `Products`), or `Fp8` (operands.py). fp8_gemms.py has the three products in FP8.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common_kernels.matmul import cuda, sample_mm24
from common_kernels.mvue import sampled24
from common_kernels.pack import BUFFERED

from .operands import flat, save, saved


@dataclass(frozen=True)
class Layouts:
    """The layouts of the packed operands of the three products."""

    fprop: str = BUFFERED
    dgrad: str = BUFFERED
    wgrad: str = BUFFERED


@dataclass(frozen=True)
class Products:
    """Which of a layer's three products run on packed operands; the others are dense.

    fprop: Wf is packed. dgrad: Wb^T is packed. wgrad: the transposed sample of dY is packed. fp8:
    the operands are codes, and FP8 units multiply them (fp8_gemms.py). layouts: the layouts of the
    packed operands, which decide between cuSPARSELt and our own kernels. repack: dgrad's operand is
    packed in each backward pass instead of kept from step to step. of_input: X is 2:4 instead of W,
    in fprop along `in`; in dgrad dY is, along `out`; in wgrad, along the tokens, X is, or dY if
    fprop is dense.
    """

    fprop: bool = False
    dgrad: bool = False
    wgrad: bool = False
    fp8: bool = False
    layouts: Layouts = field(default_factory=Layouts)
    repack: bool = False
    of_input: bool = False

    def layout(self, name: str) -> str:
        """The layout of a product's packed operand; empty if it is dense."""
        return getattr(self.layouts, name) if getattr(self, name) else ""

    def kernels(self, name: str) -> str:
        """The kernels that run a product: `cusparselt`, `cuda` (our own), or empty if dense."""
        return kernels_of(self.layout(name))


DENSE = Products()


def kernels_of(layout: str) -> str:
    """The kernels that take a packed matrix in this layout; empty for a dense one."""
    return "cuda" if layout in cuda.LAYOUTS else layout and "cusparselt"


class _SparseLinear(torch.autograd.Function):
    """`x` [..., in] times the operand of fprop, with the backward pass of the module docstring.

    weight: dense master weight [out, in], which only receives dW. fprop, dgrad: operands in x's
    dtype. bias: [out] or None. key: int64 [2], (Philox seed of this layer and step, index of the
    micro-batch in the global batch); None if nothing is sampled. mvue: design of the sample of dY
    (`exact`, `sequential`), or None for the dense product. packs_sample: the layout of wgrad's
    packed sample, which needs mvue `exact`; empty if the sample is not packed.
    """

    @staticmethod
    def forward(ctx, x, weight, fprop, dgrad, bias, key, mvue, packs_sample):
        ctx.mvue, ctx.packs_sample = mvue, packs_sample
        ctx.weight_dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype
        save(ctx, dgrad, x, key)
        return fprop.linear(x, bias)

    @staticmethod
    def backward(ctx, grad_y):
        dgrad, x, key = saved(ctx)
        of_x, of_weight, _, _, of_bias, *_ = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = None
        with without_autocast(grad_y):
            if of_x:
                grad_x = dgrad.grad(grad_y)
            if of_weight:
                if ctx.packs_sample:
                    stride = groups_of(grad_y)
                    grad_weight = sample_mm24(grad_y, x, key, stride, layout=ctx.packs_sample)
                else:
                    dy = flat(grad_y)
                    sample = sample_tokens(dy, key, ctx.mvue) if ctx.mvue else dy
                    grad_weight = sample.t() @ flat(x)
                grad_weight = grad_weight.to(ctx.weight_dtype)
            if of_bias:
                grad_bias = flat(grad_y).sum(0).to(ctx.bias_dtype)
        return grad_x, grad_weight, None, None, grad_bias, *(None,) * 3


sparse_linear = _SparseLinear.apply


NOTHING: AbstractContextManager[Any] = nullcontext()


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A context without autocast on x's device; one that is shared if autocast is off already,
    since switching takes as long as a launch."""
    device = x.device.type
    on = torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else NOTHING


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which products take x: autocast's if it is enabled, else x's own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def under_autocast(x: Tensor) -> Tensor:
    """x, cast to autocast's dtype if autocast is enabled."""
    dtype = autocast_dtype(x)
    return x if x.dtype == dtype else x.to(dtype)


def groups_of(dy: Tensor) -> int:
    """The number of groups of four tokens in dY [..., out]; the last one may be partial."""
    return -(-(dy.numel() // dy.shape[-1]) // 4) * dy.shape[-1]


def sample_tokens(dy: Tensor, key: Tensor, design: str) -> Tensor:
    """An unbiased 2:4 sample of dY [T, out] along its tokens, without a transposed copy.

    Groups are numbered over the whole global batch: micro-batch `key[1]` follows `key[1]` others of
    the same size. If T is a multiple of 4, the random bits therefore depend neither on how a batch
    is divided into equal micro-batches nor on the number of ranks. Micro-batches of unequal size,
    or a layer used twice in a forward pass, may get the same bits twice; samples stay unbiased.
    """
    tokens = len(dy)
    if tokens % 4:
        dy = F.pad(dy, (0, 0, 0, -tokens % 4))
    return sampled24(dy, key, groups_of(dy), design, 0)[:tokens]
