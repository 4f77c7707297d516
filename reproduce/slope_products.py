"""Measures SLoPe's products by the shape of the weight, and the zeros that its second mask adds.

For SLoPe's Figures 3a, 4, B.2 and B.4. `MEASURES` as explained in speed_setup.py.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common_kernels import double_prune_mask, nm_mask, pack24
from common_kernels.pack import BUFFERED, Packed24
from common_kernels.pack.operands import pack24_
from experiments.bench.timing import Call, in_turns
from methods.nn.operands import Dense, Packed
from methods.slope import parse_pattern
from reproduce.engine import Report
from reproduce.slope_layer import DenseTiles, check, packed_tiles, sparse_products
from reproduce.speed_setup import BUFFERS, Metrics, clock_and_power, rank_suffix

if TYPE_CHECKING:
    from reproduce.bench import Config

SHARES = (1.0, 2.0, 5.0, 10.0)  # ranks of low-rank products, in percent of the width


# --- products by the shape of the weight ---------------------------------------------------------


def of_shapes(config: Config, _: Report) -> tuple[Metrics, str]:
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


def low_rank(x: list[Tensor], config: Config) -> dict[str, Call]:
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


# --- the zeros of double pruning ------------------------------------------------------------------


def of_imposed_zeros(config: Config, _: Report) -> tuple[Metrics, str]:
    """Share of all weights that the second mask, along the columns, sets to zero in addition to the
    first, along the rows.

    For a normal weight [width, width] whose first mask is `random` or keeps the largest entries
    (`magnitude`), and by the formula of the paper's lemma (`closed_form`).
    """
    _glob, n, m = parse_pattern(f"*={config.pattern}")
    generator = torch.Generator(config.on).manual_seed(config.seed)
    weight, other = (
        torch.randn(config.width, config.width, generator=generator, device=config.on)
        for _ in range(2)
    )
    metrics: Metrics = {"sm_mhz": None, "watts": None, "closed_form": imposed(n, m)}
    for name, scores in {"random": other, "magnitude": weight}.items():
        once = torch.where(nm_mask(scores, n, m), weight, 0.0)
        twice = torch.where(double_prune_mask(once, n, m), once, 0.0)
        before, after = ((pruned != 0).double().mean().item() for pruned in (once, twice))
        metrics |= {name: before - after, f"{name}_density": after}
    return metrics, "masks alone"


def imposed(n: int, m: int) -> float:
    """The share by the lemma: E[max(B - n, 0)] / m, where B has the binomial distribution of m
    draws with probability n / m."""
    share = n / m
    surplus = (
        math.comb(m, j) * share**j * (1 - share) ** (m - j) * (j - n) for j in range(n + 1, m + 1)
    )
    return sum(surplus) / m


MEASURES = {"shapes": of_shapes, "imposed_zeros": of_imposed_zeros}
