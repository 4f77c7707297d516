"""SLoPe: products by shape, and a layer with and without its parts."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from common_kernels import nm_mask, pack24
from common_kernels.matmul import library_layout, unavailable
from common_kernels.pack import Packed24
from common_kernels.pack.operands import pack24_
from experiments.bench import gates, variants
from experiments.bench.timing import Call
from experiments.bench.variants import Bench
from methods.nn import operands
from methods.nn.compressed import CompressedLinear
from methods.nn.operands import Dense, Packed
from models.gpt2 import Block
from reproduce.measure import base
from reproduce.measure.base import Layer, Report, Result

SHARES = (1.0, 2.0, 5.0, 10.0)  # ranks of low-rank products, in percent of the width
# Plain attention writes the whole matrix of scores to memory; fused attention does not.
ATTENTION = {"plain": SDPBackend.MATH, "fused": SDPBackend.FLASH_ATTENTION}


def sparse_products(config: Layer) -> str:
    """The backend that multiplies all 2:4 weights sparse, or `dense` if there is none here."""
    available = unavailable("cusparselt", config.on, config.dtype) is None
    return "cusparselt" if config.on.type == "cuda" and available else "dense"


def whole(pruned: Tensor, packed: bool) -> Dense | Packed:
    """The operand of a 2:4 matrix, packed or dense, in one piece."""
    if not packed:
        return Dense(pruned)
    matrix = pack24(pruned, pruned != 0, library_layout(pruned.device))
    return Packed(matrix.buffer, matrix.shape, matrix.dtype, matrix.layout)


class Tiles(NamedTuple):
    """A matrix A [k * size, size] cut into k square tiles: `stack` is [k, ...] and `rest` what
    their operands have besides, () if they are dense. For dgrad it is A^T that is cut."""

    stack: Tensor
    rest: tuple[Any, ...]

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., size] -> [..., k * size]."""
        kind = Packed if self.rest else Dense
        y = torch.cat([kind(tile, *self.rest).linear(x, None) for tile in self.stack], -1)
        return y if bias is None else y + bias.to(y.dtype)

    def grad(self, dy: Tensor) -> Tensor:
        """dy [T, size] -> [T, k * size]."""
        return self.linear(dy, None)


operands.TENSORS |= {Tiles: 1}


def tiled(pruned: Tensor, packed: bool) -> Tiles:
    """A 2:4 matrix [k * size, size] in k tiles, packed or dense."""
    tiles = [whole(tile, packed) for tile in pruned.split(pruned.shape[1])]
    return Tiles(torch.stack([tile[0] for tile in tiles]), tuple(tiles[0][1:]))


def check(got: Tensor, want: Tensor, what: str, config: Layer) -> None:
    """Raise a `UserError` unless two results agree within the rounding of a layer's products."""
    # Four products one after the other, and the operations between them.
    allowed = 8 * gates.tolerance(variants.variant("slope"), config.dtype, config.ffn)
    gates.agree(f"{what}:", got, want.float(), allowed)


