"""Measures the parts of SLoPe: attention, adapters and tiles of a layer, products by shape.

What SLoPe's Tables 6, 7, B.1 (Bi-Mask) and B.3 and its Figures 3, 4, B.2 and B.4 show. Every
function of `MEASURES` is one as in speed.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from common_kernels import double_prune_mask, nm_mask, pack24
from common_kernels.matmul import unavailable
from common_kernels.pack import BUFFERED, Packed24
from common_kernels.pack.operands import pack24_
from experiments.bench import arms, linear
from experiments.bench.arms import Bench
from experiments.bench.timing import Call, in_turns
from experiments.support.errors import UserError
from methods.nn import operands
from methods.nn.compressed import CompressedLinear
from methods.nn.operands import Dense, Packed
from methods.slope import parse_pattern
from reproduce.speed import (
    BUFFERS,
    Metrics,
    Told,
    bench,
    clock_and_power,
    evaluating,
    gpt2,
    rank_suffix,
)

if TYPE_CHECKING:
    from reproduce.bench import Config

# Plain attention writes all of its scores.
ATTENTION = {"plain": SDPBackend.MATH, "fused": SDPBackend.FLASH_ATTENTION}
SHARES = (1.0, 2.0, 5.0, 10.0)  # ranks of low-rank products, in percent of the width


# --- a layer, with and without its parts ---------------------------------------------------------


def of_layer(config: Config, _: Told) -> tuple[Metrics, str]:
    """Speed of a layer of OPT's shapes over dense with plain attention, in training and inference.

    `_fused`: with fused attention. `_tiled`: with the products of wide weights cut into squares.
    `_apart`: adapters by products and sums of their own. All sparse products run sparse. Packing
    is timed without tiles: a kernel that writes them would take as long.
    """
    products = sparse_products(config)
    for widths in ((config.width, config.ffn), (config.ffn, config.width)):
        gate((config.tokens, *widths), config.dtype, config.on, products)
    build = partial(bench, config, build=gpt2(config), include=("*",))
    dense = build("dense")
    ranks = {"": 0, **{rank_suffix(p): max(1, round(config.width * p / 100)) for p in config.ranks}}
    whole, tiled = (
        {end: adapted(build, rank, products) for end, rank in ranks.items()} for _ in range(2)
    )
    for end in ranks:
        cut(tiled[end])
        agree(whole[end], tiled[end], "tiles", config)
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
    for end, arm in whole.items():
        forward = evaluating(arm)
        calls[f"inference sparse{end}"] = attending("plain", forward)
        calls[f"inference sparse_fused{end}"] = attending("fused", forward)
        calls[f"inference sparse_tiled{end}"] = attending("plain", evaluating(tiled[end]))
        if end:
            calls[f"inference sparse_apart{end}"] = attending("plain", apart(arm))
            check_apart(arm, config)
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


@functools.cache
def gate(shape: linear.Shape, dtype: torch.dtype, device: torch.device, products: str) -> None:
    """`linear.gate` of SLoPe, once for all repeats: it draws a mask on the CPU."""
    linear.gate("slope", shape, dtype, device, products)


def sparse_products(config: Config) -> str:
    """The backend for products that shall run sparse wherever they can."""
    there = unavailable("cusparselt", config.on, config.dtype) is None
    return "cusparselt" if config.on.type == "cuda" and there else "dense"


def adapted(build: Callable[..., Bench], rank: int, products: str) -> Bench:
    """A layer under SLoPe, with adapters of this rank that take part."""
    options: dict[str, Any] = {"mask": "magnitude", "products": products}  # of random weights
    if rank:
        options |= {"adapter_rank": rank, "adapter_fraction": 1.0, "total_steps": 1}
    arm = build("slope", **options)
    for layer in compressed(arm):
        if layer.right is not None:
            nn.init.normal_(layer.right, std=0.02)
    arm.converted.before(0)
    return arm


def compressed(arm: Bench) -> Iterator[CompressedLinear]:
    """The layers that SLoPe has converted."""
    for layer in arm.converted.layers.values():
        assert isinstance(layer, CompressedLinear)
        yield layer


def attending(kind: str, call: Call) -> Call:
    """The call, with this kind of attention."""

    def run(i: int) -> Any:
        with sdpa_kernel(ATTENTION[kind]):
            return call(i)

    return run


@contextmanager
def sixteen_bit_scores() -> Iterator[None]:
    """Let plain attention keep the dtype of its inputs, as the models of the paper do."""
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


class Apart(CompressedLinear):
    """Adapters by two products and a sum of torch's, the paper's form before its fused kernel."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        fprop, _ = self.operands(x.dtype)
        sparse = fprop or Dense(self.effective_weight().to(x.dtype))
        assert self.left is not None and self.right is not None
        low_rank = F.linear(F.linear(x, self.left), self.right.t())
        return sparse.linear(x, self.bias) + low_rank / len(self.right)


