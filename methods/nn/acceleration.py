"""The choice of the products that `Method.accelerate` runs sparse, with reasons and savings."""

import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from common_kernels.matmul import (
    Problem,
    fastest,
    library_layout,
    library_layout_for,
    measured,
    own_layout,
    unavailable,
)
from common_kernels.pack.operands import MULTIPLE, TOKENS

from . import matrices, sharding
from .gemms import DENSE, Layouts, Products, kernels_of
from .linear import SparseLinear

MATMULS = ("auto", "cusparselt", "cuda", "dense")
MATMUL_VARIABLE = "SPARSE24_MATMUL"
NAMES = ("fprop", "dgrad", "wgrad")


@dataclass(frozen=True)
class Choice:
    """The decision whether one product of a layer runs sparse.

    layout: that of the packed operand if it does; it decides between cuSPARSELt and our kernels.
    reason: why the product is dense; empty if it is sparse.
    ms, dense_ms: measured times of the sparse and of the dense product by themselves, in a
        micro-batch; an FP8 product is compared with dense FP8 if cuBLAS has it. None if the times
        were not needed.
    """

    layout: str = ""
    reason: str = ""
    ms: float | None = None
    dense_ms: float | None = None

    @property
    def sparse(self) -> bool:
        return bool(self.layout)

    @property
    def kernels(self) -> str:
        """The kernels that run it if it is sparse: `cusparselt`, or `cuda` for our own."""
        return kernels_of(self.layout)

    @property
    def saved_ms(self) -> float:
        """Milliseconds that the sparse product saves; 0 if it is dense or was not measured."""
        if not self.sparse or self.ms is None or self.dense_ms is None:
            return 0.0
        return self.dense_ms - self.ms


# The decision for a layer: the products that run sparse, and the choice for each product by name.
Chosen = tuple[Products, dict[str, Choice]]


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
        """The speed-up of a step of `step_ms` milliseconds by its sparse products alone."""
        return 1 + self.saved_ms * micro_batches / step_ms

    def gains(self) -> dict[str, float | None]:
        """The speed-up of each layer's measured products over dense ones; None if unmeasured."""
        found: dict[str, float | None] = {}
        for name, choices in self.layers.items():
            dense = sum(choice.dense_ms or 0.0 for choice in choices.values())
            saved = sum(choice.saved_ms for choice in choices.values())
            found[name] = dense / (dense - saved) if dense else None
        return found

    def as_dict(self) -> dict[str, Any]:
        """The record as plain values for a JSON file."""
        fields = "sparse", "reason", "ms", "dense_ms", "kernels"
        layers = {
            name: {
                product: {field: getattr(choice, field) for field in fields}
                for product, choice in choices.items()
            }
            for name, choices in self.layers.items()
        }
        gains = {"saved_ms": self.saved_ms, "gains": self.gains()}
        return {"tokens": self.tokens, **gains, "layers": layers}

    def _choices(self) -> list[tuple[str, Choice]]:
        return [(n, choice) for choices in self.layers.values() for n, choice in choices.items()]

    def __str__(self) -> str:
        """One line: which products run sparse in how many layers, why others do not, time saved."""
        if not self.layers:
            return "no layer is converted: all products are dense"
        alike: dict[str, list[str]] = {}  # products that share a description
        for product in NAMES:
            found = [choice for name, choice in self._choices() if name == product]
            sparse = sum(choice.sparse for choice in found)
            described = [f"sparse in {sparse}"] if sparse else []
            own = sum(choice.kernels == "cuda" for choice in found)
            described += [f"by our own kernels in {own}"] if own else []
            # Without the numbers of a single layer, so that equal reasons are counted.
            reasons = Counter(c.reason.partition(": ")[0] for c in found if not c.sparse)
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


def choose_all(
    layers: Mapping[str, SparseLinear], tokens: int, matmul: str | None
) -> dict[str, Chosen]:
    """`choose` for each layer by name; a matrix that its module multiplies itself stays dense."""
    found = {}
    for name, layer in layers.items():
        if matrices.is_placed(layer):
            why = Choice(reason=f"multiplied by {type(vars(layer)['place'][0]).__name__} itself")
            found[name] = DENSE, dict.fromkeys(NAMES, why)
        else:
            shape, biased = layer.packed_shape, layer.bias is not None
            device = sharding.device_of(layer)
            sparse = layer.candidates()
            found[name] = choose(sparse, shape, biased, layer.dtype, device, tokens, matmul)
    return found


