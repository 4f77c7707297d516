"""SLoPe: products by shape, a layer with and without its parts, zeros of its second mask."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from common_kernels import nm_mask, pack24
from common_kernels.matmul import library_layout, unavailable
from common_kernels.pack import Packed24
from common_kernels.pack.operands import pack24_
from experiments.bench import variants
from experiments.bench.timing import Call
from experiments.bench.variants import Bench
from methods.nn import operands
from methods.nn.compressed import CompressedLinear
from methods.nn.operands import Dense, Packed
from reproduce.measure.base import Layer, Report, Result
from reproduce.measure.setup import (
    BUFFERS,
    adapting,
    bench,
    check_once,
    clock_and_power,
    evaluating,
    gpt2,
    rank_suffix,
)

SHARES = (1.0, 2.0, 5.0, 10.0)  # ranks of low-rank products, in percent of the width
# Plain attention writes the whole matrix of scores to memory; fused attention does not.
ATTENTION = {"plain": SDPBackend.MATH, "fused": SDPBackend.FLASH_ATTENTION}


def sparse_products(config: Layer) -> str:
    """The backend that multiplies all 2:4 weights sparse, or `dense` if there is none here."""
    available = unavailable("cusparselt", config.on, config.dtype) is None
    return "cusparselt" if config.on.type == "cuda" and available else "dense"


class DenseTiles(Dense):
    """A dense matrix that multiplies tile by tile, each tile being a square."""

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., in] -> [..., out], out being a multiple of in."""
        y = torch.cat([F.linear(x, tile) for tile in self.matrix.split(x.shape[-1])], -1)
        return y if bias is None else y + bias.to(y.dtype)

    def grad(self, dy: Tensor) -> Tensor:
        """dy [T, out] -> [T, in], in being a multiple of out."""
        return torch.cat([dy @ tile for tile in self.matrix.split(dy.shape[-1], 1)], -1)


class PackedTiles(Packed):
    """A packed matrix cut into square tiles: `buffer` is [tiles, bytes], `shape` that of a tile."""

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., in] -> [..., tiles * in]."""
        rest = self.shape, self.dtype, self.layout
        tiles = [Packed(buffer, *rest) for buffer in self.buffer]
        y = torch.cat([tile.linear(x, None) for tile in tiles], -1)
        return y if bias is None else y + bias.to(y.dtype)

    def grad(self, dy: Tensor) -> Tensor:
        """dy [T, out] -> [T, tiles * out]."""
        return self.linear(dy, None)


operands.TENSORS |= {DenseTiles: 1, PackedTiles: 1}


def packed_tiles(matrix: Tensor) -> PackedTiles:
    """A 2:4 matrix [k * size, size] cut into k packed tiles."""
    size, layout = matrix.shape[1], library_layout(matrix.device)
    buffers = [pack24(tile, tile != 0, layout).buffer for tile in matrix.split(size)]
    return PackedTiles(torch.stack(buffers), (size, size), matrix.dtype, layout)


def check(got: Tensor, want: Tensor, what: str, config: Layer) -> None:
    """Raise a `UserError` unless two results agree within the rounding of a layer's products."""
    # Four products one after the other, and the operations between them.
    allowed = 8 * variants.tolerance(variants.variant("slope"), config.dtype, config.ffn)
    variants.agree(f"{what}:", got, want.float(), allowed)


