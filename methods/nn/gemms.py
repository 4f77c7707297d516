"""The three GEMMs of a linear layer, with a place for sparsity in each.

Shapes: T tokens, X [T, in], W [out, in], Y [T, out]; leading dims of X are flattened into T.

    fprop    Y  = X Wf^T + b      Wf: the operand of fprop (2:4 along `in`)
    dgrad    dX = dY Wb           Wb: the operand of dgrad
    wgrad    dW = S(dY)^T X       S: identity, or an unbiased 2:4 sample of groups of four
                                  consecutive tokens (MVUE, FST section 3.2)

A method chooses the operands; they are prepared once per optimizer step, so that a micro-batch
pays for nothing but its three products. dW flows unchanged to the dense master weight
(straight-through: not masked, not scaled). The bias gradient is the plain sum of dY.

Each product is dense, with its operand masked, or, where the operand is 2:4 along the summed dim,
a sparse one of cuSPARSELt with the operand in packed form (`Products`).

fp8_gemms.py has the three products in FP8.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from common_kernels import mvue24
from common_kernels.matmul import Problem, blob_linear, blob_matmul, is_faster, unavailable
from common_kernels.prepare import MULTIPLE, TOKENS, sample_pack24

MATMULS = ("auto", "cusparselt", "dense")
MATMUL_VARIABLE = "SPARSE24_MATMUL"


@dataclass(frozen=True)
class Products:
    """Which of the three products run on 2:4 operands in packed form.

    fprop: its operand is the blob of Wf. dgrad: its operand is the blob of Wb^T. wgrad: the sample
    of dY is packed. All others are dense. fp8: on FP8 units (fp8_gemms.py).
    """

    fprop: bool = False
    dgrad: bool = False
    wgrad: bool = False
    fp8: bool = False


DENSE = Products()


def choose_products(
    sparse: Products,
    shape: tuple[int, int],
    biased: bool,
    dtype: torch.dtype,
    device: torch.device,
    tokens: int,
    matmul: str | None,
) -> Products:
    """Which products shall run sparse, of those that `sparse` says have a 2:4 operand.

    With `sparse.fp8` they run on FP8 units wherever these are, whatever `matmul` says, for that is
    another arithmetic and no matter of speed.

    Args and errors: as for `base.Method.accelerate`; shape (out, in), bias, dtype and device of one
    layer.
    """
    matmul = matmul or os.environ.get(MATMUL_VARIABLE) or "auto"
    if matmul not in MATMULS:
        raise ValueError(f"matmul={matmul!r}: choose one of {', '.join(MATMULS)}")
    if tokens < 1:
        raise ValueError(f"tokens={tokens}; give the number of tokens in a micro-batch")
    if sparse == DENSE or (matmul == "dense" and not sparse.fp8):
        return DENSE
    rows, columns = shape
    forward = backward = result = out_dtype = dtype
    if sparse.fp8:
        forward, backward = torch.float8_e4m3fn, torch.float8_e5m2
        result, out_dtype = torch.bfloat16, torch.float32
    reason = unavailable("cusparselt", device, forward)
    if reason is None and (rows % MULTIPLE or columns % MULTIPLE):
        reason = f"a weight [{rows}, {columns}] is no multiple of {MULTIPLE} in both dims"
    if reason and matmul == "cusparselt":
        raise RuntimeError(
            f"matmul='cusparselt': {reason}; convert(model, dtype=torch.bfloat16) gives products a "
            "dtype; or choose auto or dense"
        )
    if reason:
        return DENSE
    if matmul == "cusparselt":
        return sparse
    if device.type != "cuda":
        return DENSE  # an emulated product is slower
    if matmul == "dense":
        return Products(fp8=True)
    multiples = (16, MULTIPLE) if sparse.fp8 else (8, TOKENS)
    linear, summed = (-(-tokens // multiple) * multiple for multiple in multiples)
    biased = biased and not sparse.fp8
    problems = {
        "fprop": Problem(rows, columns, linear, forward, result, True, True, biased),
        "dgrad": Problem(columns, rows, linear, dtype, dtype, True, True),
        "wgrad": Problem(rows, summed, columns, backward, out_dtype, sparse.fp8, False),
    }
    faster = {
        name: getattr(sparse, name) and is_faster(problem, device)
        for name, problem in problems.items()
    }
    return replace(sparse, **faster)


class _SparseLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, fprop_operand, dgrad_operand, bias, key, mvue, products):
        ctx.mvue, ctx.products = mvue, products
        ctx.weight_dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype
        if dgrad_operand is None:
            dgrad_operand = fprop_operand
        ctx.save_for_backward(x, dgrad_operand, key)
        return fprop(x, fprop_operand, bias, products)

    @staticmethod
    def backward(ctx, grad_y):
        with torch.autocast(grad_y.device.type, enabled=False):
            return _SparseLinear._backward(ctx, grad_y)

    @staticmethod
    def _backward(ctx, grad_y):
        x, dgrad_operand, key = ctx.saved_tensors
        dy, x2d = grad_y.reshape(-1, grad_y.shape[-1]), x.reshape(-1, x.shape[-1])
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            packed = ctx.products.dgrad
            grad_x = blob_linear(dgrad_operand, dy) if packed else dy @ dgrad_operand
            grad_x = grad_x.reshape(x.shape)
        if ctx.needs_input_grad[1] and ctx.products.wgrad:
            sample = sample_pack24(dy, key, groups_of(dy))
            grad_weight = blob_matmul(sample, x2d).to(ctx.weight_dtype)
        elif ctx.needs_input_grad[1]:
            sample = sample_tokens(dy, key, ctx.mvue) if ctx.mvue else dy
            grad_weight = (sample.t() @ x2d).to(ctx.weight_dtype)
        if ctx.needs_input_grad[4]:
            grad_bias = dy.sum(0).to(ctx.bias_dtype)
        return grad_x, grad_weight, None, None, grad_bias, *(None,) * 3


def fprop(
    x: Tensor, operand: Tensor | None, bias: Tensor | None, products: Products
) -> Tensor:
    """Y = X Wf^T + b."""
    assert operand is not None
    bias = None if bias is None else bias.to(x.dtype)
    if not products.fprop:
        return F.linear(x, operand, bias)
    y = blob_linear(operand, x.reshape(-1, x.shape[-1]), bias)
    return with_leading_dims(y, x)


def under_autocast(x: Tensor) -> Tensor:
    """x in the dtype that autocast, where it is on, gives to products."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def with_leading_dims(y: Tensor, x: Tensor) -> Tensor:
    """y [T, out] with the leading dims of x [..., in].

    Not as a view: autograd refuses to change one in place where it comes out of a Function.
    """
    return torch.ops.aten._unsafe_view(y, [*x.shape[:-1], y.shape[-1]])