def apart(arm: Bench) -> Call:
    """A forward pass whose adapters have products of their own."""
    forward = evaluating(arm)

    def call(i: int) -> Tensor:
        for layer in compressed(arm):
            layer.__class__ = Apart
        y = forward(i)
        for layer in compressed(arm):
            layer.__class__ = CompressedLinear
        return y

    return call


class DenseTiles(Dense):
    """A dense matrix whose products are made square by square."""

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., in] -> [..., out], out being a multiple of in."""
        y = torch.cat([F.linear(x, tile) for tile in self.matrix.split(x.shape[-1])], -1)
        return y if bias is None else y + bias.to(y.dtype)

    def grad(self, dy: Tensor) -> Tensor:
        """dy [T, out] -> [T, in], in being a multiple of out."""
        return torch.cat([dy @ tile for tile in self.matrix.split(dy.shape[-1], 1)], -1)


class PackedTiles(Packed):
    """A packed matrix in squares: `buffer` is [squares, bytes], `shape` that of a square."""

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., in] -> [..., squares * in]."""
        tiles = [Packed(buffer, self.shape, self.dtype) for buffer in self.buffer]
        y = torch.cat([tile.linear(x, None) for tile in tiles], -1)
        return y if bias is None else y + bias.to(y.dtype)

    def grad(self, dy: Tensor) -> Tensor:
        """dy [T, out] -> [T, squares * out]."""
        return self.linear(dy, None)


operands.TENSORS |= {DenseTiles: 1, PackedTiles: 1}


def packed_tiles(matrix: Tensor) -> PackedTiles:
    """A 2:4 matrix [k * size, size] in squares."""
    size = matrix.shape[1]
    buffers = [pack24(tile, tile != 0, BUFFERED).buffer for tile in matrix.split(size)]
    return PackedTiles(torch.stack(buffers), (size, size), matrix.dtype)


class Tiled(CompressedLinear):
    """SLoPe's upsample tiling: a weight with more outputs than inputs is cut in fprop, one with
    fewer, whose transpose is wide, in dgrad."""

    tiles: tuple[Any, Any]  # for fprop and dgrad, None where nothing is cut

    def operands(self, dtype: torch.dtype) -> tuple[Any, Any]:
        """The operands of the base class, cut where there are tiles."""
        fprop, dgrad = super().operands(dtype)
        return self.tiles[0] or fprop, self.tiles[1] or dgrad


def cut(arm: Bench) -> None:
    """Cut the layers of a model into squares."""
    for layer in compressed(arm):
        forward, backward = (w.to(layer.dtype) for w in arms.weights(layer))
        wide, packed = layer.out_features > layer.in_features, layer.packed is not None
        tiles: tuple[Any, Any] = (None, None)
        if wide:
            tiles = (packed_tiles(forward) if packed else DenseTiles(forward)), None
        elif layer.out_features < layer.in_features:
            tiles = None, (packed_tiles(backward.t()) if packed else DenseTiles(backward))
        layer.__class__ = Tiled
        assert isinstance(layer, Tiled)
        layer.tiles = tiles


def agree(expected: Bench, found: Bench, what: str, config: Config) -> None:
    """Raise a `UserError` unless two models of the same weights give the same output and input
    gradient, to the roundings of their products."""
    pairs = [(b.forward_backward(0), b.inputs[0].grad) for b in (expected, found)]
    for want, got in zip(*pairs, strict=True):
        assert want is not None and got is not None
        check(got, want, what, config)


def check_apart(arm: Bench, config: Config) -> None:
    """Raise a `UserError` unless adapters with products of their own give what fused ones do."""
    check(apart(arm)(0), evaluating(arm)(0), "adapters apart", config)


