"""The base class of sparse linear layers, with their products, and the layer with a mask."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from common_kernels import nm_mask
from common_kernels.pack.operands import MULTIPLE, pack24_

from . import columns, delayed, precision, sharding
from .derived import DerivedLinear
from .fp8_gemms import Fp8Linear
from .gemms import DENSE, Products, sparse_linear, under_autocast
from .operands import Dense, Divided, Pruned


class InPlaceOf(torch.autograd.Function):
    """Returns `operand`; its gradient goes to `weight`, under `mask` if there is one."""

    @staticmethod
    def forward(ctx, weight, operand, mask):
        # A sharded layer's mask is gathered again for the backward pass (sharding.py).
        ctx.save_for_backward(mask)
        ctx.dtype = weight.dtype
        return operand.view_as(operand)

    @staticmethod
    def backward(ctx, grad):
        (mask,) = ctx.saved_tensors
        grad = grad if mask is None else torch.where(mask, grad, 0.0)
        return grad.to(ctx.dtype), None, None


class SparseLinear(DerivedLinear):
    """`nn.Linear` with a dense master weight, which multiplies with operands derived from it."""

    def check_fresh(self) -> None:
        """Raise RuntimeError if the weights have changed since they were last seen.

        The operand is compared where that is possible, once a pass before the first hook and at
        the end: torch's fused optimizers do not raise the version of what they write.
        """
        now, operand = self._stamp(), self._buffers.get("operand")
        known = self.begun or operand is None
        changed = known and now != self.seen and now[0] == self.seen[0]
        if not changed and type(operand) is Tensor and not operand.is_meta:
            fresh = self.effective_weight().to(operand.dtype)
            changed = not bool(((operand == fresh) | operand.isnan()).all())
        if changed:
            raise RuntimeError(
                "weights of converted layers changed, and masks and operands did not follow: call "
                "on_step_begin(step) and on_step_end(step) around every optimizer step (Trainer: "
                "MethodCallback), and methods.refresh(model) after any other change, as in an "
                "averaged copy"
            )

    def checked_input(self, x: Tensor) -> Tensor:
        """`x` in the dtype of the products; `check_in_forward` first."""
        self.check_in_forward()
        return under_autocast(x)

    def check_in_forward(self) -> None:
        """`check_fresh` in a forward pass, unless it is compiled; most compare two numbers here."""
        if torch.compiler.is_compiling():
            return
        weight: Any = next(iter(self._parameters.values()))
        if self.begun:
            if weight.is_inference() or weight._version != self.seen[1]:
                self.check_fresh()
        elif torch.is_grad_enabled() and not _capturing(weight):
            self.check_fresh()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.mark_fresh()  # a copy has parameters of its own

    def operands(self, dtype: torch.dtype) -> tuple[Any, Any]:
        """The operands of fprop and dgrad for inputs of `dtype`.

        Packed operands have one dtype and serve only inputs of that dtype.
        """
        if self.precision is not None and self.fp8:
            return precision.operands(self)
        if self.shards is not None and self.shards.direct:
            return self.pruned_operands(dtype, self.shards.whole)
        fprop = dgrad = None
        products = self.products
        if dtype == self.dtype and (products.fprop or products.dgrad):
            fprop, dgrad = self.packed_operands()
            if fprop is not None and dgrad is not None:
                return fprop, dgrad
        held = self._buffers["operand"]  # quicker than attributes
        weight = self.sparse_weight if held is None else held
        dense = Dense(weight if weight.dtype == dtype else weight.to(dtype))
        others: Any = self._buffers.get("other_columns")
        if fprop is not None and others is not None:
            part: Any = self._buffers["dense_part"]
            grouped: Any = self._buffers["grouped_columns"]
            return Divided(fprop, part, grouped, others), dgrad or dense
        return fprop or dense, dgrad or dense

    def pruned_operands(self, dtype: torch.dtype, masks: dict[str, Tensor]) -> tuple[Any, Any]:
        """`operands` that each product makes from the weight. masks: their bits."""
        source = "whole" if getattr(self, "is_dense", False) else self.prunes
        weight: Any = self._parameters["weight"]
        mask = masks["mask"] if source == "mask" else None
        scale = self._buffers["scale"] if source == "soft" else None
        whole = self.packed_shape[1] == self.in_features
        runs = self.products if dtype == self.dtype and whole else DENSE
        given = weight, mask, scale, source, self.dtype
        return Pruned(*given, runs.layout("fprop")), Pruned(*given, runs.layout("dgrad"))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]; in evaluation without FP8."""
        x = self.checked_input(x)
        if self.precision is not None and self.fp8:
            return self.forward_in_fp8(x)
        fprop, dgrad = self.operands(x.dtype)
        parameters = self._parameters  # quicker than attributes
        weight, bias = parameters["weight"], parameters["bias"]
        assert weight is not None
        # Only both together mean evaluation: some recipes pre-train in eval mode, and activation
        # checkpointing runs training's forward pass without gradients.
        if not self.training and not torch.is_grad_enabled():
            return fprop.linear(x, bias)
        mvue, products = self.mvue, self.products
        packs_sample = products.layout("wgrad") if mvue and x.dtype == self.dtype else ""
        key = self.key_of_pass() if mvue else None
        return sparse_linear(x, weight, fprop, dgrad, bias, key, mvue, packs_sample)

    def forward_in_fp8(self, x: Tensor) -> Tensor:
        """`forward` in FP8, for an x in the dtype of the products."""
        if not self.training and not torch.is_grad_enabled():
            return Dense(self.sparse_weight.to(x.dtype)).linear(x, self.bias)
        key = self.key_of_pass() if self.mvue else None
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        given = self.mvue, self.precision, self.products.layout("wgrad"), *delayed.of(self)
        return Fp8Linear.apply(x, weight, *precision.operands(self), bias, key, *given)

    def key_of_pass(self) -> Tensor:
        """`key` as it is now, for a backward pass that may follow the next micro-batch's forward
        pass. A compiled or captured pass copies the buffer, whose address never changes."""
        if torch.compiler.is_compiling() or self.drawn is None or _capturing(self.drawn):
            return self.key.clone()
        return self.drawn

    def in_place(self, dtype: torch.dtype) -> Tensor:
        """The weight in use, whose gradient goes to `weight`, for a product made elsewhere."""
        mask = self.mask if self.masks_gradient else None
        return InPlaceOf.apply(self.weight, self.sparse_weight.to(dtype), mask)


