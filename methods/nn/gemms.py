"""The three GEMMs of a linear layer, each of which can be sparse.

Shapes: T tokens, X [T, in], W [out, in], Y [T, out]; leading dims of X are flattened into T.

    fprop    Y  = X Wf^T + b      Wf: the operand of fprop (2:4 along `in`)
    dgrad    dX = dY Wb           Wb: the operand of dgrad
    wgrad    dW = S(dY)^T X       S: identity, or an unbiased 2:4 sample of groups of four
                                  consecutive tokens (MVUE, FST section 3.2)

A method chooses the operands. They are prepared once per optimizer step, so that a micro-batch only
pays for its three products. dW goes unchanged to the dense master weight (straight-through: neither
masked nor scaled). The bias gradient is the plain sum of dY.

An operand is `Dense`, `Packed` if it is 2:4 along the summed dim and the sparse product is faster
(see `Products`), or `Fp8` (operands.py). fp8_gemms.py has the three products in FP8.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common_kernels.matmul import (
    Problem,
    cuda,
    fastest,
    library_layout,
    own_layout,
    sample_mm24,
    unavailable,
)
from common_kernels.mvue import sampled24
from common_kernels.pack import BUFFERED
from common_kernels.pack.operands import MULTIPLE, TOKENS

from .operands import Dense, Packed, flat, save, saved

MATMULS = ("auto", "cusparselt", "cuda", "dense")
MATMUL_VARIABLE = "SPARSE24_MATMUL"


class _Brief:
    """A dataclass that prints only the fields that differ from their defaults."""

    def __repr__(self) -> str:
        plain = type(self)()
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        shown = [f"{n}={value!r}" for n, value in values.items() if value != getattr(plain, n)]
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class Layouts(_Brief):
    """The layouts of the packed operands of the three products."""

    fprop: str = BUFFERED
    dgrad: str = BUFFERED
    wgrad: str = BUFFERED


@dataclass(frozen=True, repr=False)
class Products(_Brief):
    """Which of a layer's three products run on packed operands; the others are dense.

    fprop: Wf is packed. dgrad: Wb^T is packed. wgrad: the transposed sample of dY is packed. fp8:
    the operands are codes, and FP8 units multiply them (fp8_gemms.py). layouts: the layouts of the
    packed operands, which decide between cuSPARSELt and our own kernels. repack: dgrad's operand is
    packed in each backward pass instead of kept from step to step.
    """

    fprop: bool = False
    dgrad: bool = False
    wgrad: bool = False
    fp8: bool = False
    layouts: Layouts = field(default_factory=Layouts)
    repack: bool = False

    def kernels(self, name: str) -> str:
        """The kernels that run a product: `cusparselt`, `cuda` (our own), or empty if dense."""
        if not getattr(self, name):
            return ""
        return "cuda" if getattr(self.layouts, name) in cuda.LAYOUTS else "cusparselt"


DENSE = Products()


def choose_products(
    sparse: Products,
    shape: tuple[int, int],
    biased: bool,
    dtype: torch.dtype,
    device: torch.device,
    tokens: int,
    matmul: str | None,
) -> Products:
    """The products that will run sparse, out of those that have a 2:4 operand according to
    `sparse`.

    With `sparse.fp8` they run on FP8 units if there are any, whatever `matmul` says, because the
    arithmetic of FP8 units is not only a matter of speed.

    Arguments and errors are those of `base.Method.accelerate`; shape (out, in), bias, dtype and
    device describe one layer.
    """
    matmul = asked_for(matmul)
    if tokens < 1:
        raise ValueError(f"tokens={tokens}; give the number of tokens in a micro-batch")
    if sparse == DENSE or (matmul == "dense" and not sparse.fp8):
        return DENSE
    reason = refused(sparse, shape, dtype, device, matmul)
    if reason and matmul in ("cusparselt", "cuda"):
        advice = ""
        if refused(sparse, shape, torch.bfloat16, device, matmul) != reason:
            advice = "convert(model, dtype=torch.bfloat16) gives products a dtype; or "
        raise RuntimeError(f"matmul={matmul!r}: {reason}; {advice}choose auto or dense")
    if reason:
        return DENSE
    if matmul == "cusparselt":
        return replace(sparse, layouts=Layouts(*[library_layout(device)] * 3))
    asked = {
        name: problem
        for name, problem in problems(sparse, shape, biased, dtype, tokens).items()
        if getattr(sparse, name)
    }
    if matmul == "cuda":
        own = {name: own_layout(problem, device) for name, problem in asked.items()}
        return replace(sparse, layouts=Layouts(**own))
    if device.type != "cuda":
        return DENSE  # an emulated product is slower
    if matmul == "dense":
        return Products(fp8=True)
    found = {name: fastest(problem, device) for name, problem in asked.items()}
    layouts = {n: best.layout for n, best in found.items() if best is not None and best.wins}
    faster = {name: name in layouts for name in found}
    return replace(sparse, **faster, layouts=Layouts(**layouts))


def asked_for(matmul: str | None) -> str:
    """The value of the argument `matmul`, or else of the environment variable, or else `auto`.
    Raises ValueError if it is unknown."""
    matmul = matmul or os.environ.get(MATMUL_VARIABLE) or "auto"
    if matmul not in MATMULS:
        raise ValueError(f"matmul={matmul!r}: choose one of {', '.join(MATMULS)}")
    return matmul


def refused(
    sparse: Products,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    matmul: str,
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
    return {
        "fprop": Problem(rows, columns, linear, forward, result, True, True, biased),
        "dgrad": Problem(columns, rows, linear, backward, result, True, True),
        "wgrad": Problem(rows, summed, columns, backward, out_dtype, sparse.fp8, False),
    }


class _SparseLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, fprop, dgrad, bias, key, mvue, packs_sample):
        ctx.mvue, ctx.packs_sample = mvue, packs_sample
        ctx.weight_dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype
        save(ctx, dgrad, x, key)
        return fprop.linear(x, bias)

    @staticmethod
    def backward(ctx, grad_y):
        dgrad, x, key = saved(ctx)
        grad_x = grad_weight = grad_bias = None
        with without_autocast(grad_y):
            if ctx.needs_input_grad[0]:
                grad_x = dgrad.grad(grad_y)
            if ctx.needs_input_grad[1]:
                if ctx.packs_sample:
                    stride = groups_of(grad_y)
                    grad_weight = sample_mm24(grad_y, x, key, stride, layout=ctx.packs_sample)
                else:
                    dy = flat(grad_y)
                    sample = sample_tokens(dy, key, ctx.mvue) if ctx.mvue else dy
                    grad_weight = sample.t() @ flat(x)
                grad_weight = grad_weight.to(ctx.weight_dtype)
            if ctx.needs_input_grad[4]:
                grad_bias = flat(grad_y).sum(0).to(ctx.bias_dtype)
        return grad_x, grad_weight, None, None, grad_bias, *(None,) * 3


_NOTHING: AbstractContextManager[Any] = nullcontext()


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A context without autocast on x's device; one that is shared if autocast is off already,
    since switching takes as long as a launch."""
    device = x.device.type
    on = torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else _NOTHING


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which products take x: autocast's if it is enabled, else x's own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def under_autocast(x: Tensor) -> Tensor:
    """x, cast to autocast's dtype if autocast is enabled."""
    return x.to(autocast_dtype(x))


