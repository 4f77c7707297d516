"""The operands that take the weight's place in a linear layer's products: `Dense`, `Packed`, `Fp8`,
and `Compressed` and `Pruned`, which each product makes from the weight and its masks.

An operand stands for a matrix A [out, in] and computes its products with T tokens:

    linear  X A^T + b   fprop
    grad    dY A        dgrad

A packed matrix is 2:4 along the summed dim, so fprop's operand holds A [out, in] and dgrad's holds
A^T [in, out]. Operands are created for each call from the tensors in a layer's buffers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from common_kernels.fp8.operands import rescale, scaled_linear
from common_kernels.matmul import linear24, mm24
from common_kernels.matmul.pruned import compressed_mm24, pruned_mm24
from common_kernels.pack import BUFFERED, Packed24


class Dense(NamedTuple):
    """A dense matrix [out, in]."""

    matrix: Tensor

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., in] -> [..., out], of one dtype."""
        return F.linear(x, self.matrix, None if bias is None else bias.to(x.dtype))

    def grad(self, dy: Tensor) -> Tensor:
        """dy [..., out] -> [..., in]."""
        dx = flat(dy) @ self.matrix
        return dx if dy.ndim == 2 else dx.view(*dy.shape[:-1], dx.shape[1])


class Packed(NamedTuple):
    """A packed 2:4 matrix, as the `buffer` of a `Packed24`. Its layout decides whether cuSPARSELt
    or our own kernels multiply it."""

    buffer: Tensor
    shape: tuple[int, int]
    dtype: torch.dtype
    layout: str = BUFFERED

    @property
    def matrix(self) -> Packed24:
        return Packed24(self.buffer, self.shape, self.dtype, self.layout)

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., in] -> [..., out], of one dtype."""
        return linear24(self, x, bias)  # not `matrix`, whose checks take as long as a launch

    def grad(self, dy: Tensor) -> Tensor:
        """dy [..., out] -> [..., in]."""
        return linear24(self, dy)


class Divided(NamedTuple):
    """A matrix of which the columns `grouped` are packed and the `others` are not, for fprop."""

    packed: Packed
    dense: Tensor  # [out, others]
    grouped: Tensor
    others: Tensor

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., in] -> [..., out], of one dtype."""
        y = self.packed.linear(x.index_select(-1, self.grouped), bias)
        flat(y).addmm_(flat(x.index_select(-1, self.others)), self.dense.t())
        return y


class Compressed(NamedTuple):
    """A 2:4 matrix as its kept `values` and two masks, which each product packs in `layout`
    (common_kernels/matmul/pruned.py)."""

    values: Tensor
    row_mask: Tensor
    column_mask: Tensor
    layout: str = BUFFERED

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., in] -> [..., out], of one dtype, by the row mask alone."""
        return compressed_mm24(x, self.values, self.row_mask, bias=bias, layout=self.layout)

    def grad(self, dy: Tensor) -> Tensor:
        """dy [..., out] -> [..., in]."""
        masks = self.row_mask, self.column_mask
        return compressed_mm24(dy, self.values, *masks, layout=self.layout)


class Pruned(NamedTuple):
    """A weight [out, in] and what prunes it, as `pruned_mm24` takes them."""

    weight: Tensor
    mask: Tensor | None
    scale: Tensor | None
    source: str
    dtype: torch.dtype
    layout: str

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., in] -> [..., out], of one dtype."""
        given = self.weight, self.source, self.mask, self.scale, bias
        return pruned_mm24(x, *given, dtype=self.dtype, layout=self.layout)

    def grad(self, dy: Tensor) -> Tensor:
        """dy [..., out] -> [..., in]."""
        given = self.weight, self.source, self.mask, self.scale
        return pruned_mm24(dy, *given, dtype=self.dtype, layout=self.layout, transposed=True)


class Fp8(NamedTuple):
    """A matrix that is approximately codes / scale, for products with another one.

    codes: [out, in], simulated codes, which may be ordinary numbers (`fp8_numbers`). On FP8 units
        codes are [out, in] for fprop and [in, out] for dgrad, or, if `shape` is given, the buffer
        of a packed matrix of that shape and `layout`; such an X or dY can be packed instead.
    scale: fp32 [].
    """

    codes: Tensor
    scale: Tensor
    on_units: bool = False
    shape: tuple[int, int] | None = None
    layout: str = BUFFERED

    def linear(self, x: Fp8, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """x [..., in] -> [..., out] in `dtype`."""
        if self.on_units:
            return self._on_units(x, bias, dtype)
        y = exact_product(flat(x.codes), self.codes.t())
        return with_leading_dims(rescale(y, x.scale, self.scale, 1.0, bias, dtype), x.codes)

    def grad(self, dy: Fp8, dtype: torch.dtype) -> Tensor:
        """dy [..., out] -> [..., in] in `dtype`."""
        if self.on_units:
            return self._on_units(dy, None, dtype)
        dx = exact_product(flat(dy.codes), self.codes)
        return with_leading_dims(rescale(dx, dy.scale, self.scale, dtype=dtype), dy.codes)

    def _on_units(self, x: Fp8, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        if x.shape is not None:
            packed: Any = Packed(x.codes, x.shape, self.codes.dtype, x.layout)
            y = mm24(packed, self.codes, torch.bfloat16, transposed=True)
            return rescale(y, x.scale, self.scale, 1.0, bias, dtype)
        if self.shape is not None:
            packed = Packed(self.codes, self.shape, x.codes.dtype, self.layout)
            return linear24(packed, x.codes, bias, dtype, scales=(x.scale, self.scale))
        y = scaled_linear(x.codes, self.codes, x.scale, self.scale, bias)
        # In torch 2.11 torch.compile silently drops the backward pass of an autograd Function that
        # returns the result of a `to` that changes nothing.
        return y if y.dtype == dtype else y.to(dtype)


Operand = Dense | Packed | Compressed | Pruned | Fp8
# The number of leading fields that are tensors.
TENSORS = {Dense: 1, Packed: 1, Compressed: 3, Pruned: 3, Fp8: 2}


def save(ctx: Any, operand: Operand | None, *tensors: Tensor | None) -> None:
    """Save an operand and tensors for the backward pass of an autograd.Function."""
    if operand is None:
        ctx.operand = None
        ctx.save_for_backward(*tensors)
        return
    count = TENSORS[type(operand)]
    ctx.operand = type(operand), count, operand[count:]
    ctx.save_for_backward(*operand[:count], *tensors)


def saved(ctx: Any) -> tuple[Any, ...]:
    """The operand and tensors that `save` saved."""
    tensors = ctx.saved_tensors
    if ctx.operand is None:
        return None, *tensors
    kind, count, rest = ctx.operand
    return kind(*tensors[:count], *rest), *tensors[count:]


def flat(x: Tensor) -> Tensor:
    """x [..., k] as [T, k]."""
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def exact_product(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k] b [k, n] in fp32, for FP8 codes or their numbers, which bf16 represents exactly."""
    if a.is_cuda:
        return torch.mm(a.to(torch.bfloat16), b.to(torch.bfloat16), out_dtype=torch.float32)
    return a.float() @ b.float()


def with_leading_dims(y: Tensor, x: Tensor) -> Tensor:
    """y [T, out] with the leading dims of x [..., in].

    The result is not a view, since autograd forbids in-place changes of a view that an
    autograd.Function returns.
    """
    return torch.ops.aten._unsafe_view(y, [*x.shape[:-1], y.shape[-1]])