class MaskedLinear(SparseLinear):
    """A layer whose operand is the weight under a mask that keeps the n largest of m inputs.

    State besides the base class's, saved: `mask` (bool [out, in]), and with `dense_columns`
    the other ones, `grouped_columns` (int64 [in - dense], columns.py). If these are packed, the
    operand has the others besides: `other_columns`, and their weights `dense_part` [out, dense].
    """

    mask: Tensor
    grouped_columns: Tensor | None
    other_columns: Tensor | None
    dense_part: Tensor | None
    prunes = "mask"

    def setup(self, name: str, config: Any, dtype: torch.dtype | None) -> None:
        super().setup(name, config, dtype)
        self.register_buffer("mask", torch.zeros_like(self.weight, dtype=torch.bool))
        share = getattr(config, "dense_columns", 0.0)
        grouped = columns.split(self.weight, share, self.pattern[1])[0] if share else None
        self.register_buffer("grouped_columns", grouped)
        for name in ("other_columns", "dense_part"):
            self.register_buffer(name, None, persistent=False)

    @property
    def packed_shape(self) -> tuple[int, int]:
        grouped = self._buffers.get("grouped_columns")
        return self.out_features, self.in_features if grouped is None else len(grouped)

    @torch.no_grad()
    def hold(self) -> None:
        self.other_columns = self.dense_part = None
        if self.grouped_columns is not None and self.products.fprop:
            self.other_columns = columns.others(self.grouped_columns, self.in_features)
            shape = self.out_features, len(self.other_columns)
            self.dense_part = self.weight.new_empty(shape, dtype=self.dtype)
        super().hold()

    def sparse_products(self) -> Products:
        packed = self.packed_shape[1]
        whole = self.grouped_columns is None or (packed > 0 and packed % MULTIPLE == 0)
        return replace(super().sparse_products(), fprop=self.pattern == (2, 4) and whole)

    def grouped(self, weight: Tensor) -> Tensor:
        return weight if self.grouped_columns is None else weight[:, self.grouped_columns]

    def best_of(self, scores: Tensor) -> Tensor:
        """The mask of the layer's pattern that keeps the largest scores [out, in]."""
        if self.grouped_columns is None:
            return nm_mask(scores, *self.pattern)
        return columns.partial_mask(scores, self.grouped_columns, *self.pattern)

    def current_mask(self) -> Tensor:
        return self.mask

    def choose_mask(self) -> None:
        self.mask.copy_(self.best_of(self.weight.detach()))

    def effective_weight(self) -> Tensor:
        return torch.where(self.mask, self.weight.detach(), 0.0)

    def pack(self) -> None:
        fprop, _ = self.packed_operands()
        assert fprop is not None
        weight = self.weight.detach()
        if self.grouped_columns is None:
            pack24_(fprop.matrix, weight, "mask", self.mask, dense=self.operand)
            return
        own: Any = self._buffers
        own["operand"].copy_(self.effective_weight())
        pack24_(fprop.matrix, self.grouped(own["operand"]), "magnitude")
        own["other_columns"].copy_(columns.others(self.grouped_columns, self.in_features))
        own["dense_part"].copy_(own["operand"].index_select(1, own["other_columns"]))


def _capturing(weight: Tensor) -> bool:
    """True while a CUDA graph is recorded, in which nothing may wait for the device."""
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


@torch.no_grad()
def refresh(model: nn.Module) -> None:
    """Choose masks and derive operands again in all converted layers of `model`.

    Call it after weights changed outside a method's hooks, for example in an averaged copy (EMA).
    """
    sharding.shard_layers(model.modules(), model)
    for module in model.modules():
        if isinstance(module, SparseLinear):
            module.refresh_mask()
            module.reload()
            module.mark_fresh()
