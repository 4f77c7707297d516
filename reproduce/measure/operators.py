"""Single operators: products, masks, gated activations."""

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from common_kernels import backend, double_prune_mask, geglu, nm_mask, pack24, transposable_mask24
from common_kernels.masks import ALGORITHMS
from common_kernels.matmul import library_layout, linear24, unavailable
from experiments.bench import dense_fp8, gates, operators, variants
from experiments.bench.ops import rotating
from experiments.bench.timing import Call
from methods.slope import parse_pattern
from models import bert
from reproduce.measure.base import BUFFERS, Base, Layer, MethodLayer, Metrics, Report, Result

CACHE = 128 * 2**20  # bytes, more than the last cache of any GPU measured here


@dataclass(frozen=True, kw_only=True)
class Product(MethodLayer):
    """Throughput of the product of two square matrices of `width`, in operations of the dense
    product. One operand is 2:4 unless the method is dense; both are FP8 if the method is."""

    what: ClassVar[str] = "product"

    def measure(self, _: Report) -> Result:
        setup, size = variants.variant(self.method), self.width
        with self.on:
            x = list(torch.randn(BUFFERS, size, size, dtype=self.dtype))
            w = torch.randn(size, size, dtype=self.dtype)
        if setup.fp8:
            x, w = [a.to(dense_fp8.E4M3) for a in x], w.to(dense_fp8.E4M3)
        if setup.method != "dense":
            mask = nm_mask(w.to(self.dtype))
            w = (w.to(self.dtype) * mask).to(w.dtype)
        call: Call = partial(multiply, x, w, self.dtype)
        used = "dense"
        if setup.method != "dense" and unavailable("cusparselt", self.on, w.dtype) is None:
            packed, used = pack24(w, mask, layout=library_layout(self.on)), "cusparselt"
            call = rotating(partial(linear24, packed, out_dtype=self.dtype), [(a,) for a in x])
        allowed, want = gates.tolerance(setup, self.dtype, size), x[0].float() @ w.float().t()
        gates.agree(f"the product of {self.method} is", call(0), want, allowed)
        times = self.in_turns({"product": call})
        ms = times["product"]
        return {"tflops": 2 * size**3 / ms / 1e9, "ms": ms, **times.load}, used


def multiply(x: list[Tensor], w: Tensor, dtype: torch.dtype, i: int) -> Tensor:
    """x W^T in `dtype`, by torch's product for the dtype of W."""
    if w.dtype == dtype:
        return F.linear(x[i], w)
    one = torch.ones((), device=w.device)
    return dense_fp8.product(x[i], w, (one, one), dtype, fast=True)


def buffers(config: Base, nbytes: int) -> int:
    """The number of buffers of this size that together do not fit into a GPU's cache."""
    return BUFFERS if config.on.type == "cpu" else max(BUFFERS, math.ceil(CACHE / nbytes))


@dataclass(frozen=True, kw_only=True)
class Search(Layer):
    """Throughput of the search for transposable masks of a weight [inner, width], in bytes of the
    weight per second: by algorithm, in the precision of the config and in fp32 (`_fp32`)."""

    what: ClassVar[str] = "search"
    products: ClassVar[tuple[str, ...]] = ()

    def measure(self, _: Report) -> Result:
        shape = (self.ffn, self.width)
        dtypes = {"": self.dtype, "_fp32": torch.float32}
        count = buffers(self, math.prod(shape) * self.dtype.itemsize)
        with self.on:
            weights = {key: list(torch.randn(count, *shape, dtype=d)) for key, d in dtypes.items()}
        calls: dict[str, Call] = {}
        for key, several in weights.items():
            for algorithm in ALGORITHMS:
                operators.check("transposable_mask24", several[0], algorithm=algorithm)
                search = partial(transposable_mask24, algorithm=algorithm)
                calls[algorithm + key] = rotating(search, [(w,) for w in several])
        times = self.in_turns(calls, count)
        metrics = times.load | {f"{name}_ms": ms for name, ms in times.items()}
        for key, several in weights.items():
            nbytes = several[0].nbytes
            metrics |= {f"{a}{key}_gbs": nbytes / times[a + key] / 1e6 for a in ALGORITHMS}
            metrics[f"over_two_approx{key}"] = times[f"two_approx{key}"] / times[f"exact{key}"]
        return metrics, backend.resolve(self.on)


