"""Linear layers whose weight or input is pruned in each forward pass.

A product with the pruned matrix runs sparse where the GPU has sparse products and that one was
measured to be faster (acceleration.py); else the pruned matrix is dense.
"""

import functools
import math
import os
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common_kernels import nm_mask, transposable_mask24
from common_kernels.matmul import mm24
from common_kernels.pack import BUFFERED, VENDOR, Packed24, check_form
from common_kernels.pack.operands import MULTIPLE, fill_up, pack24_, pack_both24_, tokens_multiple

from .acceleration import MATMUL_VARIABLE, choose
from .gemms import Products, sparse_linear, without_autocast
from .operands import Dense, Packed, flat, with_leading_dims

COMPILED_TOKENS = 8192  # for which a compiled pass, whose tokens may vary, chooses its products
OF_WEIGHT = Products(fprop=True, dgrad=True)
OF_INPUT = Products(fprop=True, wgrad=True, of_input=True)
OF_ROWS = Products(fprop=True, of_input=True)
# The layouts in which a pruned matrix and its transpose are packed; empty where they are not.
Pair = tuple[str, str]


def of_input(algorithm: str) -> Products:
    """The products with a 2:4 operand if inputs are pruned by `algorithm`."""
    return OF_ROWS if algorithm == "rows" else OF_INPUT


def pair_of(products: Products) -> Pair:
    """The layouts of the pruned matrix and of its transpose."""
    return products.layout("fprop"), products.layout("wgrad" if products.of_input else "dgrad")