def choose(
    sparse: Products,
    shape: tuple[int, int],
    biased: bool,
    dtype: torch.dtype,
    device: torch.device,
    tokens: int,
    matmul: str | None,
) -> Chosen:
    """The products of a layer that run sparse, out of those that have a 2:4 operand according to
    `sparse`, with the decision for each.

    With `sparse.fp8` they run on FP8 units if there are any, whatever `matmul` says, because the
    arithmetic of FP8 units is not only a matter of speed.

    Arguments and errors are those of `base.Method.accelerate`; shape (out, in), bias, dtype and
    device describe the layer.
    """
    matmul = matmul or os.environ.get(MATMUL_VARIABLE) or "auto"
    if matmul not in MATMULS:
        raise ValueError(f"matmul={matmul!r}: choose one of {', '.join(MATMULS)}")
    if tokens < 1:
        raise ValueError(f"tokens={tokens}; give the number of tokens in a micro-batch")
    refusal, forced = refused(sparse, shape, dtype, device, matmul), matmul in MATMULS[1:3]
    if refusal and forced and sparse != DENSE:
        advice = ""
        if refused(sparse, shape, torch.bfloat16, device, matmul) != refusal:
            advice = "convert(model, dtype=torch.bfloat16) gives products a dtype; or "
        raise RuntimeError(f"matmul={matmul!r}: {refusal}; {advice}choose auto or dense")
    if not refusal and not forced and device.type != "cuda":
        refusal = "sparse products are emulated here"
    library = matmul == "cusparselt" and sparse != DENSE
    layouts = dict.fromkeys(NAMES, library_layout(device)) if library else {}
    choices = {}
    for name, problem in problems(sparse, shape, biased, dtype, tokens).items():
        reason, layout = "matmul=dense" if matmul == "dense" else refusal or "", ""
        if not getattr(sparse, name):
            reason = "no operand is 2:4 along the dimension that is summed over"
            choices[name] = Choice(reason=reason)
            continue
        if reason:
            best = measured(problem, device)
        elif forced:
            of = library_layout_for if library else own_layout
            layout = of(problem, device)
            best = measured(problem, device, (layout,))
        else:
            best = fastest(problem, device)
            if best is not None and best.wins:
                layout = best.layout
            elif best is None or math.isinf(best.ms):
                reason = "no sparse kernel gives the right product"
            else:
                reason = f"measured to be slower: {best.ms:.3g} ms, dense {best.dense_ms:.3g} ms"
        ms, dense_ms = (None, None) if best is None else (best.ms, best.dense_ms)
        ms = None if ms is None or math.isinf(ms) else ms
        choices[name] = Choice(layout, reason, ms, dense_ms)
    layouts |= {name: choice.layout for name, choice in choices.items() if choice.sparse}
    runs = {name: choice.sparse for name, choice in choices.items()}
    fp8 = sparse.fp8 and not refusal
    of_input = sparse.of_input and any(runs.values())
    products = Products(**runs, fp8=fp8, layouts=Layouts(**layouts), of_input=of_input)
    return products, choices


def refused(
    sparse: Products, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, matmul: str
) -> str | None:
    """The reason why no product of such a layer can run sparse; None if products can."""
    rows, columns = shape
    backend = "cuda" if matmul == "cuda" else "cusparselt"
    reason = unavailable(backend, device, torch.float8_e4m3fn if sparse.fp8 else dtype)
    if reason is None and (rows % MULTIPLE or columns % MULTIPLE):
        reason = f"a weight [{rows}, {columns}] is no multiple of {MULTIPLE} in both dims"
    return reason


def problems(
    sparse: Products, shape: tuple[int, int], biased: bool, dtype: torch.dtype, tokens: int
) -> dict[str, Problem]:
    """The three products of a layer by name, as problems to be measured."""
    rows, columns = shape
    forward = backward = result = out_dtype = dtype
    if sparse.fp8:
        forward, backward = torch.float8_e4m3fn, torch.float8_e5m2
        result, out_dtype = torch.bfloat16, torch.float32
    multiples = (16, MULTIPLE) if sparse.fp8 else (8, TOKENS)
    linear, summed = (-(-tokens // multiple) * multiple for multiple in multiples)
    biased = biased and not sparse.fp8
    blocks = -(-tokens // MULTIPLE) * MULTIPLE if sparse.of_input else summed
    of_dy = Problem(rows, blocks, columns, backward, out_dtype, sparse.fp8, False)
    if sparse.of_input:
        of_x = Problem(columns, blocks, rows, dtype, dtype, False, True)
        return {
            "fprop": Problem(blocks, columns, rows, forward, result, True, False),
            "dgrad": Problem(blocks, rows, columns, backward, result, sparse.fp8, False),
            "wgrad": of_x if sparse.fprop else of_dy,
        }
    return {
        "fprop": Problem(rows, columns, linear, forward, result, True, True, biased),
        "dgrad": Problem(columns, rows, linear, backward, result, True, True),
        "wgrad": of_dy,
    }
