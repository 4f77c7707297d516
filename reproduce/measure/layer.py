"""Measures one decoder layer under SLoPe with and without its parts: attention, adapters, tiles.

For SLoPe's Tables 6, 7 and B.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from experiments.bench import variants
from experiments.bench.timing import Call, in_turns
from experiments.bench.variants import Bench
from methods.nn.compressed import CompressedLinear
from methods.nn.operands import Dense
from reproduce.measure.base import Layer, Report, Result
from reproduce.measure.setup import (
    BUFFERS,
    bench,
    check_once,
    clock_and_power,
    evaluating,
    gpt2,
    rank_suffix,
)
from reproduce.measure.tiles import DenseTiles, check, packed_tiles, sparse_products

# Plain attention writes the whole matrix of scores to memory; fused attention does not.
ATTENTION = {"plain": SDPBackend.MATH, "fused": SDPBackend.FLASH_ATTENTION}


@dataclass(frozen=True, kw_only=True)
class Settings(Layer):
    """A layer of OPT's shapes; ranks: of adapters, in percent of the width."""

    ranks: tuple[float, ...] = ()


def measure(config: Settings, _: Report) -> Result:
    """Speed of a layer of OPT's shapes over dense with plain attention, in training and inference.

    `_fused`: with fused attention. `_tiled`: wide weights are cut into square tiles. `_apart`:
    adapters have products and sums of their own instead of a fused kernel. All products of 2:4
    weights run sparse, even where dense ones are faster. Packing is timed without tiles, because a
    kernel that writes tiles would take as long.
    """
    products = sparse_products(config)
    for widths in ((config.width, config.ffn), (config.ffn, config.width)):
        check_once("slope", (config.tokens, *widths), config.dtype, config.on, products)
    build = partial(bench, config, build=gpt2(config), include=("*",))
    dense = build("dense")
    ranks = {"": 0, **{rank_suffix(p): max(1, round(config.width * p / 100)) for p in config.ranks}}
    whole, tiled = (
        {end: adapted(build, rank, products) for end, rank in ranks.items()} for _ in range(2)
    )
    for end in ranks:
        cut(tiled[end])
        check_equal(whole[end], tiled[end], "tiles", config)
    calls = {
        "dense": attending("plain", dense.forward_backward),
        "dense_fused": attending("fused", dense.forward_backward),
        "sparse": attending("plain", whole[""].forward_backward),
        "sparse_fused": attending("fused", whole[""].forward_backward),
        "sparse_tiled": attending("plain", tiled[""].forward_backward),
        "hooks": lambda _: whole[""].hooks(0),
        "inference dense": attending("plain", evaluating(dense)),
        "inference dense_fused": attending("fused", evaluating(dense)),
    }
    for end, built in whole.items():
        forward = evaluating(built)
        calls[f"inference sparse{end}"] = attending("plain", forward)
        calls[f"inference sparse_fused{end}"] = attending("fused", forward)
        calls[f"inference sparse_tiled{end}"] = attending("plain", evaluating(tiled[end]))
        if end:
            calls[f"inference sparse_apart{end}"] = attending("plain", apart(built))
            check_apart(built, config)
    with sixteen_bit_scores():
        times = in_turns(calls, config.on, config.repeats, BUFFERS)
    found = {name: time.ms for name, time in times.items()}
    metrics = clock_and_power(times) | {"hooks_ms": found["hooks"]}
    for name, ms in found.items():
        kind, _space, what = name.rpartition(" ")
        if kind == "inference":
            metrics[f"inference_{what}"] = found["inference dense"] / ms
        elif what != "hooks":
            step = ms + (found["hooks"] if what.startswith("sparse") else 0.0)
            metrics[f"training_{what}"] = found["dense"] / step
    return metrics, whole[""].converted.used


def adapted(build: Callable[..., Bench], rank: int, products: str) -> Bench:
    """A layer under SLoPe, with adapters of this rank from the first step on; none if it is 0."""
    options: dict[str, Any] = {"products": products}
    if rank:
        options |= {"adapter_rank": rank, "adapter_fraction": 1.0, "total_steps": 1}
    built = build("slope", **options)
    for layer in compressed(built):
        if layer.right is not None:
            nn.init.normal_(layer.right, std=0.02)
    built.converted.before(0)
    return built


def compressed(built: Bench) -> Iterator[CompressedLinear]:
    """The layers that SLoPe has converted."""
    for layer in built.converted.layers.values():
        assert isinstance(layer, CompressedLinear)
        yield layer


def attending(kind: str, call: Call) -> Call:
    """The call with this kind of attention, a key of `ATTENTION`."""

    def run(i: int) -> Any:
        with sdpa_kernel(ATTENTION[kind]):
            return call(i)

    return run


@contextmanager
def sixteen_bit_scores() -> Iterator[None]:
    """Let plain attention compute its scores in the 16-bit dtype of its inputs, as the paper's
    models do."""
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


class Apart(CompressedLinear):
    """SLoPe's linear with its adapters as two products and a sum of torch's own, which is what the
    paper compares its fused kernel with."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        fprop, _ = self.operands(x.dtype)
        sparse = fprop or Dense(self.effective_weight().to(x.dtype))
        assert self.left is not None and self.right is not None
        low_rank = F.linear(F.linear(x, self.left), self.right.t())
        return sparse.linear(x, self.bias) + low_rank / len(self.right)


def apart(built: Bench) -> Call:
    """A forward pass whose adapters have products of their own. The layers are changed for this
    pass only, because other calls time the same ones."""
    forward = evaluating(built)

    def call(i: int) -> Tensor:
        for layer in compressed(built):
            layer.__class__ = Apart
        y = forward(i)
        for layer in compressed(built):
            layer.__class__ = CompressedLinear
        return y

    return call


class Tiled(CompressedLinear):
    """SLoPe's linear with upsample tiling: a weight with more outputs than inputs is cut into tiles
    in fprop, one with fewer outputs than inputs in dgrad, which multiplies with its transpose."""

    tiles: tuple[Any, Any]  # the operands of fprop and dgrad; None for one that is not cut

    def operands(self, dtype: torch.dtype) -> tuple[Any, Any]:
        """The operands of fprop and dgrad: tiles where there are some, else those of the base
        class."""
        fprop, dgrad = super().operands(dtype)
        return self.tiles[0] or fprop, self.tiles[1] or dgrad


def cut(built: Bench) -> None:
    """Cut the layers of a model into square tiles, in place."""
    for layer in compressed(built):
        forward, backward = (w.to(layer.dtype) for w in variants.weights(layer))
        wide, packed = layer.out_features > layer.in_features, layer.packed is not None
        tiles: tuple[Any, Any] = (None, None)
        if wide:
            tiles = (packed_tiles(forward) if packed else DenseTiles(forward)), None
        elif layer.out_features < layer.in_features:
            tiles = None, (packed_tiles(backward.t()) if packed else DenseTiles(backward))
        layer.__class__ = Tiled
        assert isinstance(layer, Tiled)
        layer.tiles = tiles


def check_equal(expected: Bench, found: Bench, what: str, config: Settings) -> None:
    """Raise a `UserError` unless two models of the same weights give the same output and input
    gradient, within the rounding of their products."""
    pairs = [(b.forward_backward(0), b.inputs[0].grad) for b in (expected, found)]
    for want, got in zip(*pairs, strict=True):
        assert want is not None and got is not None
        check(got, want, what, config)


def check_apart(built: Bench, config: Settings) -> None:
    """Raise a `UserError` unless adapters with products of their own give the output of fused
    ones."""
    check(apart(built)(0), evaluating(built)(0), "adapters apart", config)