def groups_of(dy: Tensor) -> int:
    """The number of groups of four tokens in dY [..., out]; the last one may be partial."""
    return -(-(dy.numel() // dy.shape[-1]) // 4) * dy.shape[-1]


def sample_tokens(dy: Tensor, key: Tensor, design: str) -> Tensor:
    """An unbiased 2:4 sample of dY [T, out] along its tokens, without a transposed copy.

    Groups are numbered over the whole global batch: micro-batch `key[1]` follows `key[1]` others of
    the same size. If T is a multiple of 4, the random bits therefore depend neither on how a batch
    is divided into equal micro-batches nor on the number of ranks. Micro-batches of unequal size,
    or a layer used twice in a forward pass, may get the same bits twice; each sample is still
    unbiased.
    """
    tokens = len(dy)
    if tokens % 4:
        dy = F.pad(dy, (0, 0, 0, -tokens % 4))
    return sampled24(dy, key, groups_of(dy), design, 0)[:tokens]


def sparse_linear(
    x: Tensor,
    weight: Tensor,
    fprop: Dense | Packed,
    dgrad: Dense | Packed,
    bias: Tensor | None,
    key: Tensor | None,
    mvue: str | None = None,
    packs_sample: str | None = None,
) -> Tensor:
    """`x` [..., in] times the operand of fprop, with the backward pass of the module docstring.

    Args:
        weight: dense master weight [out, in], which only receives dW.
        fprop, dgrad: operands in x's dtype.
        bias: [out] or None.
        key: int64 [2], (Philox seed of this layer and step, index of the micro-batch in the
            global batch); None if nothing is sampled.
        mvue: design of the sample of dY (`exact`, `sequential`), or None for the dense product.
        packs_sample: the layout of wgrad's packed sample, which needs mvue `exact`; None if the
            sample is not packed.
    """
    return _SparseLinear.apply(x, weight, fprop, dgrad, bias, key, mvue, packs_sample)
