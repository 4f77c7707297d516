"""Measures SLoPe's products by the shape of the weight: its Figures 3a, 4 and B.2."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common_kernels import nm_mask, pack24
from common_kernels.pack import BUFFERED, Packed24
from common_kernels.pack.operands import pack24_
from experiments.bench.timing import Call, in_turns
from methods.nn.operands import Dense, Packed
from reproduce.measure.base import Layer, Report, Result
from reproduce.measure.setup import BUFFERS, clock_and_power, rank_suffix
from reproduce.measure.tiles import DenseTiles, check, packed_tiles, sparse_products

SHARES = (1.0, 2.0, 5.0, 10.0)  # ranks of low-rank products, in percent of the width


@dataclass(frozen=True, kw_only=True)
class Settings(Layer):
    """Weights of several shapes made from width x width."""


def measure(config: Settings, _: Report) -> Result:
    """Speed of 2:4 products over dense ones by the shape of the weight, and of low-rank products
    over those of full rank.

    `tiled`: a wide weight cut into squares. `setup_ms`: time to choose the mask of a square weight
    and pack it; `multiply_ms`: time of its product.
    """
    size, tokens, dtype = config.width, config.tokens, config.dtype
    packed = sparse_products(config) == "cusparselt"
    shapes = {
        "attention": (size, size),
        "upsample": (4 * size, size),
        "downsample": (size, 4 * size),
    }
    calls: dict[str, Call] = {}
    for name, shape in shapes.items():
        with config.on:
            w = torch.randn(shape, dtype=dtype) / math.sqrt(shape[1])
            x = list(torch.randn(BUFFERS, tokens, shape[1], dtype=dtype))
        pruned = torch.where(nm_mask(w), w, 0.0)
        sparse: dict[str, Any] = {name: whole(pruned, packed)}
        if name == "upsample":
            sparse["tiled"] = packed_tiles(pruned) if packed else DenseTiles(pruned)
        if name == "attention":
            calls["setup"] = setup(w, packed)
            calls |= low_rank(x, config)
        calls[f"dense {name}"] = partial(product, Dense(w), x)
        for kind, operand in sparse.items():
            check(product(operand, x, 0), product(Dense(pruned), x, 0), kind, config)
            calls[f"sparse {kind}"] = partial(product, operand, x)
    times = in_turns(calls, config.on, config.repeats, BUFFERS)
    found = {name: time.ms for name, time in times.items()}
    metrics = clock_and_power(times)
    for kind in (*shapes, "tiled"):
        dense = found[f"dense {'upsample' if kind == 'tiled' else kind}"]
        metrics[f"{kind}_speedup"] = dense / found[f"sparse {kind}"]
    for share in SHARES:
        metrics[f"rank{rank_suffix(share)}_speedup"] = (
            found["rank full"] / found[f"rank{rank_suffix(share)}"]
        )
    multiply = found["sparse attention"]
    metrics |= {"setup_ms": found["setup"], "multiply_ms": multiply}
    metrics["setup_over_multiply"] = found["setup"] / multiply
    return metrics, "cusparselt" if packed else "dense"


def whole(pruned: Tensor, packed: bool) -> Dense | Packed:
    """The operand of a 2:4 matrix, packed or dense, in one piece."""
    if not packed:
        return Dense(pruned)
    matrix = pack24(pruned, pruned != 0, BUFFERED)
    return Packed(matrix.buffer, matrix.shape, matrix.dtype)


def product(operand: Any, x: list[Tensor], i: int) -> Tensor:
    """X A^T of input number i."""
    return operand.linear(x[i], None)


def setup(w: Tensor, packed: bool) -> Call:
    """A call that chooses the 2:4 mask of a weight and packs it."""
    if not packed:
        return lambda _: pack24(w, nm_mask(w))
    out = Packed24.empty((w.shape[0], w.shape[1]), w.dtype, w.device)
    return lambda _: pack24_(out, w, "magnitude")


def low_rank(x: list[Tensor], config: Settings) -> dict[str, Call]:
    """Calls of the products (X L) R, by the rank of L and R."""
    size = config.width
    calls: dict[str, Call] = {}
    ranks = {rank_suffix(share): max(1, round(size * share / 100)) for share in SHARES}
    for name, rank in {**ranks, " full": size}.items():
        with config.on:
            left, right = (torch.randn(s, dtype=config.dtype) for s in ((rank, size), (size, rank)))
        calls[f"rank{name}"] = partial(two_products, x, left, right)
    return calls


def two_products(x: list[Tensor], left: Tensor, right: Tensor, i: int) -> Tensor:
    """(X L) R of input number i."""
    return F.linear(F.linear(x[i], left), right)
