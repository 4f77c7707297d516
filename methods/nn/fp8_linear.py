"""A layer and a method with the option `fp8`, which runs the products in FP8."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from common_kernels.fp8.cpu import FORMATS
from common_kernels.fp8.weights import quantize24_
from common_kernels.pack import Packed24
from common_kernels.pack.cpu import buffer_bytes

from . import base, delayed
from .fp8_gemms import Fp8Formats, fp8_linear, recipe
from .gemms import DENSE, Products
from .linear import SparseLinear
from .operands import Dense, Fp8


class Fp8Linear(SparseLinear):
    """A mixin that adds FP8 products to a sparse linear.

    Additional buffers with FP8, not saved: the codes of the operands of fprop and dgrad, `codes`
    and `codes_dgrad`, and their `code_scales` (fp32 [2]). On FP8 units (`Products.fp8`) a product
    that runs sparse uses packed codes in `packed` or `packed_transposed` instead, and there is no
    `operand`.
    """

    codes: Tensor | None
    codes_dgrad: Tensor | None
    code_scales: Tensor
    has_history: bool  # with delayed scaling (delayed.py)

    recipe: Fp8Formats | None  # formats of the phases that have FP8; None without FP8
    both_ways: ClassVar[bool] = False  # True if the weight is 2:4 along `out` as well

    @property
    def fp8(self) -> Fp8Formats | None:
        """The formats of the products in the current phase; None without FP8."""
        return self.recipe

    @property
    def rounds_first(self) -> bool:  # type: ignore[override]
        return not self.recipe

    @property
    def _dgrad_on_units(self) -> bool:
        """True if dgrad's codes are kept as [in, out] for FP8 units: packed, or dense in a format
        that cuBLAS can multiply with dY's e5m2."""
        if not self.products.fp8:
            return False
        return self.products.dgrad or (self.fp8 is not None and self.fp8.dgrad == "e4m3")

    def setup(self, name: str, config: Any, dtype: torch.dtype | None) -> None:
        super().setup(name, config, dtype)
        samples = getattr(config, "mvue", "off") != "off"
        self.recipe = recipe(config.fp8, self.both_ways, samples)
        for codes in ("codes", "codes_dgrad", "code_scales"):
            self.register_buffer(codes, None, persistent=False)
        if self.recipe:
            self._hold_codes()
        if self.recipe and self.recipe.delayed:
            delayed.setup(self, next(self.parameters()).device)

    def restart(self) -> None:
        super().restart()
        if self.recipe and self.recipe.delayed:
            delayed.reload(self)

    def exact_weight(self) -> Tensor:
        """`effective_weight` before it is rounded to the master weight's dtype."""
        return self.effective_weight()

    def quantized_weight(self) -> tuple[Tensor, Tensor | None]:
        """The weight that is quantised and its mask; None for no mask."""
        return self.weight.detach(), self.current_mask()

    def candidates(self) -> Products:
        sparse = super().candidates()
        if not self.recipe:
            return sparse
        return replace(sparse, fp8=True) if self.recipe.on_units else DENSE  # simulated only

    def hold(self) -> None:
        if self.recipe:
            self._hold_codes()
        if not self.products.fp8:
            super().hold()
            return
        self.operand = None
        self.refresh()

    @torch.no_grad()
    def _hold_codes(self) -> None:
        """Allocate the codes that the FP8 products take; in a phase without FP8, those of the
        simulation."""
        fp8, products = self.recipe, self.products
        assert fp8
        rows, columns, device = self.out_features, self.in_features, next(self.parameters()).device

        def buffer_for(held: Tensor | None, dtype: torch.dtype, *shape: int) -> Tensor:
            if held is not None and (held.dtype, held.shape) == (dtype, shape):
                return held
            return torch.empty(shape, dtype=dtype, device=device)

        def packed(held: Tensor | None, dtype: torch.dtype, layout: str) -> Tensor:
            return buffer_for(held, torch.uint8, buffer_bytes(rows, columns, dtype, layout))

        fprop, dgrad, layouts = FORMATS[fp8.fprop], FORMATS[fp8.dgrad], products.layouts
        self.packed = packed(self.packed, fprop, layouts.fprop) if products.fprop else None
        self.codes = None if products.fprop else buffer_for(self.codes, fprop, rows, columns)
        self.packed_transposed = (
            packed(self.packed_transposed, dgrad, layouts.dgrad) if products.dgrad else None
        )
        shape = (columns, rows) if self._dgrad_on_units else (rows, columns)
        self.codes_dgrad = None if products.dgrad else buffer_for(self.codes_dgrad, dgrad, *shape)
        self.code_scales = buffer_for(self.code_scales, torch.float32, 2)

    def derive(self, amax: Tensor | None = None) -> None:
        if not self.products.fp8:
            super().derive(amax)
        # A sharded layer holds no codes (sharding.py).
        if self.fp8 and self._buffers["code_scales"] is not None:
            self.quantize(amax)

    def quantize(self, amax: Tensor | None = None) -> None:
        """Derive the codes of both operands, dense or packed."""
        quantize24_(*self._room_for_codes(), self.code_scales, *self.quantized_weight(), amax)

    def _room_for_codes(self) -> tuple[Packed24 | Tensor, Packed24 | Tensor]:
        """The tensors that receive the codes of the weight [out, in] and of its transpose."""
        assert self.fp8
        rows, columns, fp8 = self.out_features, self.in_features, self.fp8
        fprop: Any = self.codes
        dgrad: Any = self.codes_dgrad
        if self.packed is not None:
            layout = self.accelerated.layouts.fprop
            fprop = Packed24(self.packed, (rows, columns), FORMATS[fp8.fprop], layout)
        if self.packed_transposed is not None:
            dtype, layout = FORMATS[fp8.dgrad], self.accelerated.layouts.dgrad
            dgrad = Packed24(self.packed_transposed, (columns, rows), dtype, layout)
        elif not self._dgrad_on_units:
            dgrad = dgrad.t()
        return fprop, dgrad

    def operands(self, dtype: torch.dtype) -> tuple[Any, Any]:
        if not self.fp8:
            return super().operands(dtype)
        scale, scale_dgrad = self.code_scales.unbind()
        rows, columns, layouts = self.out_features, self.in_features, self.accelerated.layouts
        if self.packed is None:
            assert self.codes is not None
            fprop = Fp8(self.codes, scale, self.products.fp8)
        else:
            fprop = Fp8(self.packed, scale, True, (rows, columns), layouts.fprop)
        if self.packed_transposed is None:
            assert self.codes_dgrad is not None
            return fprop, Fp8(self.codes_dgrad, scale_dgrad, self._dgrad_on_units)
        shape = columns, rows
        return fprop, Fp8(self.packed_transposed, scale_dgrad, True, shape, layouts.dgrad)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]; in evaluation without FP8."""
        if not self.fp8:
            return super().forward(x)
        x = self.checked_input(x)
        if not self.training and not torch.is_grad_enabled():
            return Dense(self.sparse_weight.to(x.dtype)).linear(x, self.bias)
        fp8, operands, products = self.fp8, self.operands(x.dtype), self.products
        wgrad = products.layouts.wgrad if products.wgrad else None
        amax = delayed.of(self) if fp8.delayed else delayed.NONE
        key = self.key_of_pass() if self.mvue else None
        return fp8_linear(x, self.weight, *operands, self.bias, key, self.mvue, fp8, wgrad, amax)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        super()._apply(*args, **kwargs)
        if self.recipe:  # a cast would treat codes and scales as ordinary numbers
            self.allocate()
        if self.recipe and self.recipe.delayed:
            delayed.reload(self)
        return self

    def restore(self) -> None:
        super().restore()
        for name in ("recipe", "has_history"):
            vars(self).pop(name, None)


class Fp8Method(base.Method):
    """A method with the option `fp8`."""

    @torch.no_grad()
    def on_step_end(self, step: int) -> None:
        super().on_step_end(step)
        delayed.update(self.layers.values())