def groups_of(dy: Tensor) -> int:
    """Groups of four tokens in dY [T, out], the last of them filled up."""
    return -(-dy.shape[0] // 4) * dy.shape[1]


def sample_tokens(dy: Tensor, key: Tensor, design: str) -> Tensor:
    """Unbiased 2:4 sample of dY [T, out] along its tokens, without a transposed copy.

    The groups are numbered over the whole global batch, where micro-batch `key[1]` follows
    `key[1]` others of its own size. So the bits depend neither on how a batch is cut into equal
    micro-batches nor on the number of ranks that share it (if T is a multiple of 4). Unequal
    micro-batches, and a layer that is used twice in one forward pass, can see the same bits
    twice: each sample is unbiased all the same.
    """
    tokens = len(dy)
    if tokens % 4:
        dy = F.pad(dy, (0, 0, 0, -tokens % 4))
    return mvue24(dy, key[0], key[1] * groups_of(dy), design=design, dim=0)[:tokens]


def sparse_linear(
    x: Tensor,
    weight: Tensor,
    fprop_operand: Tensor | None,
    dgrad_operand: Tensor | None,
    bias: Tensor | None,
    key: Tensor,
    mvue: str | None = None,
    products: Products = DENSE,
) -> Tensor:
    """`x` [..., in] times the operand of fprop, with the backward pass of the module docstring.

    Args:
        weight: dense master weight [out, in]; it only receives dW.
        fprop_operand, dgrad_operand: [out, in], in x's dtype, or blobs as `products` says;
            None for the latter means the former.
        bias: [out] or None.
        key: int64 [2], (Philox seed of this layer and step, index of the micro-batch in the
            global batch).
        mvue: design of the sample of dY (`exact`, `sequential`), or None for the dense product.
        products: which products are sparse; wgrad then needs mvue=`exact`.
    """
    return _SparseLinear.apply(
        x, weight, fprop_operand, dgrad_operand, bias, key, mvue, products
    )