@dataclass(frozen=True, kw_only=True)
class Shapes(Layer):
    """Speed of 2:4 products over dense ones by the shape of the weight, and of low-rank products
    over those of full rank.

    `tiled`: a wide weight cut into squares. `setup_ms`: time to choose the mask of a square weight
    and pack it; `multiply_ms`: time of its product.
    """

    what: ClassVar[str] = "shapes"

    def measure(self, _: Report) -> Result:
        size, tokens, dtype = self.width, self.tokens, self.dtype
        packed = sparse_products(self) == "cusparselt"
        shapes = {
            "attention": (size, size),
            "upsample": (4 * size, size),
            "downsample": (size, 4 * size),
        }
        calls: dict[str, Call] = {}
        for name, shape in shapes.items():
            with self.on:
                w = torch.randn(shape, dtype=dtype) / math.sqrt(shape[1])
                x = list(torch.randn(BUFFERS, tokens, shape[1], dtype=dtype))
            pruned = torch.where(nm_mask(w), w, 0.0)
            sparse: dict[str, Any] = {name: whole(pruned, packed)}
            if name == "upsample":
                sparse["tiled"] = packed_tiles(pruned) if packed else DenseTiles(pruned)
            if name == "attention":
                calls["setup"] = setup(w, packed)
                calls |= low_rank(x, self)
            calls[f"dense {name}"] = partial(product, Dense(w), x)
            for kind, operand in sparse.items():
                check(product(operand, x, 0), product(Dense(pruned), x, 0), kind, self)
                calls[f"sparse {kind}"] = partial(product, operand, x)
        times = self.in_turns(calls)
        found = {name: time.ms for name, time in times.items()}
        metrics = clock_and_power(times)
        for kind in (*shapes, "tiled"):
            dense = found[f"dense {'upsample' if kind == 'tiled' else kind}"]
            metrics[f"{kind}_speedup"] = dense / found[f"sparse {kind}"]
        for name in (f"rank{rank_suffix(share)}" for share in SHARES):
            metrics[f"{name}_speedup"] = found["rank full"] / found[name]
        multiply = found["sparse attention"]
        metrics |= {"setup_ms": found["setup"], "multiply_ms": multiply}
        metrics["setup_over_multiply"] = found["setup"] / multiply
        return metrics, "cusparselt" if packed else "dense"


def whole(pruned: Tensor, packed: bool) -> Dense | Packed:
    """The operand of a 2:4 matrix, packed or dense, in one piece."""
    if not packed:
        return Dense(pruned)
    matrix = pack24(pruned, pruned != 0, library_layout(pruned.device))
    return Packed(matrix.buffer, matrix.shape, matrix.dtype, matrix.layout)


def product(operand: Any, x: list[Tensor], i: int) -> Tensor:
    """X A^T of input number i."""
    return operand.linear(x[i], None)


def setup(w: Tensor, packed: bool) -> Call:
    """A call that chooses the 2:4 mask of a weight and packs it."""
    if not packed:
        return lambda _: pack24(w, nm_mask(w))
    shape, layout = (w.shape[0], w.shape[1]), library_layout(w.device)
    out = Packed24.empty(shape, w.dtype, w.device, layout)
    return lambda _: pack24_(out, w, "magnitude")


def low_rank(x: list[Tensor], config: Shapes) -> dict[str, Call]:
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


@dataclass(frozen=True, kw_only=True)
class SlopeLayer(Layer):
    """Speed of a layer of OPT's shapes over dense with plain attention, in training and inference.

    `_fused`: with fused attention. `_tiled`: wide weights are cut into square tiles. `_apart`:
    adapters have products and sums of their own instead of a fused kernel. All products of 2:4
    weights run sparse, even where dense ones are faster. Packing is timed without tiles, because a
    kernel that writes tiles would take as long. ranks: of adapters, in percent of the width.
    """

    what: ClassVar[str] = "layer"
    ranks: tuple[float, ...] = ()

    def measure(self, _: Report) -> Result:
        products = sparse_products(self)
        for widths in ((self.width, self.ffn), (self.ffn, self.width)):
            check_once("slope", (self.tokens, *widths), self.dtype, self.on, products)
        build = partial(bench, self, build=gpt2(self), include=("*",))
        dense = build("dense")
        ranks = {"": 0, **{rank_suffix(p): max(1, round(self.width * p / 100)) for p in self.ranks}}
        whole, tiled = (
            {end: adapted(build, rank, products) for end, rank in ranks.items()} for _ in range(2)
        )
        for end in ranks:
            cut(tiled[end])
            check_equal(whole[end], tiled[end], self)
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
                check(apart(built)(0), forward(0), "adapters apart", self)
        with sixteen_bit_scores():
            times = self.in_turns(calls)
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
        options |= adapting(rank)
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


def check_equal(expected: Bench, found: Bench, config: SlopeLayer) -> None:
    """Raise a `UserError` unless two models of the same weights give the same output and input
    gradient, within the rounding of their products."""
    pairs = [(b.forward_backward(0), b.inputs[0].grad) for b in (expected, found)]
    for want, got in zip(*pairs, strict=True):
        assert want is not None and got is not None
        check(got, want, "tiles", config)