def layouts_for(sparse: Products, x: Tensor, weight: Tensor) -> Pair:
    """The layouts for x [..., in] and `weight` [out, in], if the products in `sparse` may be packed
    and are where that is faster. What was not measured before is measured now."""
    tokens = COMPILED_TOKENS
    if not torch.compiler.is_compiling():
        tokens = 1 << max(x.numel() // x.shape[-1] - 1, 0).bit_length()
    given = sparse, tuple(weight.shape), x.dtype, x.device, tokens
    along, across = _layouts(*given).split()
    return along.strip("-"), across.strip("-")


def _layouts(*given: Any) -> str:
    """Both layouts in one string, which torch.compile takes for a constant; `-` for none."""
    return " ".join(one or "-" for one in pair_of(_chosen(*given, os.environ.get(MATMUL_VARIABLE))))


# torch.compiler.assume_constant_result without the import of torch._dynamo, which takes a second.
_layouts._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _chosen(
    sparse: Products,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    tokens: int,
    matmul: str | None,
) -> Products:
    products, choices = choose(sparse, shape, False, dtype, device, tokens, matmul)
    if device.type == "cuda" and not products.fprop:
        reason = choices["fprop"].reason.partition(": ")[0]
        warnings.warn(f"a pruned linear {list(shape)} is multiplied dense: {reason}", stacklevel=5)
    return products


@torch.no_grad()
def prune(
    matrix: Tensor, dtype: torch.dtype, algorithm: str, layouts: Pair, dense: bool
) -> tuple[Packed24 | None, Packed24 | None, Tensor | None]:
    """`matrix` [rows, columns] under its mask, in `dtype`: packed, its transpose packed, and dense.
    What is not wanted is None.

    Args:
        algorithm: `greedy`, `exact` or `rows`, as in `methods.semi_sparse`; `rows`: no transpose.
    """
    (along, across), shape = layouts, (matrix.shape[0], matrix.shape[1])
    packed = transposed = mask = None
    if along or across:  # a transpose is packed together with the matrix
        unused = VENDOR if across == VENDOR else BUFFERED  # serves any shape
        packed = Packed24.empty(shape, dtype, matrix.device, along or unused)
    if across:
        transposed = Packed24.empty(shape[::-1], dtype, matrix.device, across)
    if algorithm == "rows":
        mask = nm_mask(matrix)
    elif dense or not across or algorithm != "exact":  # else the packer finds the mask
        mask = transposable_mask24(matrix, algorithm)
    if packed is not None and transposed is not None:
        pack_both24_(packed, transposed, matrix, mask)
    elif packed is not None:
        pack24_(packed, matrix, "mask", mask)
    whole = None if mask is None or not dense else torch.where(mask, matrix, 0.0).to(dtype)
    return packed if along else None, transposed, whole


def linear_of_pruned_weight(
    x: Tensor, weight: Tensor, bias: Tensor | None, algorithm: str
) -> Tensor:
    """x [..., in] times `weight` [out, in] under its transposable mask. The weight's gradient
    passes straight through."""
    trains = torch.is_grad_enabled()
    along, across = layouts_for(OF_WEIGHT, x, weight)
    layouts = along, across if trains else ""
    dense = not along or (trains and not across)
    *both, matrix = prune(weight.detach(), x.dtype, algorithm, layouts, dense)
    held: Any = matrix
    fprop, dgrad = (
        Packed(own.buffer, own.shape, own.dtype, own.layout) if own else Dense(held) for own in both
    )
    if not trains:
        return fprop.linear(x, bias)
    return sparse_linear(x, weight, fprop, dgrad, bias, None, None, "")


class _OfPrunedInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, matrix, bias, algorithm, layouts, trains):
        given = flat(x)
        tokens = len(given)
        along, across = layouts if tokens else ("", "")  # the library multiplies no empty matrix
        across = across if trains else ""
        multiple = MULTIPLE if along or across else 4
        if along:
            multiple = math.lcm(multiple, check_form((0, 0), x.dtype, along).rows)
        if across:
            multiple = math.lcm(multiple, tokens_multiple(across, x.dtype))
        dense = not along or (trains and not across)
        given = fill_up(given, -tokens % multiple)
        packed, transposed, pruned = prune(given, x.dtype, algorithm, (along, across), dense)
        ctx.bias_dtype = None if bias is None else bias.dtype
        bias = None if bias is None else bias.to(x.dtype)
        if packed is None:
            assert pruned is not None
            y = F.linear(pruned[:tokens], matrix, bias)
        else:
            y = mm24(packed, matrix, transposed=True)[:tokens]
            y = y.clone() if bias is None else y + bias
        if not trains:
            pruned = None
        kept = pruned if transposed is None else transposed.buffer
        ctx.save_for_backward(matrix, kept)
        ctx.shape, ctx.layout, ctx.weight_dtype = given.shape, across, weight.dtype
        return with_leading_dims(y, x)

    @staticmethod
    def backward(ctx, dy):
        matrix, kept = ctx.saved_tensors
        dx = dw = db = None
        with without_autocast(dy):
            grad = flat(dy)
            if ctx.needs_input_grad[0]:
                dx = Dense(matrix).grad(dy)
            if ctx.needs_input_grad[1]:
                if ctx.layout:
                    shape = ctx.shape[::-1]
                    packed = Packed24(kept, shape, dy.dtype, ctx.layout)
                    dw = mm24(packed, grad, result_transposed=True)
                else:
                    dw = grad.t() @ kept[: len(grad)]
                dw = dw.to(ctx.weight_dtype)
            if ctx.needs_input_grad[3]:
                db = grad.sum(0).to(ctx.bias_dtype)
        return dx, dw, None, db, None, None, None


def linear_of_pruned_input(
    x: Tensor,
    weight: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    algorithm: str,
    layouts: Pair | None = None,
) -> Tensor:
    """x [..., in], pruned, times `matrix` [out, in]. The input's gradient passes straight through.

    Four tokens that are consecutive in memory are the rows of a tile; zeros fill up the last one.

    Args:
        weight: [out, in], receives the gradient of `matrix`, which is the same matrix in x's dtype.
        algorithm: as for `prune`.
        layouts: None to choose them.
    """
    if layouts is None:
        layouts = layouts_for(of_input(algorithm), x, weight)
    trains = torch.is_grad_enabled() and weight.requires_grad
    return _OfPrunedInput.apply(x, weight, matrix, bias, algorithm, layouts, trains)