def check(got: Tensor, want: Tensor, what: str, config: Config) -> None:
    """Raise a `UserError` unless two results agree to the roundings of a layer's products."""
    error = arms.relative_error(got, want.float())
    # Four products, one after the other, and what lies between them.
    allowed = 8 * arms.tolerance(arms.ARMS["slope"], config.dtype, config.ffn)
    if not error <= allowed:
        raise UserError(f"{what}: off by {error:.2g} (allowed {allowed:.2g}): no time is reported")


# --- products by shape ---------------------------------------------------------------------------


def of_shapes(config: Config, _: Told) -> tuple[Metrics, str]:
    """Speed of 2:4 products over dense by the shape of the weight, of tiles, of the set-up of a
    square weight beside its product, and of low-rank products over those of full rank."""
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
        several: dict[str, Any] = {name: whole(pruned, packed)}
        if name == "upsample":
            several["tiled"] = packed_tiles(pruned) if packed else DenseTiles(pruned)
        if name == "attention":
            calls["setup"] = setup(w, packed)
            calls |= low_rank(x, config)
        calls[f"dense {name}"] = partial(product, Dense(w), x)
        for kind, operand in several.items():
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
    """The operand of a 2:4 matrix."""
    if not packed:
        return Dense(pruned)
    made = pack24(pruned, pruned != 0, BUFFERED)
    return Packed(made.buffer, made.shape, made.dtype)


def product(operand: Any, x: list[Tensor], i: int) -> Tensor:
    """X A^T of input number i."""
    return operand.linear(x[i], None)


def setup(w: Tensor, packed: bool) -> Call:
    """A call that chooses the 2:4 mask of a weight and packs it."""
    if not packed:
        return lambda _: pack24(w, nm_mask(w))
    room = Packed24.empty((w.shape[0], w.shape[1]), w.dtype, w.device)
    return lambda _: pack24_(room, w, "magnitude")


def low_rank(x: list[Tensor], config: Config) -> dict[str, Call]:
    """The products (X L) R, by the rank of L and R."""
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


# --- Bi-Mask, and the zeros of double pruning ----------------------------------------------------


def of_slow_down(config: Config, _: Told) -> tuple[Metrics, str]:
    """Time of a training step of a block with masks along both dims, Bi-Mask's, over a dense one:
    its products, its masks and its share of the search for permutations."""
    dense = bench(config, "dense", gpt2(config), ("*",))
    sparse = bench(config, config.method, gpt2(config), ("*",))
    converted, period = sparse.converted, sparse.converted.method.config.permute_every

    def step(i: int, number: int = 1) -> None:
        converted.before(number)
        sparse.forward_backward(i)
        converted.after(number)

    calls: dict[str, Call] = {
        "dense": dense.forward_backward,
        "step": step,
        "step with a search": partial(step, number=0),
    }
    times = in_turns(calls, config.on, config.repeats, BUFFERS)
    found = {name: time.ms for name, time in times.items()}
    search = max(0.0, found["step with a search"] - found["step"])
    metrics = clock_and_power(times) | {
        "dense_ms": found["dense"],
        "step_ms": found["step"],
        "search_ms": search,
        "slow_down": (found["step"] + search / period) / found["dense"],
    }
    return metrics, converted.used


def of_imposed_zeros(config: Config, _: Told) -> tuple[Metrics, str]:
    """Share of all weights that the second, column mask sets to zero, for random and for largest
    row masks of a normal weight [width, width], and as the paper's lemma has it in closed form."""
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
        kept = ((pruned != 0).double().mean().item() for pruned in (once, twice))
        before, after = kept
        metrics |= {name: before - after, f"{name}_density": after}
    return metrics, "masks alone"


def imposed(n: int, m: int) -> float:
    """The lemma: E[(B - n)+] / m for B of the binomial distribution of m draws at n / m."""
    share = n / m
    over = (
        math.comb(m, j) * share**j * (1 - share) ** (m - j) * (j - n) for j in range(n + 1, m + 1)
    )
    return sum(over) / m


MEASURES = {
    "layer": of_layer,
    "shapes": of_shapes,
    "slow_down": of_slow_down,
    "imposed_zeros": of_imposed_zeros,
}
