"""A linear layer with a dense master weight, and operands of its three products derived from it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from common_kernels import nm_mask
from common_kernels.pack import Packed24
from common_kernels.pack.operands import pack24_

from . import sharding
from .gemms import DENSE, Products, sparse_linear, under_autocast
from .operands import Dense, Packed


class SparseLinear(nn.Linear):
    """`nn.Linear` with a dense master weight and operands derived from it.

    State: `weight` [out, in] is the Parameter that the optimizer sees. `sparse_weight` [out, in]
    is what the layer computes with, in the dtype of the matrix products. It lies in buffers that
    are not saved, because `refresh` derives them again from what is: `operand` [out, in], and for
    products that run sparse (`Method.accelerate`) `packed` and `packed_transposed`, the bytes
    (uint8) of the packed operand of fprop [out, in] and of that of dgrad [in, out]. Where both are
    there, `operand` is not. `key` (int64 [2]) selects the random bits of the backward pass.

    After a change of `weight` that did not come through a method's hooks, call
    `methods.refresh(model)`.
    """

    config: Any
    dtype: torch.dtype
    operand: Tensor | None
    packed: Tensor | None
    packed_transposed: Tensor | None
    accelerated: Products
    key: Tensor
    conv1d: type[nn.Module] | None = None  # the class of transformers that it had
    pattern: tuple[int, int] = (2, 4)  # n non-zeros in m consecutive inputs
    # So many rows one after the other are treated alone by `refresh_mask` and `settle`; 0: all are
    # treated together.
    rows_together: int = 1
    # Operands are the same whether the weight is rounded to their dtype before they are derived or
    # after: an entry is one of the weight, or 0, under masks that are kept.
    rounds_first: bool = True
    # A mask may be bits (`pack_mask`) while operands are derived, where that of fprop is packed:
    # `pack` alone reads it then.
    packs_bits: bool = False

    def setup(self, name: str, config: Any, dtype: torch.dtype | None) -> None:
        """Turn this module, an `nn.Linear` until now, into a sparse one.

        Args:
            name: of the module in its model; with `config.seed` it keys the layer's own random
                choices, so that every rank makes the same.
            dtype: of the operands of the matrix products; None for the weight's own.
        """
        self.config = config
        weight = self.weight.detach()
        self.dtype, self.accelerated = dtype or weight.dtype, DENSE
        self.register_buffer("operand", weight.to(self.dtype, copy=True), persistent=False)
        for packed in ("packed", "packed_transposed"):
            self.register_buffer(packed, None, persistent=False)
        key = torch.zeros(2, dtype=torch.int64, device=weight.device)
        self.register_buffer("key", key, persistent=False)

    def sparse_products(self) -> Products:
        """The products that have a 2:4 operand: that of fprop along `in`, that of dgrad along
        `out`, for wgrad a sample of dY along the tokens."""
        return Products(wgrad=self.mvue == "exact")

    def candidates(self) -> Products:
        """The products that `Method.accelerate` may choose."""
        return self.sparse_products()

    @property
    def repacks(self) -> bool:
        """True if dgrad's packed operand can be made anew in each backward pass."""
        return False

    @property
    def products(self) -> Products:
        """The products that run sparse."""
        return self.accelerated

    def accelerate(self, products: Products) -> None:
        """Run these products sparse from now on."""
        self.accelerated = products
        self.allocate()

    @torch.no_grad()
    def allocate(self) -> None:
        """Hold the operands that `products` takes, and no others."""
        products = self.products
        self._hold_packed(products)
        if products.fprop and products.dgrad:
            self.operand = None
        elif self.operand is None:
            self.operand = self.weight.to(self.dtype, copy=True)
        self.refresh()

    def _hold_packed(self, products: Products) -> None:
        rows, columns = self.out_features, self.in_features
        if not products.fprop:
            self.packed = None
        elif self.packed is None:
            self.packed = self._room(rows, columns, products.layouts.fprop).buffer
        if not products.dgrad or products.repack:
            self.packed_transposed = None
        elif self.packed_transposed is None:
            self.packed_transposed = self._room(columns, rows, products.layouts.dgrad).buffer

    def _room(self, rows: int, columns: int, layout: str) -> Packed24:
        device = next(self.parameters()).device
        return Packed24.empty((rows, columns), self.dtype, device, layout)

    def packed_operands(self) -> tuple[Packed | None, Packed | None]:
        """The packed operands of fprop and of dgrad, None where they are not held."""
        rows, columns = self.out_features, self.in_features
        fprop, dgrad, layouts = self.packed, self.packed_transposed, self.accelerated.layouts
        return (
            None if fprop is None else Packed(fprop, (rows, columns), self.dtype, layouts.fprop),
            None if dgrad is None else Packed(dgrad, (columns, rows), self.dtype, layouts.dgrad),
        )

    def room_for_both(self) -> tuple[Packed24, Packed24]:
        """Both packed operands for a kernel that writes both; one that is not held is new."""
        rows, columns = self.out_features, self.in_features
        (fprop, dgrad), layouts = self.packed_operands(), self.accelerated.layouts
        return (
            self._room(rows, columns, layouts.fprop) if fprop is None else fprop.matrix,
            self._room(columns, rows, layouts.dgrad) if dgrad is None else dgrad.matrix,
        )

    @property
    def sparse_weight(self) -> Tensor:
        """[out, in]: the weight in use, in the dtype of the products."""
        return self.effective_weight().to(self.dtype) if self.operand is None else self.operand

    @property
    def mvue(self) -> str | None:
        """Design of the sample of dY in wgrad; None takes the whole of dY."""
        return None

    @property
    def phase(self) -> str:
        """Name of the phase that the layer is in, for `print(model)`."""
        return "sparse"

    def extra_repr(self) -> str:
        method, (n, m) = type(self.config).__module__.rpartition(".")[2], self.pattern
        return f"{super().extra_repr()}, method={method}, pattern={n}:{m}, phase={self.phase}"

    def effective_weight(self) -> Tensor:
        """The sparse weight [out, in] in the master's dtype: what evaluation and export use."""
        raise NotImplementedError(f"{type(self).__name__} does not say which weight it uses")

    def current_mask(self) -> Tensor:
        """bool [out, in]: the 2:4 mask whose changes the flip rate counts."""
        return nm_mask(self.weight.detach())

    def refresh_mask(self) -> None:
        """Choose a new mask from the weights; for layers that keep one."""

    def settle(self) -> None:
        """Bring the weight and saved buffers other than a mask up to date with the weight."""

    def refresh(self, amax: Tensor | None = None) -> None:
        """Derive the operands from weight, mask and scale. amax: as for `derive`."""
        self.settle()
        self.derive(amax)

    def derive(self, amax: Tensor | None = None) -> None:
        """Fill the operands that there are. amax: the largest magnitude of the weight in use, where
        a step has found it, for layers that scale by it."""
        if self.packed is not None or self.packed_transposed is not None:
            self.pack()
        elif self.operand is not None:
            self.operand.copy_(self.effective_weight())

    def sample(self) -> None:
        """Draw anew the operands that are samples, once `key` is that of a step."""

    def reload(self) -> None:
        """Derive everything from parameters and saved buffers, which came from elsewhere."""
        self.refresh()

    def whole(self) -> AbstractContextManager[None]:
        """In it weight and masks are whole, on layers that are sharded, too (sharding.py)."""
        return nullcontext()

    def pack(self) -> None:
        """Fill the packed operands that there are, and `operand` if it is there."""
        raise NotImplementedError(f"{type(self).__name__} has no packed operands")

    def operands(self, dtype: torch.dtype) -> tuple[Any, Any]:
        """The operands that fprop and dgrad take for inputs of `dtype`.

        Packed ones are in one dtype and serve no other.
        """
        fprop = dgrad = None
        products = self.products
        if dtype == self.dtype and (products.fprop or products.dgrad):
            fprop, dgrad = self.packed_operands()
        if fprop is None or dgrad is None:
            dense = Dense(self.sparse_weight.to(dtype))
            return fprop or dense, dgrad or dense
        return fprop, dgrad

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        x = under_autocast(x)
        fprop, dgrad = self.operands(x.dtype)
        # Evaluation is both: some recipes pre-train in eval mode, and activation checkpointing
        # runs the forward pass of training without gradients.
        if not self.training and not torch.is_grad_enabled():
            return fprop.linear(x, self.bias)
        products, mvue, key, packs_sample = self.products, self.mvue, None, None
        if mvue:  # a copy: the next micro-batch changes it, this one's backward needs its own
            key = self.key.clone()
        if products.wgrad and x.dtype == self.dtype:
            packs_sample = products.layouts.wgrad
        return sparse_linear(
            x, self.weight, fprop, dgrad, self.bias, key, mvue, packs_sample
        )

    def restore(self) -> None:
        """Turn this module back into a plain `nn.Linear` with the weights in use written out."""
        self.weight.copy_(self.effective_weight())
        for name in [*self._buffers, "config", "dtype", "accelerated"]:
            delattr(self, name)
        self.__class__ = nn.Linear  # type: ignore[assignment]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        sharding.follow([self])
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self._swap_layout(destination, prefix)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        sharding.follow([self])
        sharding.cut(self, state_dict, prefix)
        self._swap_layout(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        with torch.no_grad():
            self.reload()

    def _swap_layout(self, state_dict: Any, prefix: str) -> None:
        """Between the layout of a `Conv1D`, which a state dict keeps, and this one's."""
        key = f"{prefix}weight"
        if self.conv1d is not None and key in state_dict:
            state_dict[key] = state_dict[key].t().contiguous()


class MaskedLinear(SparseLinear):
    """The operand is the weight under a mask: of four inputs the two largest magnitudes.

    State beyond the base class: `mask` (bool [out, in]), saved.
    """

    mask: Tensor
    packs_bits = True

    def setup(self, name: str, config: Any, dtype: torch.dtype | None) -> None:
        super().setup(name, config, dtype)
        self.register_buffer("mask", torch.zeros_like(self.weight, dtype=torch.bool))

    def sparse_products(self) -> Products:
        return replace(super().sparse_products(), fprop=True)

    def current_mask(self) -> Tensor:
        return self.mask

    def refresh_mask(self) -> None:
        self.mask.copy_(nm_mask(self.weight.detach()))

    def effective_weight(self) -> Tensor:
        return torch.where(self.mask, self.weight.detach(), 0.0)

    def pack(self) -> None:
        fprop, _ = self.packed_operands()
        assert fprop is not None
        pack24_(fprop.matrix, self.weight.detach(), "mask", self.mask, dense=self.operand)


@torch.no_grad()
def refresh(model: nn.Module) -> None:
    """Choose masks and derive operands anew in all converted layers of `model`.

    For weights that changed outside a method's hooks, those of an averaged copy (EMA), say.
    """
    sharding.follow(model.modules(), model)
    for module in model.modules():
        if isinstance(module, SparseLinear):
            module.refresh_mask()
            module.reload()
