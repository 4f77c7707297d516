"""A linear layer whose N:M weight is stored compressed, with or without low-rank adapters.

The adapters have the scale 1 / r in training, in evaluation, and in `lowrank.SparsePlusLowRank`,
which a layer with trained adapters becomes at the end.
"""

from typing import Any

import torch
from torch import Tensor, nn

import common_kernels as ck
from common_kernels.fp8.weights import quantize_compressed24_
from common_kernels.pack.compressed import Compressed24, prune_and_pack24_

from . import delayed, precision
from .compressed_gemms import Fp8Product, Pattern, Product
from .conversion import become
from .gemms import DENSE, Products
from .linear import SparseLinear
from .lowrank import SparsePlusLowRank
from .operands import Compressed, Packed
from .ranks import layer_seed


class CompressedLinear(SparseLinear):
    """A linear layer that stores its weight as compressed `values` and bit masks.

    Parameters: `values` [out, in * n / m], `bias`, and with adapters `left` = L^T [r, in] and
    `right` = R [r, out].

    Saved buffers, bits packed in uint8: `row_mask` [out, in / 8], one bit per weight;
    `column_mask` [out, in * n / m / 8], one bit per value.
    Buffers that are not saved: `packed` and `packed_transposed`, the packed bytes of W_R and W_RC^T
    for products that run sparse. With `Products.repack` each backward pass packs W_RC^T anew.
    """

    values: nn.Parameter
    left: nn.Parameter | None
    right: nn.Parameter | None
    row_mask: Tensor
    column_mask: Tensor
    pattern: Pattern
    adapting: bool  # True if the adapters are in use; until then R is zero
    both_ways = True
    prunes = "compressed"
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
        self.register_buffer("row_mask", self._row_mask(weight.detach(), name))
        values = ck.compress_nm(weight.detach(), self.row_mask, *self.pattern)
        self.values = nn.Parameter(values, requires_grad=weight.requires_grad)
        self.register_parameter("bias", bias)
        whole = torch.ones_like(values, dtype=torch.bool)
        self.register_buffer("column_mask", ck.pack_mask(whole))
        left = right = None
        if rank := config.adapter_rank:
            generator = self._generator(name, "left")
            drawn = torch.randn(rank, self.in_features, generator=generator, device="cpu")
            left = nn.Parameter(drawn.to(weight))
            right = nn.Parameter(weight.new_zeros(rank, self.out_features))
        self.register_parameter("left", left)
        self.register_parameter("right", right)
        self._set_precision()

    def _row_mask(self, weight: Tensor, name: str) -> Tensor:
        """The packed N:M mask of a weight, by the rule of the option `mask`."""
        # If it is already N:M (from an earlier run), keep its zeros rather than draw a mask.
        random = self.config.mask == "random" and not weight.is_meta
        if random and int(ck.check_nm(weight, *self.pattern)):
            generator = self._generator(name, "mask")
            drawn = torch.rand(weight.shape, generator=generator, device="cpu")
            weight = drawn.to(weight.device)
        return ck.pack_mask(ck.nm_mask(weight, *self.pattern))

    def _generator(self, name: str, purpose: str) -> torch.Generator:
        """A CPU generator for this layer, so that every device and every rank draws the same."""
        seed = layer_seed(self.config.seed, f"{name} {purpose}", 0)
        return torch.Generator().manual_seed(seed)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """A dense copy [out, in] of the sparse weight, without the adapters."""
        return self.effective_weight()

    sparse_weight = weight

    def effective_weight(self) -> Tensor:
        return ck.expand_nm(self.values.detach(), self.row_mask, *self.pattern)

    def current_mask(self) -> Tensor:
        return ck.unpack_mask(self.row_mask, self.in_features)

    def choose_mask(self) -> None:
        """Choose the column mask: n of m along `out`, by magnitude, among the kept weights."""
        bits = ck.double_prune_bits(self.values.detach(), self.row_mask, *self.pattern)
        self.column_mask.copy_(bits)

    @property
    def rows_together(self) -> int:  # type: ignore[override]
        return self.pattern[1]

    def update_buffers(self) -> None:
        """Use the adapters if R is not zero, as after loading trained weights."""
        right = self.right
        self.adapting = right is not None and not right.is_meta and bool(right.any())

    def quantize(self, amax: Tensor | None) -> None:
        quantize_compressed24_(
            *precision.room(self), self.code_scales, self.values.detach(), self.row_mask,
            self.column_mask, *self.pattern,
        )  # fmt: skip

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
        precision.hold_operands(self)
        self.update_operands()

    @torch.no_grad()
    def pack(self) -> None:
        """Write the packed operands that the layer holds."""
        if (stored := self.stored()) is not None:
            prune_and_pack24_([stored], choose=False)

    def stored(self) -> Compressed24 | None:
        """The weight with its packed operands; None if it has none, or their codes."""
        if self.precision is not None:
            return None
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
        if self.shards is not None and self.shards.direct:
            return self.pruned_operands(dtype, self.shards.whole)
        (fprop, dgrad), products = self.packed_operands(), self.accelerated
        if not products.repack:
            return fprop, dgrad
        masks = self.row_mask, self.column_mask
        return fprop, Compressed(self.values, *masks, products.layouts.dgrad)

    def pruned_operands(self, dtype: torch.dtype, masks: dict[str, Tensor]) -> tuple[Any, Any]:
        values: Any = self._parameters["values"]
        given = values, masks["row_mask"], masks["column_mask"]
        layouts = (self.accelerated.layout(product) for product in ("fprop", "dgrad"))
        fprop, dgrad = (Compressed(*given, own) if own else None for own in layouts)
        return fprop, dgrad

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], the same in training and in evaluation but for FP8."""
        x = self.checked_input(x)
        if self.precision is None:
            operands = self.operands(x.dtype)
        elif self.training or torch.is_grad_enabled():
            return self.forward_in_fp8(x)
        else:
            operands = None, None  # dense ones are made
        masks: Any = self._buffers  # quicker than attributes
        if self.shards is not None and self.shards.direct:
            masks = self.shards.whole
        own = self._parameters
        return Product.apply(
            x, own["values"], own["left"], own["right"], own["bias"], masks["row_mask"],
            masks["column_mask"], *operands, self.pattern, self.adapting,
        )  # fmt: skip

    def forward_in_fp8(self, x: Tensor) -> Tensor:
        return Fp8Product.apply(
            x, self.values, self.left, self.right, self.bias, self.row_mask,
            *precision.operands(self), self.pattern, self.adapting, self.precision,
            *delayed.of(self),
        )  # fmt: skip

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
        adapted, weight, bias = self.adapting, self.weight, self.bias
        left, right, trained = self.left, self.right, self.values.requires_grad
        for name in [*self._parameters, *self._buffers]:
            delattr(self, name)
        self._forget()
        become(self, SparsePlusLowRank if adapted else nn.Linear)
        self.register_parameter("weight", nn.Parameter(weight, requires_grad=trained))
        self.register_parameter("bias", bias)
        if adapted:
            self.left, self.right = left, right