@dataclass(frozen=True, kw_only=True)
class Geglu(Layer):
    """Throughput of our GEGLU and of torch's, forward and backward, in bytes that must be read and
    written per second. Inputs [tokens, 2 inner] are column-major, as sparse products return them
    (`column`), or row-major (`row`)."""

    what: ClassVar[str] = "geglu"
    products: ClassVar[tuple[str, ...]] = ()

    def measure(self, _: Report) -> Result:
        tokens, wide = self.tokens, 2 * self.ffn
        nbytes = tokens * wide * self.dtype.itemsize
        count = buffers(self, nbytes)
        functions: dict[str, operators.Function] = {"ours": geglu, "torch": bert.geglu}
        calls: dict[str, Call] = {}
        for layout in ("column", "row"):
            with self.on:
                x = random(count, (tokens, wide), layout, self.dtype)
                dy = random(count, (tokens, wide // 2), layout, self.dtype)
            for name in ("geglu", "geglu, forward and backward"):
                operators.check(name, x[0])
            leaves = [(t.requires_grad_(), d) for t, d in zip(x, dy, strict=True)]
            for kind, function in functions.items():
                forward = torch.no_grad()(function)
                calls[f"{kind}_{layout}_forward"] = rotating(forward, [(t,) for t in x])
                calls[f"{kind}_{layout}"] = rotating(operators.gradients(function), leaves)
        times = self.in_turns(calls, count)
        metrics = times.load
        for name, ms in times.items():
            moved = (1.5 if name.endswith("_forward") else 4.0) * nbytes
            metrics |= {f"{name}_ms": ms, f"{name}_gbs": moved / ms / 1e6}
        metrics["over_torch"] = times["torch_column"] / times["ours_column"]
        return metrics, backend.resolve(self.on)


def random(count: int, shape: tuple[int, int], layout: str, dtype: torch.dtype) -> list[Tensor]:
    """`count` random matrices of this shape, whose columns or rows are contiguous."""
    if layout == "row":
        return list(torch.randn(count, *shape, dtype=dtype))
    return [x.t() for x in torch.randn(count, *shape[::-1], dtype=dtype)]


@dataclass(frozen=True, kw_only=True)
class ImposedZeros(Base):
    """Share of all weights that the second mask, along the columns, sets to zero in addition to the
    first, along the rows. For a normal weight [width, width] whose first mask is `random` or keeps
    the largest entries (`magnitude`), and by the formula of the paper's lemma (`closed_form`).
    pattern: N:M."""

    what: ClassVar[str] = "imposed_zeros"
    products: ClassVar[tuple[str, ...]] = ()
    width: int
    pattern: str = "2:4"

    def measure(self, _: Report) -> Result:
        _glob, n, m = parse_pattern(f"*={self.pattern}")
        generator = torch.Generator(self.on).manual_seed(self.seed)
        size = (self.width, self.width)
        draw = partial(torch.randn, size, generator=generator, device=self.on)
        weight, other = draw(), draw()
        metrics: Metrics = {"closed_form": imposed(n, m)}
        for name, scores in {"random": other, "magnitude": weight}.items():
            once = torch.where(nm_mask(scores, n, m), weight, 0.0)
            twice = torch.where(double_prune_mask(once, n, m), once, 0.0)
            before, after = ((pruned != 0).double().mean().item() for pruned in (once, twice))
            metrics |= {name: before - after, f"{name}_density": after}
        return metrics, "masks alone"


def imposed(n: int, m: int) -> float:
    """The share by the lemma: E[max(B - n, 0)] / m, where B is binomial (m draws, n / m)."""
    p = n / m
    surplus = (math.comb(m, j) * p**j * (1 - p) ** (m - j) * (j - n) for j in range(n + 1, m + 1))
    return sum(surplus) / m
