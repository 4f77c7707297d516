"""Checks that products and gradients equal those of plain PyTorch, before a time is reported."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common_kernels import compress_nm, expand_nm, fake_fp8, quantize_fp8, relu24, unpack_mask
from experiments.bench.variants import FORMATS, ON_UNITS, RELU2, RELU2_FP8, Bench, Setup, variant
from experiments.support.errors import UserError
from methods.nn.compressed import CompressedLinear
from methods.nn.gemms import sample_tokens
from methods.nn.linear import SparseLinear


def expected(layer: nn.Linear, x: Tensor, dy: Tensor, fp8: str = "") -> dict[str, Tensor]:
    """The three products of a converted linear for x [T, in] and dy [T, out], by masked dense
    formulas in fp32, quantised as the layer does (`fp8`: a key of FORMATS, or none). The gradient
    is that of `layer.weight`, or of SLoPe's values."""
    x, dy32, (forward, backward) = x.detach().float(), dy.float(), weights(layer)
    seen, sample = dy32, sampled(layer, dy)
    of_forward = of_backward = x
    if fp8:
        fprop, gradient, dgrad, wgrad = FORMATS[fp8]
        if isinstance(layer, SparseLinear) and layer.fp8:
            # e5m2 for both operands if one is 2:4, since they must share a format
            dgrad, wgrad = layer.fp8.dgrad, layer.fp8.wgrad
        forward, backward = fake_fp8(forward, fprop), fake_fp8(backward, dgrad)
        of_forward, of_backward = fake_fp8(x, fprop), fake_fp8(x, wgrad)
        seen = fake_fp8(dy32, gradient)
        if sample is not None and fp8 == ON_UNITS:  # the sample has half of dY's scale
            exact: Any = sampled(layer, dy32)
            codes, scale = quantize_fp8(dy32, gradient)
            top, scale = torch.finfo(codes.dtype).max, scale / 2
            sample = (exact * scale).clamp(-top, top).to(codes.dtype).float() / scale
        elif sample is not None:
            sample = fake_fp8(sample, gradient)
    dw = (seen if sample is None else sample).t() @ of_backward
    if isinstance(layer, CompressedLinear):
        dw = compress_nm(dw, layer.row_mask, *layer.pattern)
    return {"fprop": of_forward @ forward.t(), "dgrad": seen @ backward, "wgrad": dw}


def weights(layer: nn.Linear) -> tuple[Tensor, Tensor]:
    """The weights of fprop and of dgrad, [out, in] in fp32."""
    if isinstance(layer, CompressedLinear):
        values, pattern = layer.values.detach(), layer.pattern
        kept = torch.where(unpack_mask(layer.column_mask, values.shape[-1]), values, 0.0)
        return layer.effective_weight().float(), expand_nm(kept, layer.row_mask, *pattern).float()
    weight = layer.weight.detach()
    if isinstance(layer, SparseLinear):
        weight = layer.exact_weight() if layer.fp8 else layer.effective_weight()
    return weight.float(), weight.float()


def sampled(layer: nn.Linear, dy: Tensor) -> Tensor | None:
    """The sample of dY that wgrad takes, in fp32; None if it takes all of dY."""
    if not isinstance(layer, SparseLinear) or not layer.mvue:
        return None
    return sample_tokens(dy, layer.key, layer.mvue).float()


def tolerance(own: Setup, dtype: torch.dtype, summed: int) -> float:
    """A bound on the relative error (in norm) of a product: three roundings to `dtype` (operand,
    sample, result) and fp32 sums of `summed` terms; FP8 units sum 32 at a time to 14 bits."""
    unit = torch.finfo(dtype).eps / 2 * 3 + math.sqrt(summed) * torch.finfo(torch.float32).eps / 2
    return unit + (summed / 32 * 2**-14 if own.fp8 and not own.simulated else 0.0)


def agree(what: str, value: Tensor, truth: Tensor, allowed: float) -> None:
    """Raise a `UserError` about `what` unless the relative error in norm is at most `allowed`."""
    error = ((value.float() - truth).norm() / truth.norm()).item()
    if not error <= allowed:  # also true for NaN
        raise UserError(
            f"{what} off by {error:.2g} (allowed {allowed:.2g}): no time is reported; run `pytest "
            "tests/common_kernels tests/methods`"
        )


def check(name: str, bench: Bench, shape: tuple[int, int, int]) -> None:
    """Raise a `UserError` unless the products of a linear, the whole model, are as expected."""
    x, dy, (layer,) = bench.inputs[0], bench.gradients[0], bench.converted.layers.values()
    bench.converted.before(0)
    y: Any = bench.forward_backward(0)
    weight = layer.values if isinstance(layer, CompressedLinear) else layer.weight
    got = {"fprop": y, "dgrad": x.grad, "wgrad": weight.grad}
    for key, want in expected(layer, x, dy, variant(name).fp8).items():
        said = (
            f"{name} with products by {bench.converted.used} gives {key} for tokens x in x out = "
            f"{shape}, {x.dtype},"
        )
        agree(said, got[key], want, tolerance(variant(name), x.dtype, max(shape)))


def check_network(name: str, bench: Bench) -> None:
    """Raise a `UserError` unless a network and its gradients are those of plain PyTorch in its
    dtype, up to a few roundings; FP8 rounds four operands on the way to dX, by up to 2^-3 each, and
    samples are off by 0.2 in norm."""
    bench.converted.before(0)
    found: list[Any] = [bench.forward_backward(0), *bench.found()]
    x, w1, w2 = (t.detach().requires_grad_() for t in (bench.inputs[0], *bench.parameters))
    h = relu24(F.linear(x, w1), name not in (RELU2, RELU2_FP8), backend="cpu")
    y = F.linear(h, w2)
    y.backward(bench.gradients[0])
    own = variant(name)
    want: list[Any] = [y, x.grad, w1.grad, w2.grad]
    for what, right, got in zip(("Y", "dX", "dW1", "dW2"), want, found, strict=True):
        rough = own.fp8 or ("W" in what and "dense_features" in own.options)
        allowed = 2**-2 if rough else 4 * torch.finfo(x.dtype).eps
        agree(f"{name} by {bench.converted.used} gives {what}", got, right.float(), allowed)


def check_same(
    name: str, got: list[Tensor | None], want: list[Tensor | None], noise: float = 0.0
) -> None:
    """Raise a `UserError` unless the gradients of a compiled model equal those of the model
    uncompiled. Fused code rounds differently, which can change what MVUE keeps, so only missing or
    wrong products are detected. noise: how much two runs of the same code differ."""
    error, allowed = deviation(name, got, want), 0.3 + noise
    if not error <= allowed:
        raise UserError(
            f"{name}: the gradients of the compiled model are off by {error:.2g} (allowed "
            f"{allowed:.2g}): no time is reported"
        )


def deviation(name: str, got: list[Tensor | None], want: list[Tensor | None]) -> float:
    """The norm of the difference of two gradients over that of `want`; both have all parameters."""
    difference, size = torch.zeros(2, dtype=torch.float64)
    for g, w in zip(got, want, strict=True):
        if (g is None) != (w is None):
            raise UserError(f"{name}: a parameter has a gradient only compiled or only uncompiled")
        if g is not None and w is not None:
            difference += (g.float() - w.float()).square().sum().cpu()
            size += w.float().square().sum().cpu()
    return (difference / size).sqrt().item() if difference else 0.0
