"""Measures the product of two square matrices, dense or 2:4."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from common_kernels import nm_mask, pack24
from common_kernels.matmul import linear24, unavailable
from common_kernels.pack import BUFFERED, Packed24
from experiments.bench import dense_fp8, variants
from experiments.bench.timing import in_turns
from experiments.support.errors import UserError
from reproduce.measure.base import MethodLayer, Report, Result
from reproduce.measure.setup import BUFFERS, clock_and_power

Product = Callable[[list[Tensor], Tensor, torch.dtype, int], Tensor]


@dataclass(frozen=True, kw_only=True)
class Settings(MethodLayer):
    """Matrices width x width."""


def measure(config: Settings, _: Report) -> Result:
    """Throughput of the product of two square matrices of `width`, in operations of the dense
    product. One operand is 2:4 unless the method is dense; both are FP8 values if the method
    trains with such."""
    setup, size = variants.variant(config.method), config.width
    with config.on:
        x = list(torch.randn(BUFFERS, size, size, dtype=config.dtype))
        w = torch.randn(size, size, dtype=config.dtype)
    if setup.fp8:
        x, w = [a.to(dense_fp8.E4M3) for a in x], w.to(dense_fp8.E4M3)
    call: Product = multiply
    used = "dense"
    if setup.method != "dense":
        mask = nm_mask(w.to(config.dtype))
        w = (w.to(config.dtype) * mask).to(w.dtype)
        if unavailable("cusparselt", config.on, w.dtype) is None:
            call, used = multiply24(pack24(w, mask, layout=BUFFERED)), "cusparselt"
    product = partial(call, x, w, config.dtype)
    error = variants.relative_error(product(0), x[0].float() @ w.float().t())
    allowed = variants.tolerance(setup, config.dtype, size)
    if not error <= allowed:
        raise UserError(
            f"the product of {config.method} is off by {error:.2g} (allowed {allowed:.2g}): "
            "no time is reported"
        )
    time = in_turns({"product": product}, config.on, config.repeats, BUFFERS)
    ms = time["product"].ms
    return {"tflops": 2 * size**3 / ms / 1e9, "ms": ms, **clock_and_power(time)}, used


def multiply(x: list[Tensor], w: Tensor, dtype: torch.dtype, i: int) -> Tensor:
    """x W^T in `dtype`, by torch's product for the dtype of W."""
    if w.dtype == dtype:
        return F.linear(x[i], w)
    one = torch.ones((), device=w.device)
    return dense_fp8.product(x[i], w, (one, one), dtype, fast=True)


def multiply24(packed: Packed24) -> Product:
    """A function as `multiply`, with a packed W."""
    return lambda x, _, dtype, i: linear24(packed, x[i], out_dtype=dtype)
