"""A linear layer with a dense master weight, and operands of its three products derived from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from common_kernels import nm_mask
from common_kernels.prepare import empty_blob, prune_pack24_

from .gemms import DENSE, Products, fprop, sparse_linear, under_autocast


class SparseLinear(nn.Linear):
    """`nn.Linear` with a dense master weight and operands derived from it.

    State: `weight` [out, in] is the Parameter that the optimizer sees. `sparse_weight` [out, in]
    is what the layer computes with, in the dtype of the matrix products. It lies in buffers that
    are not saved, because `refresh` derives them again from what is: `operand` [out, in], and for
    products that run sparse (`Method.accelerate`) `packed` and `packed_transposed`, the blobs of
    the operand of fprop and of the transposed operand of dgrad. Where both are there, `operand` is
    not. `key` (int64 [2]) selects the random bits of the backward pass.

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
        for blob in ("packed", "packed_transposed"):
            self.register_buffer(blob, None, persistent=False)
        key = torch.zeros(2, dtype=torch.int64, device=weight.device)
        self.register_buffer("key", key, persistent=False)

    def sparse_products(self) -> Products:
        """Which products have a 2:4 operand: that of fprop along `in`, that of dgrad along `out`,
        for wgrad a sample of dY along the tokens."""
        return Products(wgrad=self.mvue == "exact")

    @property
    def products(self) -> Products:
        """Which products run sparse."""
        return self.accelerated

    def accelerate(self, products: Products) -> None:
        """Run these products sparse from now on."""
        self.accelerated = products
        self.allocate()

    @torch.no_grad()
    def allocate(self) -> None:
        """Hold the operands that `products` takes, and no others."""
        (rows, columns), device, products = self.weight.shape, self.weight.device, self.products
        packed = (products.fprop, rows, columns), (products.dgrad, columns, rows)
        for name, (wanted, *shape) in zip(("packed", "packed_transposed"), packed, strict=True):
            if not wanted:
                setattr(self, name, None)
            elif getattr(self, name) is None:
                setattr(self, name, empty_blob(shape, self.dtype, device))
        if products.fprop and products.dgrad:
            self.operand = None
        elif self.operand is None:
            self.operand = self.weight.to(self.dtype, copy=True)
        self.refresh()

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

    def refresh(self) -> None:
        """Derive the operands from weight, mask and scale."""
        if self.packed is not None or self.packed_transposed is not None:
            self.pack()
        elif self.operand is not None:
            self.operand.copy_(self.effective_weight())

    def reload(self) -> None:
        """Derive everything from parameters and saved buffers, which came from elsewhere."""
        self.refresh()

    def pack(self) -> None:
        """Fill the blobs that there are, and `operand` if it is there."""
        raise NotImplementedError(f"{type(self).__name__} has no packed operands")

    def fprop_operand(self) -> Tensor:
        return self.sparse_weight

    def dgrad_operand(self) -> Tensor | None:
        """None: that of fprop."""
        return None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        x = under_autocast(x)
        # Blobs are in one dtype and serve no other.
        products = self.products if x.dtype == self.dtype else DENSE
        # Evaluation is both: some recipes pre-train in eval mode, and activation checkpointing
        # runs the forward pass of training without gradients.
        if not self.training and not torch.is_grad_enabled():
            operand = self.packed if products.fprop else self.sparse_weight.to(x.dtype)
            return fprop(x, operand, self.bias, products)
        return sparse_linear(
            x,
            self.weight,
            self.packed if products.fprop else self.fprop_operand().to(x.dtype),
            self._operand_of_dgrad(products, x.dtype),
            self.bias,
            # A copy: the next micro-batch changes the key, this one's backward needs its own.
            self.key.clone(),
            self.mvue,
            products,
        )

    def _operand_of_dgrad(self, products: Products, dtype: torch.dtype) -> Tensor | None:
        if products.dgrad:
            return self.packed_transposed
        operand = self.dgrad_operand()
        if operand is None and products.fprop:
            operand = self.fprop_operand()
        return None if operand is None else operand.to(dtype)

    def restore(self) -> None:
        """Turn this module back into a plain `nn.Linear` with the weights in use written out."""
        self.weight.copy_(self.effective_weight())
        for name in [*self._buffers, "config", "dtype", "accelerated"]:
            delattr(self, name)
        self.__class__ = nn.Linear  # type: ignore[assignment]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self._swap_layout(destination, prefix)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        self._swap_layout(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        with torch.no_grad():
            self.reload()

    def _swap_layout(self, state_dict: Any, prefix: str) -> None:
        """Between the layout of a `Conv1D`, which a state dict keeps, and this one's."""
        key = f"{prefix}weight"
        if self.conv1d is not None and key in state_dict:
            state_dict[key] = state_dict[key].t().contiguous()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        super()._apply(*args, **kwargs)
        # A cast would take metadata for numbers: blobs are made anew.
        if self.packed is not None or self.packed_transposed is not None:
            self.packed = self.packed_transposed = None
            self.allocate()
        return self


class MaskedLinear(SparseLinear):
    """The operand is the weight under a mask: of four inputs the two largest magnitudes.

    State beyond the base class: `mask` (bool [out, in]), saved.
    """

    mask: Tensor

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
        assert self.packed is not None
        prune_pack24_(self.packed, self.weight.detach(), "mask", self.mask, dense=self.operand)


@torch.no_grad()
def refresh(model: nn.Module) -> None:
    """Choose masks and derive operands anew in all converted layers of `model`.

    For weights that changed outside a method's hooks, those of an averaged copy (EMA), say.
    """
    for module in model.modules():
        if isinstance(module, SparseLinear):
            module.refresh_mask()
            module.reload()
