"""A linear layer whose N:M weight is stored compressed, with or without low-rank adapters.

Shapes: T tokens, X [T, in], `values` [out, in * n / m] (common_kernels.compressed), L^T [r, in],
R [r, out]. W_R is the weight [out, in] expanded by the row mask, W_RC the same without the entries
that the column mask drops.

    fprop  Y        = X W_R^T + (X L) R / r + b     a product with W_R, one with L, then
                                                    lowrank_addmm
    dgrad  dX       = dY W_RC + dY2 L^T             dY2 = dY R^T / r
    wgrad  dvalues  = the kept entries of dY^T X    a dense product, compressed
           dL^T, dR = dY2^T X, (X L)^T dY / r

The adapters have the scale 1 / r in training, in evaluation, and in `SparsePlusLowRank`, the module
that a layer with trained adapters becomes at the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common_kernels import (
    check_nm,
    compress_nm,
    double_prune_bits,
    expand_nm,
    lowrank_addmm,
    nm_mask,
    pack_mask,
    unpack_mask,
)
from common_kernels.pack.compressed import Compressed24, prune_and_pack24_

from .gemms import DENSE, Products, under_autocast, without_autocast
from .keys import layer_seed
from .linear import SparseLinear
from .operands import Compressed, Dense, Packed, save, saved

Pattern = tuple[int, int]  # (n, m)


def dense_left(left: Tensor, left_mask: Tensor | None, pattern: Pattern) -> Tensor:
    """The dense L^T [r, in] of an adapter, which is stored compressed if it has a mask."""
    return left if left_mask is None else expand_nm(left, left_mask, *pattern)


def adapter_gradients(
    dy: Tensor,
    x: Tensor,
    left: Tensor,
    right: Tensor,
    left_mask: Tensor | None,
    pattern: Pattern,
    grad_x: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The gradients of `left` and `right`. The adapters' part of dX is added to `grad_x` in place.

    Args:
        dy, x: [T, out] and [T, in].
        grad_x: [T, in], or None if x needs no gradient.
    """
    dense = dense_left(left.to(x.dtype), left_mask, pattern)
    dy2 = dy @ right.to(x.dtype).t() / len(right)
    grad_left = dy2.t() @ x
    if left_mask is not None:
        grad_left = compress_nm(grad_left, left_mask, *pattern)
    grad_right = (x @ dense.t()).t() @ dy / len(right)
    if grad_x is not None:
        grad_x.addmm_(dy2, dense)
    return grad_left.to(left.dtype), grad_right.to(right.dtype)


class _Product(torch.autograd.Function):
    """The products of the module docstring. Only compressed operands are saved for the backward
    pass; dense ones would be held for all layers at once.
    """

    @staticmethod
    def forward(
        ctx, x, values, left, right, bias, row_mask, column_mask, left_mask, fprop, dgrad, pattern,
        adapting,
    ):  # fmt: skip
        ctx.pattern, ctx.adapting = pattern, adapting
        ctx.bias_dtype = None if bias is None else bias.dtype
        save(ctx, dgrad, x, values, left, right, row_mask, column_mask, left_mask)
        if fprop is None:
            fprop = Dense(expand_nm(values.to(x.dtype), row_mask, *pattern))
        if not adapting:
            return fprop.linear(x, bias)
        dense, right = dense_left(left.to(x.dtype), left_mask, pattern), right.to(x.dtype)
        y1, y2 = fprop.linear(x, None), F.linear(x, dense)
        return lowrank_addmm(y1, y2, right, bias, 1 / len(right))

    @staticmethod
    def backward(ctx, grad_y):
        with without_autocast(grad_y):
            return _Product._backward(ctx, grad_y)

    @staticmethod
    def _backward(ctx, grad_y):
        dgrad, x, values, left, right, row_mask, column_mask, left_mask = saved(ctx)
        dy, x2d = grad_y.reshape(-1, grad_y.shape[-1]), x.reshape(-1, x.shape[-1])
        grad_x = grad_values = grad_left = grad_right = grad_bias = None
        if ctx.needs_input_grad[0]:
            if dgrad is None:
                kept = unpack_mask(column_mask, values.shape[-1])
                twice_pruned = torch.where(kept, values, 0.0).to(x.dtype)
                dgrad = Dense(expand_nm(twice_pruned, row_mask, *ctx.pattern))
            grad_x = dgrad.grad(dy)
        if ctx.needs_input_grad[1]:
            grad_values = compress_nm(dy.t() @ x2d, row_mask, *ctx.pattern, dtype=values.dtype)
        # Adapters are inputs even before their phase, when they get no gradient: DDP waits for
        # every parameter that it knows.
        if ctx.adapting:
            grad_left, grad_right = adapter_gradients(
                dy, x2d, left, right, left_mask, ctx.pattern, grad_x
            )
        if grad_x is not None:
            grad_x = grad_x.reshape(x.shape)
        if ctx.needs_input_grad[4]:
            grad_bias = dy.sum(0).to(ctx.bias_dtype)
        return grad_x, grad_values, grad_left, grad_right, grad_bias, *(None,) * 7


