"""Measures the throughput of single operators: mask search, GEGLU and products.

Before an operator is timed, it is compared with a plain formulation on the same shape. `MEASURES`
as explained in speed_setup.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from common_kernels import backend, geglu, nm_mask, pack24, transposable_mask24
from common_kernels.masks import ALGORITHMS
from common_kernels.matmul import linear24, unavailable
from common_kernels.pack import BUFFERED, Packed24
from experiments.bench import arms, dense_fp8, ops
from experiments.bench.timing import Call, in_turns
from experiments.support.errors import UserError
from reproduce.engine import Report
from reproduce.speed_setup import BUFFERS, Metrics, clock_and_power

if TYPE_CHECKING:
    from reproduce.bench import Config

CACHE = 128 * 2**20  # bytes, more than the last cache of any GPU measured here
FP32 = torch.float32
Product = Callable[[list[Tensor], Tensor, torch.dtype, int], Tensor]


def buffers(config: Config, nbytes: int) -> int:
    """The number of buffers of this size that together do not fit into a GPU's cache."""
    return BUFFERS if config.on.type == "cpu" else max(BUFFERS, math.ceil(CACHE / nbytes))


def of_search(config: Config, _: Report) -> tuple[Metrics, str]:
    """Throughput of the search for transposable masks of a weight [inner, width], in bytes of the
    weight per second: by algorithm, in the precision of the config and in fp32 (`_fp32`)."""
    shape = (config.ffn, config.width)
    dtypes = {"": config.dtype, "_fp32": FP32}
    count = buffers(config, math.prod(shape) * config.dtype.itemsize)
    with config.on:
        weights = {key: list(torch.randn(count, *shape, dtype=d)) for key, d in dtypes.items()}
    calls: dict[str, Call] = {}
    for key, rotating in weights.items():
        ops.check("transposable_mask24", ops.OPS["transposable_mask24"], rotating[0])
        check_two_approx(rotating[0])
        for algorithm in ALGORITHMS:
            calls[algorithm + key] = partial(search, rotating, algorithm)
    times = in_turns(calls, config.on, config.repeats, count)
    metrics = clock_and_power(times)
    for key, rotating in weights.items():
        own = {algorithm: times[algorithm + key].ms for algorithm in ALGORITHMS}
        metrics |= {f"{a}{key}_ms": ms for a, ms in own.items()}
        metrics |= {f"{a}{key}_gbs": rotating[0].nbytes / ms / 1e6 for a, ms in own.items()}
        metrics[f"over_two_approx{key}"] = own["two_approx"] / own["exact"]
    return metrics, backend.resolve(config.on)


def search(weights: list[Tensor], algorithm: str, i: int) -> Tensor:
    """The mask of weight number i."""
    return transposable_mask24(weights[i], algorithm)


def check_two_approx(w: Tensor) -> None:
    """Raise a `UserError` unless the 2-approximation keeps at most two entries in each row and
    column of a tile, and at least half of the magnitude that the exact search keeps."""
    found, exact = (ops.tiles(transposable_mask24(w, a)) for a in ("two_approx", "exact"))
    magnitude = ops.tiles(w.abs())
    legal = (found.sum(-1) <= 2).all() and (found.sum(-2) <= 2).all()
    kept, best = ((magnitude * mask).sum((-1, -2)) for mask in (found, exact))
    if not (legal and (2 * kept >= best * (1 - 1e-6)).all()):
        raise UserError(
            f"the masks of the 2-approximation are wrong on {tuple(w.shape)}: no time is reported"
        )


def of_geglu(config: Config, _: Report) -> tuple[Metrics, str]:
    """Throughput of our GEGLU and of torch's, forward and backward, in bytes that must be read and
    written per second.

    The inputs [tokens, 2 inner] are column-major, as sparse products return them (`column`), or
    row-major (`row`).
    """
    tokens, wide = config.tokens, 2 * config.ffn
    count = buffers(config, tokens * wide * config.dtype.itemsize)
    functions = {"ours": geglu, "torch": plain_geglu}
    calls: dict[str, Call] = {}
    for layout in ("column", "row"):
        with config.on:
            x = random(count, (tokens, wide), layout, config.dtype)
            dy = random(count, (tokens, wide // 2), layout, config.dtype)
        for name in ("geglu", "geglu, forward and backward"):
            ops.check(name, ops.OPS[name], x[0])
        for kind, function in functions.items():
            leaves = [t.requires_grad_() for t in x]
            calls[f"{kind}_{layout}_forward"] = partial(forward, function, x)
            calls[f"{kind}_{layout}"] = partial(both, function, leaves, dy)
    times = in_turns(calls, config.on, config.repeats, count)
    entries = tokens * wide * config.dtype.itemsize
    metrics = clock_and_power(times)
    for name, time in times.items():
        moved = (1.5 if name.endswith("_forward") else 4.0) * entries
        metrics |= {f"{name}_ms": time.ms, f"{name}_gbs": moved / time.ms / 1e6}
    metrics["over_torch"] = times["torch_column"].ms / times["ours_column"].ms
    return metrics, backend.resolve(config.on)


def random(count: int, shape: tuple[int, int], layout: str, dtype: torch.dtype) -> list[Tensor]:
    """`count` random matrices of this shape, whose columns or rows are contiguous."""
    if layout == "row":
        return list(torch.randn(count, *shape, dtype=dtype))
    return [x.t() for x in torch.randn(count, *shape[::-1], dtype=dtype)]


def plain_geglu(x: Tensor) -> Tensor:
    """GEGLU by torch's operators, in x's dtype."""
    value, gate = x.chunk(2, -1)
    return value * F.gelu(gate, approximate="tanh")


def forward(function: Callable[[Tensor], Tensor], xs: list[Tensor], i: int) -> Tensor:
    """The function of input number i, computed without autograd."""
    with torch.no_grad():
        return function(xs[i])


def both(
    function: Callable[[Tensor], Tensor], xs: list[Tensor], dys: list[Tensor], i: int
) -> Tensor:
    """The gradient of input number i, by a forward and a backward pass."""
    return ops.gradients(function)(xs[i], dys[i])


def of_product(config: Config, _: Report) -> tuple[Metrics, str]:
    """Throughput of the product of two square matrices of `width`, in operations of the dense
    product. One operand is 2:4 unless the method is dense; both are FP8 values if the method
    trains with such."""
    setup, size = arms.ARMS[config.method], config.width
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
    error = arms.relative_error(product(0), x[0].float() @ w.float().t())
    allowed = arms.tolerance(setup, config.dtype, size)
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


MEASURES = {"search": of_search, "geglu": of_geglu, "product": of_product}
