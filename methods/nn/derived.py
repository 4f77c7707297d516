"""The state of a sparse linear layer: a dense master weight, and what is derived from it."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from common_kernels import nm_mask
from common_kernels.fp8.weights import quantize24_

from . import delayed, precision, sharding
from .conversion import become
from .dtensors import sharded_like
from .fp8_gemms import Fp8Formats, recipe
from .gemms import DENSE, Products
from .operands import Packed

# Attributes of a converted layer, besides parameters and buffers.
OWN = (
    "config", "pattern", "dtype", "accelerated", "precision", "has_history", "shards", "drawn",
    "was_loaded", "seen", "begun", "is_dense", "is_frozen", "adapting", "_stored",
)  # fmt: skip


class DerivedLinear(nn.Linear):
    """The part of a `SparseLinear` that holds its state.

    `weight` [out, in] is the Parameter that the optimizer sees. The layer computes with
    `sparse_weight` [out, in], in the dtype of the matrix products. It is held in buffers that are
    not saved, because `refresh` derives them from saved state: `operand` [out, in], and for
    products that run sparse (`Method.accelerate`) `packed` and `packed_transposed`, the packed
    bytes (uint8) of fprop's operand [out, in] and of dgrad's [in, out]. If both packed operands are
    held, `operand` is not. `key` (int64 [2]) selects the random bits of the backward pass.

    If `weight` is changed outside a method's hooks, call `methods.refresh(model)` afterwards.
    """

    config: Any
    dtype: torch.dtype
    operand: Tensor | None
    packed: Tensor | None
    packed_transposed: Tensor | None
    accelerated: Products
    codes: Tensor | None  # with FP8 (precision.py)
    codes_dgrad: Tensor | None
    code_scales: Tensor
    has_history: bool  # with delayed scaling (delayed.py)
    key: Tensor
    drawn: Tensor | None = None  # the numbers of `key`, in a tensor of this micro-batch alone
    conv1d: type[nn.Module] | None = None  # transformers' Conv1D, if the layer was one
    pattern: tuple[int, int]  # n non-zeros in m consecutive inputs
    # `refresh_mask` and `update_buffers` treat runs of this many rows separately; 0: all together.
    rows_together: int = 1
    # True if the weight may be rounded to the operands' dtype before they are derived: each entry
    # is one of the weight or 0, under a mask that is kept.
    rounds_first: bool = True
    # True once a state with this layer's own buffers was loaded: that of a converted model.
    was_loaded: bool = False
    # The identity and version of the first parameter when operands were last derived from it.
    seen: tuple[int, int] = (0, 0)
    # True once a hook has taken the weights as they are. They may change before, as where DDP
    # copies equal ones.
    begun: bool = False
    # True if the weight gets no gradient outside the mask, in `in_place`.
    masks_gradient: bool = False
    shards: sharding.Shards | None = None  # while its parameters are sharded
    precision: Fp8Formats | None = None  # FP8; None for products in `dtype`
    # How each product may prune the weight itself: a source of `pruned_mm24`, or `compressed`;
    # empty if operands must be derived. A class that overrides sharding.DERIVING says it anew.
    prunes: str = ""
    both_ways: ClassVar[bool] = False  # True if the weight is 2:4 along `out` as well

    def setup(self, name: str, config: Any, dtype: torch.dtype | None) -> None:
        """Turn this module, an `nn.Linear` until now, into a sparse one.

        Args:
            name: the module's name in its model; with `config.seed` it seeds the layer's random
                choices, so that every rank makes the same.
            dtype: the dtype of the products' operands; None for the weight's own.
        """
        self.config, self.pattern = config, config.pattern(name)
        weight = self.weight.detach()
        self.dtype, self.accelerated = dtype or weight.dtype, DENSE
        self.register_buffer("operand", weight.to(self.dtype, copy=True), persistent=False)
        for packed in ("packed", "packed_transposed"):
            self.register_buffer(packed, None, persistent=False)
        key = torch.zeros(2, dtype=torch.int64, device=weight.device)
        self.register_buffer("key", key, persistent=False)
        self._set_precision()

    def _set_precision(self) -> None:
        samples = getattr(self.config, "mvue", "off") != "off"
        self.precision = recipe(getattr(self.config, "fp8", "off"), self.both_ways, samples)
        if self.precision is not None:
            precision.setup(self)

    @property
    def fp8(self) -> Fp8Formats | None:
        """The formats of the products in the current phase; None without FP8."""
        return self.precision

    def sparse_products(self) -> Products:
        """The products with a 2:4 operand: fprop's along `in`, dgrad's along `out`, and for wgrad
        a sample of dY along the tokens."""
        return Products(wgrad=self.mvue == "exact")

    def candidates(self) -> Products:
        """The products that `Method.accelerate` may choose."""
        sparse = self.sparse_products()
        if self.precision is None:
            return sparse
        return replace(sparse, fp8=True) if self.precision.on_units else DENSE  # simulated only

    @property
    def repacks(self) -> bool:
        """True if dgrad's operand can be packed in each backward pass."""
        return False

    @property
    def products(self) -> Products:
        """The products that run sparse."""
        return self.accelerated

    def accelerate(self, products: Products) -> None:
        """Run these products sparse from now on."""
        if self.shards is not None:
            sharding.check_products(products)
            if products == self.accelerated:
                return
        with sharding.unsharded(self):
            self.accelerated = products
            self.allocate()

    def allocate(self) -> None:
        """`hold` the operands; a sharded layer only records which, if it shows whole tensors."""
        if self.shards is None:
            self.hold()
        elif self.shards.viewed:
            self._buffers.update(self.shards.derived)
            self.hold()
            self.shards.derived = sharding.drop_operands(self)

    @torch.no_grad()
    def hold(self) -> None:
        """Allocate the operands that `products` needs, free all others, and derive them."""
        products = self.products
        precision.hold_operands(self)
        if products.fp8 or (products.fprop and products.dgrad):
            self.operand = None
        elif self.operand is None:
            self.operand = self.weight.to(self.dtype, copy=True)
        self.refresh()

    @property
    def packed_shape(self) -> tuple[int, int]:
        """The size of fprop's packed operand [out, in]."""
        return self.out_features, self.in_features

    def packed_operands(self) -> tuple[Packed | None, Packed | None]:
        """The packed operands of fprop and of dgrad; None for one that is not held."""
        buffers, layouts = self._buffers, self.accelerated.layouts  # quicker than attributes
        (rows, columns), dtype = self.packed_shape, self.dtype
        fprop, dgrad = buffers["packed"], buffers["packed_transposed"]
        return (
            None if fprop is None else Packed(fprop, (rows, columns), dtype, layouts.fprop),
            None if dgrad is None else Packed(dgrad, (columns, rows), dtype, layouts.dgrad),
        )

    @property
    def sparse_weight(self) -> Tensor:
        """The weight in use [out, in], in the dtype of the products."""
        return self.effective_weight().to(self.dtype) if self.operand is None else self.operand

    @property
    def mvue(self) -> str | None:
        """The design of the sample of dY in wgrad; None if dY is not sampled."""
        return None

    @property
    def phase(self) -> str:
        """The name of the layer's phase, for `print(model)`."""
        return "sparse"

    def extra_repr(self) -> str:
        method, (n, m) = type(self.config).__module__.rpartition(".")[2], self.pattern
        with sharding.rows(self):  # gather nothing, because rank 0 alone may print a model
            phase = self.phase
        return f"{super().extra_repr()}, method={method}, pattern={n}:{m}, phase={phase}"

    def effective_weight(self) -> Tensor:
        """The sparse weight [out, in] of evaluation and export, in the master weight's dtype."""
        raise NotImplementedError(f"{type(self).__name__} does not say which weight it uses")

    def exact_weight(self) -> Tensor:
        """`effective_weight` before it is rounded to the master weight's dtype."""
        return self.effective_weight()

    def quantized_weight(self) -> tuple[Tensor, Tensor | None]:
        """The weight that is quantised and its mask; None for no mask."""
        return self.weight.detach(), self.current_mask()

    def current_mask(self) -> Tensor:
        """The 2:4 mask, bool [out, in], whose changes the flip rate counts."""
        return nm_mask(self.weight.detach())

    def grouped(self, weight: Tensor) -> Tensor:
        """The columns of a weight or mask [out, in] that have the pattern."""
        return weight

    def refresh_mask(self) -> None:
        """Choose a new mask from the weights."""
        with sharding.where_it_chooses(self):
            if self.choose_mask() is not None:  # type: ignore[func-returns-value]
                raise TypeError(f"{type(self).__name__}.choose_mask must write the mask in place")

    def choose_mask(self) -> None:
        """Write a mask, chosen from the rows that the layer shows, into its buffer, if any."""

    def update_buffers(self) -> None:
        """Update the saved buffers other than the mask, and the weight itself if the method
        constrains it, after the weight has changed."""

    def refresh(self, amax: Tensor | None = None) -> None:
        """Update the saved buffers, then the operands from them. amax: as for `update_operands`."""
        with sharding.where_it_chooses(self):
            self.update_buffers()
        self.update_operands(amax)
        vars(self)["seen"] = self._stamp()

    def _stamp(self) -> tuple[int, int]:
        if self.shards is not None:
            return 0, 0  # a forward pass shows the layer other parameters than a hook does
        weight = next(iter(self._parameters.values()))
        assert weight is not None
        return id(weight), 0 if weight.is_inference() else weight._version

    def mark_fresh(self) -> None:
        """Take the weights as they are for those that mask and operands follow."""
        vars(self).update(seen=self._stamp(), begun=True)

    def update_operands(self, amax: Tensor | None = None) -> None:
        """`derive` the operands; those of a sharded layer only when they are used, from masks that
        are gathered here."""
        if self.shards is None:
            self.derive(amax)
        else:
            sharding.gather_masks([self])

    def derive(self, amax: Tensor | None = None) -> None:
        """Write the operands that the layer holds. amax: the largest magnitude of the weight in use
        if the step has computed it, for layers that scale by it."""
        packed = self.packed is not None or self.packed_transposed is not None
        if packed and self.precision is None:
            self.pack()
        elif self.operand is not None:
            self.operand.copy_(self.effective_weight())
        # A sharded layer holds no codes (sharding.py).
        if self.fp8 and self._buffers["code_scales"] is not None:
            self.quantize(amax)

    def quantize(self, amax: Tensor | None) -> None:
        """Derive the codes of both operands, dense or packed."""
        room = precision.room(self)
        quantize24_(*room, self.code_scales, *self.quantized_weight(), amax)

    def draw(self) -> None:
        """Draw new samples for operands that are samples, after `key` was set for a step; a sharded
        layer does so when they are used."""

    def reload(self) -> None:
        """Derive all other state from parameters and saved buffers, after these were loaded."""
        with sharding.unsharded(self):
            self.restart()
            delayed.reload(self)
        if self.shards is not None:
            sharding.gather_masks([self])  # a compiled forward pass does not

    def restart(self) -> None:
        """`reload` on whole tensors."""
        self.refresh()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        super()._apply(*args, **kwargs)
        if self.precision is not None:  # a cast would treat codes and scales as ordinary numbers
            self.allocate()
            delayed.reload(self)
        return self

    def pack(self) -> None:
        """Write the packed operands that the layer holds, and `operand` if it is held."""
        raise NotImplementedError(f"{type(self).__name__} has no packed operands")

    def restore(self) -> None:
        """Turn this module back into a plain `nn.Linear` whose weight is the one in use."""
        self.weight.copy_(self.effective_weight())
        for name in [*self._buffers]:
            delattr(self, name)
        self._forget()
        become(self, nn.Linear)

    def _forget(self) -> None:
        """Remove what a plain linear does not have."""
        if self.shards is not None:
            del self.forward
        for name in OWN:
            vars(self).pop(name, None)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        sharding.shard_layers([self])
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self._swap_layout(destination, prefix)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        sharding.shard_layers([self])
        for name, buffer in self._buffers.items():
            if (key := prefix + name) in state_dict:
                self.was_loaded = True
                # torch shards parameters, and buffers that were sharded when it first looked.
                state_dict[key] = sharded_like(state_dict[key], buffer)
        self._swap_layout(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        with torch.no_grad():
            self.reload()
        self.mark_fresh()

    def _swap_layout(self, state_dict: Any, prefix: str) -> None:
        """Transpose weight and masks in a state dict between `Conv1D`'s layout and this layer's."""
        key = f"{prefix}weight"
        if self.conv1d is not None and key in state_dict:
            state_dict[key] = state_dict[key].t().contiguous()
