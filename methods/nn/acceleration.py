"""The record of the products that `Method.accelerate` runs sparse, the reasons, and the savings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from common_kernels.matmul import measured

from .gemms import Products, asked_for, problems, refused

NAMES = ("fprop", "dgrad", "wgrad")


@dataclass(frozen=True)
class Choice:
    """The decision whether one product of a layer runs sparse.

    reason: why it is dense; empty if it is sparse.
    kernels: the kernels that run it if it is sparse: `cusparselt`, or `cuda` for our own.
    ms, dense_ms: measured times of the sparse and of the dense product by themselves, in a
        micro-batch; an FP8 product is compared with dense FP8 if cuBLAS has it. None if the times
        were not needed.
    """

    sparse: bool
    reason: str = ""
    ms: float | None = None
    dense_ms: float | None = None
    kernels: str = ""

    @property
    def saved_ms(self) -> float:
        """Milliseconds that the sparse product saves; 0 if it is dense or was not measured."""
        if not self.sparse or self.ms is None or self.dense_ms is None:
            return 0.0
        return self.dense_ms - self.ms


@dataclass(frozen=True)
class Acceleration:
    """The decisions for the products of all layers, for a micro-batch of `tokens` tokens.

    layers: {layer: {"fprop": Choice, "dgrad": Choice, "wgrad": Choice}}
    repack_in_vain: `repack_backward` was requested, but no layer packs in its backward pass.
    """

    tokens: int
    layers: Mapping[str, Mapping[str, Choice]]
    repack_in_vain: bool = False

    @property
    def saved_ms(self) -> float:
        """Milliseconds that the sparse products by themselves save in a micro-batch. The packing,
        sampling and masks that a method adds are not counted."""
        return sum(choice.saved_ms for _, choice in self._choices())

    def gain(self, step_ms: float, micro_batches: int = 1) -> float:
        """The speed-up that the sparse products alone give to a step that takes `step_ms`
        milliseconds with them."""
        return 1 + self.saved_ms * micro_batches / step_ms

    def gains(self) -> dict[str, float | None]:
        """The speed-up of each layer's measured products over dense ones; None if none was
        measured."""
        found: dict[str, float | None] = {}
        for name, choices in self.layers.items():
            dense = sum(choice.dense_ms or 0.0 for choice in choices.values())
            saved = sum(choice.saved_ms for choice in choices.values())
            found[name] = dense / (dense - saved) if dense else None
        return found

    def as_dict(self) -> dict[str, Any]:
        """The record as plain values for a JSON file."""
        layers = {
            name: {product: asdict(choice) for product, choice in choices.items()}
            for name, choices in self.layers.items()
        }
        gains = {"saved_ms": self.saved_ms, "gains": self.gains()}
        return {"tokens": self.tokens, **gains, "layers": layers}

    def _choices(self) -> list[tuple[str, Choice]]:
        return [(n, choice) for choices in self.layers.values() for n, choice in choices.items()]

    def __str__(self) -> str:
        """One line: how many layers run each product sparse, why the others do not, and the time
        saved."""
        if not self.layers:
            return "no layer is converted: all products are dense"
        alike: dict[str, list[str]] = {}  # products that share a description
        for product in NAMES:
            found = [choice for name, choice in self._choices() if name == product]
            sparse = sum(choice.sparse for choice in found)
            described = [f"sparse in {sparse}"] if sparse else []
            own = sum(choice.kernels == "cuda" for choice in found)
            described += [f"by our own kernels in {own}"] if own else []
            reasons = Counter(_kind(choice.reason) for choice in found if not choice.sparse)
            described += [f"dense in {count} ({reason})" for reason, count in reasons.items()]
            alike.setdefault(", ".join(described), []).append(product)
        parts = [f"{', '.join(products)} {said}" for said, products in alike.items()]
        if self.saved_ms:
            both = [c for _, c in self._choices() if c.saved_ms and c.ms and c.dense_ms]
            ms, dense = sum(c.ms or 0.0 for c in both), sum(c.dense_ms or 0.0 for c in both)
            parts.append(
                f"sparse products {ms:.3g} ms a micro-batch of {self.tokens} tokens in the place "
                f"of {dense:.3g} ms"
            )
        if self.repack_in_vain:
            parts.append("repack_backward has no effect: dgrad is dense")
        return f"products of {len(self.layers)} layers: {'; '.join(parts)}"


def _kind(reason: str) -> str:
    """A reason without the numbers of a single layer, so that equal reasons can be counted."""
    return reason.partition(": ")[0]


def explain(
    chosen: Products,
    sparse: Products,
    shape: tuple[int, int],
    biased: bool,
    dtype: torch.dtype,
    device: torch.device,
    tokens: int,
    matmul: str | None,
) -> dict[str, Choice]:
    """The choices and reasons for one layer, given the `chosen` products that
    `gemms.choose_products` returned for the other arguments."""
    found = {}
    for name, problem in problems(sparse, shape, biased, dtype, tokens).items():
        kernels, ms, dense_ms, reason = chosen.kernels(name), None, None, ""
        if getattr(sparse, name):
            layouts = (getattr(chosen.layouts, name),) if kernels else None
            times = measured(problem, device, layouts)
            if times is not None:
                ms, dense_ms = None if math.isinf(times.ms) else times.ms, times.dense_ms
        if not kernels:
            reason = _why_dense(name, sparse, shape, dtype, device, asked_for(matmul))
            if not reason and ms is None:
                reason = "no sparse kernel gives the right product"
            elif not reason:
                reason = f"measured to be slower: {ms:.3g} ms, dense {dense_ms:.3g} ms"
        found[name] = Choice(bool(kernels), reason, ms, dense_ms, kernels)
    return found


def _why_dense(
    name: str,
    sparse: Products,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    matmul: str,
) -> str:
    """The reason why a product is dense; empty if it was measured to be slower."""
    if not getattr(sparse, name):
        return "no operand is 2:4 along the dimension that is summed over"
    if matmul == "dense":
        return "matmul=dense"
    if reason := refused(sparse, shape, dtype, device, matmul):
        return reason
    return "" if device.type == "cuda" else "sparse products are emulated here"