@dataclass(frozen=True, kw_only=True)
class Shapes(Layer):
    """Speed of 2:4 products over dense ones by the shape of the weight, and of low-rank products
    over those of full rank.

    `tiled`: a wide weight cut into squares. `setup_ms`: time to choose the mask of a square weight
    and pack it; `multiply_ms`: time of its product.
    """

    what: ClassVar[str] = "shapes"

    def measure(self, _: Report) -> Result:
        size, packed = self.width, sparse_products(self) == "cusparselt"
        wide = 4 * size
        shapes = {"attention": (size, size), "upsample": (wide, size), "downsample": (size, wide)}
        calls: dict[str, Call] = {}
        for name, shape in shapes.items():
            with self.on:
                w = torch.randn(shape, dtype=self.dtype) / math.sqrt(shape[1])
                x = list(torch.randn(base.BUFFERS, self.tokens, shape[1], dtype=self.dtype))
            pruned = torch.where(nm_mask(w), w, 0.0)
            sparse: dict[str, Any] = {name: whole(pruned, packed)}
            if name == "upsample":
                sparse["tiled"] = tiled(pruned, packed)
            if name == "attention":
                calls |= {"setup": setup(w, packed), **low_rank(x, self)}
            calls[f"dense {name}"] = partial(product, Dense(w), x)
            for kind, operand in sparse.items():
                check(product(operand, x, 0), product(Dense(pruned), x, 0), kind, self)
                calls[f"sparse {kind}"] = partial(product, operand, x)
        times = self.in_turns(calls)
        metrics, multiply = times.load, times["sparse attention"]
        for kind in (*shapes, "tiled"):
            dense = times[f"dense {'upsample' if kind == 'tiled' else kind}"]
            metrics[f"{kind}_speedup"] = dense / times[f"sparse {kind}"]
        for end in base.ranks_of(size, SHARES):
            metrics[f"rank{end}_speedup"] = times["rank full"] / times[f"rank{end}"]
        metrics |= {"setup_ms": times["setup"], "multiply_ms": multiply}
        metrics["setup_over_multiply"] = times["setup"] / multiply
        return metrics, "cusparselt" if packed else "dense"


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
    size, calls = config.width, dict[str, Call]()

    def two_products(left: Tensor, right: Tensor, i: int) -> Tensor:
        return F.linear(F.linear(x[i], left), right)

    for name, rank in {**base.ranks_of(size, SHARES), " full": size}.items():
        with config.on:
            left, right = (torch.randn(s, dtype=config.dtype) for s in ((rank, size), (size, rank)))
        calls[f"rank{name}"] = partial(two_products, left, right)
    return calls


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
        build = partial(base.bench, self, build=lambda: Block(self.block), include=("*",))
        dense = build("dense")
        ranks = {"": 0, **base.ranks_of(self.width, self.ranks)}
        adapt = partial(adapted, build, products=products)
        uncut, cut = ({end: adapt(rank) for end, rank in ranks.items()} for _ in range(2))
        for end, built in cut.items():
            cut_layers(built)
            pairs = [(b.forward_backward(0), b.inputs[0].grad) for b in (uncut[end], built)]
            for want, got in zip(*pairs, strict=True):
                assert want is not None and got is not None
                check(got, want, "tiles", self)
        timed = {"dense": ("plain", dense), "dense_fused": ("fused", dense)}
        calls: dict[str, Call] = {}
        for end, built in uncut.items():
            timed |= {f"sparse{end}": ("plain", built), f"sparse_fused{end}": ("fused", built)}
            timed[f"sparse_tiled{end}"] = "plain", cut[end]
            if end:
                calls[f"inference sparse_apart{end}"] = attending("plain", apart(built))
                check(apart(built)(0), base.evaluating(built)(0), "adapters apart", self)
            else:
                calls |= {n: attending(how, b.forward_backward) for n, (how, b) in timed.items()}
                calls["hooks"] = lambda _: uncut[""].hooks(0)
        for name, (how, built) in timed.items():
            calls[f"inference {name}"] = attending(how, base.evaluating(built))
        with sixteen_bit_scores():
            times = self.in_turns(calls)
        metrics = times.load | {"hooks_ms": times["hooks"]}
        for name, ms in times.items():
            kind, _space, what = name.rpartition(" ")
            if kind == "inference":
                metrics[f"inference_{what}"] = times["inference dense"] / ms
            elif what != "hooks":
                step = ms + (times["hooks"] if what.startswith("sparse") else 0.0)
                metrics[f"training_{what}"] = times["dense"] / step
        return metrics, uncut[""].converted.used


def adapted(build: Callable[..., Bench], rank: int, products: str) -> Bench:
    """A layer under SLoPe, with adapters of this rank from the first step on; none if it is 0."""
    built = build("slope", products=products, **(base.adapting(rank) if rank else {}))
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
    return sdpa_kernel(ATTENTION[kind])(call)


@contextmanager
def sixteen_bit_scores() -> Iterator[None]:
    """Let plain attention compute 16-bit scores of 16-bit inputs, as the paper's models do."""
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
    forward = base.evaluating(built)

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
        """The operands of fprop and dgrad: tiles, or else those of the base class."""
        fprop, dgrad = super().operands(dtype)
        return self.tiles[0] or fprop, self.tiles[1] or dgrad


def cut_layers(built: Bench) -> None:
    """Cut the layers of a model into square tiles, in place."""
    for layer in compressed(built):
        forward, backward = (w.to(layer.dtype) for w in gates.weights(layer))
        packed, more = layer.packed is not None, layer.out_features - layer.in_features
        layer.__class__ = Tiled
        assert isinstance(layer, Tiled)
        fprop = tiled(forward, packed) if more > 0 else None
        layer.tiles = fprop, tiled(backward.t(), packed) if more < 0 else None