class CompressedLinear(SparseLinear):
    """A linear layer that stores its weight as compressed `values` and bit masks.

    Parameters: `values` [out, in * n / m], `bias`, and with adapters `left` = L^T [r, in]
    (compressed like `values` if it is sparse) and `right` = R [r, out].

    Saved buffers, bits packed in uint8: `row_mask` [out, in / 8], one bit per weight;
    `column_mask` [out, in * n / m / 8], one bit per value; `left_mask` [r, in / 8] of a sparse L.
    Buffers that are not saved: `packed` and `packed_transposed`, the packed bytes of W_R and W_RC^T
    for products that run sparse. With `Products.repack` W_RC^T is packed in each backward pass and
    not kept.
    """

    values: nn.Parameter
    left: nn.Parameter | None
    right: nn.Parameter | None
    row_mask: Tensor
    column_mask: Tensor
    left_mask: Tensor | None
    pattern: Pattern
    adapting: bool  # True if the adapters are in use; until then R is zero
    _stored: tuple[Any, Compressed24] | None = None  # the last `stored`, with the tensors it holds

    def setup(self, name: str, config: Any, dtype: torch.dtype | None) -> None:
        """Set the layer up as the base class does; `config` is SLoPe's.

        dtype is the dtype of packed operands. For dense products values are cast before they are
        expanded, which halves the work.
        """
        self.config, self.pattern = config, config.pattern(name)
        for operand in ("operand", "packed", "packed_transposed"):
            self.register_buffer(operand, None, persistent=False)
        # Remove both and register them again, to keep the parameter order of nn.Linear.
        weight, bias = self._parameters.pop("weight"), self._parameters.pop("bias")
        assert weight is not None
        self.dtype, self.accelerated = dtype or weight.dtype, DENSE
        self.register_buffer("row_mask", self._choose_mask(weight.detach(), name, "mask"))
        values = compress_nm(weight.detach(), self.row_mask, *self.pattern)
        self.values = nn.Parameter(values, requires_grad=weight.requires_grad)
        self.register_parameter("bias", bias)
        self.register_buffer("column_mask", pack_mask(torch.ones_like(values, dtype=torch.bool)))
        left = right = left_mask = None
        if config.adapter_rank:
            generator = self._generator(name, "left")
            shape = (config.adapter_rank, self.in_features)
            drawn = torch.randn(shape, generator=generator, device="cpu")
            if config.adapter_init == "scaled":
                drawn /= math.sqrt(self.in_features)
            drawn = drawn.to(weight)
            if config.adapter_left_sparse:
                left_mask = self._choose_mask(drawn, name, "left mask")
                drawn = compress_nm(drawn, left_mask, *self.pattern)
            left = nn.Parameter(drawn)
            right = nn.Parameter(weight.new_zeros(config.adapter_rank, self.out_features))
        self.register_parameter("left", left)
        self.register_parameter("right", right)
        self.register_buffer("left_mask", left_mask)

    def _choose_mask(self, x: Tensor, name: str, purpose: str) -> Tensor:
        """The packed N:M mask of x along its last dim, by the rule of the option `mask`."""
        # If x is already N:M (from an earlier run), keep its zeros rather than draw a mask.
        random = self.config.mask == "random" and not x.is_meta
        if random and int(check_nm(x, *self.pattern)):
            generator = self._generator(name, purpose)
            x = torch.rand(x.shape, generator=generator, device="cpu").to(x.device)
        return pack_mask(nm_mask(x, *self.pattern))

    def _generator(self, name: str, purpose: str) -> torch.Generator:
        """A CPU generator for this layer, so that every device and every rank draws the same."""
        seed = layer_seed(self.config.seed, f"{name} {purpose}", 0)
        return torch.Generator().manual_seed(seed)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """A dense copy [out, in] of the sparse weight, without the adapters."""
        return self.effective_weight()

    @property
    def sparse_weight(self) -> Tensor:
        return self.effective_weight()

    def effective_weight(self) -> Tensor:
        return expand_nm(self.values.detach(), self.row_mask, *self.pattern)

    def current_mask(self) -> Tensor:
        return unpack_mask(self.row_mask, self.in_features)

    def choose_mask(self) -> None:
        """Choose the column mask: n of m along `out`, by magnitude, among the kept weights."""
        bits = double_prune_bits(self.values.detach(), self.row_mask, *self.pattern)
        self.column_mask.copy_(bits)

    @property
    def rows_together(self) -> int:  # type: ignore[override]
        return self.pattern[1]

    def update_buffers(self) -> None:
        """Use the adapters if R is not zero, as after loading trained weights."""
        right = self.right
        self.adapting = right is not None and not right.is_meta and bool(right.any())

    def derive(self, amax: Tensor | None = None) -> None:
        self.pack()

    def sparse_products(self) -> Products:
        sparse = self.pattern == (2, 4)
        return Products(fprop=sparse, dgrad=sparse)

    @property
    def repacks(self) -> bool:
        sparse = self.candidates()
        return sparse.dgrad and not sparse.fp8  # FP8 codes of both operands are made together

    @torch.no_grad()
    def hold(self) -> None:
        self._stored = None  # it would keep the memory of operands that are freed
        self._hold_packed(self.accelerated)
        self.update_operands()

    @torch.no_grad()
    def pack(self) -> None:
        """Write the packed operands that the layer holds."""
        if (stored := self.stored()) is not None:
            prune_and_pack24_([stored], choose=False)

    def stored(self) -> Compressed24 | None:
        """The weight with its packed operands; None if it has none."""
        buffers = self._buffers
        own = (
            self._parameters["values"], buffers["row_mask"], buffers["column_mask"],
            buffers["packed"], buffers["packed_transposed"], self.accelerated, self.values.dtype,
        )  # fmt: skip
        if own[3] is None and own[4] is None:
            return None
        # `Compressed24` checks its tensors, so build it only when they have changed.
        if not self._stored or any(x is not y for x, y in zip(self._stored[0], own, strict=True)):
            fprop, dgrad = self.packed_operands()
            stored = Compressed24(
                values=self.values,
                row_mask=self.row_mask,
                column_mask=self.column_mask,
                packed=None if fprop is None else fprop.matrix,
                transposed=None if dgrad is None else dgrad.matrix,
            )
            self._stored = own, stored
        return self._stored[1]

    def operands(self, dtype: torch.dtype) -> tuple[Packed | None, Packed | Compressed | None]:
        """The packed operands for inputs of `dtype`, or None; dense ones are made in each pass."""
        if dtype != self.dtype:
            return None, None
        (fprop, dgrad), products = self.packed_operands(), self.accelerated
        if not products.repack:
            return fprop, dgrad
        masks = self.row_mask, self.column_mask
        return fprop, Compressed(self.values, *masks, products.layouts.dgrad)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], the same in training and in evaluation."""
        return self.forward_with(x)

    def forward_with(self, x: Tensor, operands: tuple[None, None] | None = None) -> Tensor:
        """`forward` with these operands; dense ones are made for those that are None."""
        x = self.checked_input(x)
        adapters, masks = (self.left, self.right), (self.row_mask, self.column_mask, self.left_mask)
        taken = operands or self.operands(x.dtype)
        return _Product.apply(
            x, self.values, *adapters, self.bias, *masks, *taken, self.pattern, self.adapting
        )

    @property
    def phase(self) -> str:
        return "adapters" if self.adapting else "sparse"

    def restore(self) -> None:
        """Turn this module into a plain `nn.Linear` with explicit zeros, or, with trained adapters,
        into a `SparsePlusLowRank`."""
        if self.shards is not None:
            raise ValueError(
                "finalize cannot give sharded layers another parameter: load the whole state dict "
                "(get_model_state_dict with full_state_dict=True) into a plain model that this "
                "method has converted, and finalize that one"
            )
        self.refresh()
        adapted, weight, bias, right = self.adapting, self.weight, self.bias, self.right
        trained = self.values.requires_grad
        if adapted:
            assert self.left is not None
            left = dense_left(self.left.detach(), self.left_mask, self.pattern)
        plain = ("config", "pattern", "adapting", "dtype", "accelerated")
        for name in [*self._parameters, *self._buffers, *plain]:
            delattr(self, name)
        vars(self).pop("_stored", None)
        self.__class__ = SparsePlusLowRank if adapted else nn.Linear  # type: ignore[assignment]
        self.register_parameter("weight", nn.Parameter(weight, requires_grad=trained))
        self.register_parameter("bias", bias)
        if adapted:
            self.left, self.right = nn.Parameter(left), right


class SparsePlusLowRank(nn.Linear):
    """An N:M sparse linear with low-rank adapters, as plain tensors without masks.

    Parameters, under these names in a state dict: `weight` [out, in] with explicit zeros, `bias`,
    `left` = L^T [r, in] and `right` = R [r, out].
    """

    left: nn.Parameter
    right: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        x = under_autocast(x)
        weight, left, right = (t.to(x.dtype) for t in (self.weight, self.left, self.right))
        return lowrank_addmm(
            F.linear(x, weight), F.linear(x, left), right, self.bias, 1 / len(left)
        )

    def low_rank(self) -> tuple[Tensor, Tensor, float]:
        """L^T [r, in], R [r, out] and the scale of X L R."""
        return self.left, self.right, 1 / len(self.left)


def attach(model: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """Add to the linears of a plain `model`, in place, the adapters that `state` has for them.

    `state` is the state dict of a finalized model with adapters; afterwards `model` can load it.
    """
    modules = dict(model.named_modules())
    for key in state:
        name, _, last = key.rpartition(".")
        layer = modules.get(name)
        if last != "left" or type(layer) is not nn.Linear:
            continue  # another architecture: loading `state` will raise the error
        layer.__class__ = SparsePlusLowRank
        for factor in ("left", "right"):
            empty = torch.empty_like(state[f"{name}.{factor}"], device=layer.weight.device)
            setattr(layer, factor, nn.Parameter(empty))
    return model


@torch.no_grad()
def merge(model: nn.Module) -> nn.Module:
    """Turn every `SparsePlusLowRank` into a dense `nn.Linear` that computes the same, in place.

    The N:M pattern is lost. This is for tools that support only plain linears.
    """
    for layer in model.modules():
        if isinstance(layer, SparsePlusLowRank):
            layer.weight.addmm_(layer.right.t(), layer.left, alpha=1 / len(layer.left))
            del layer.left, layer.right
            layer.__class__ = nn.Linear  # type: ignore[assignment]
    return model
