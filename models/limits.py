"""The numbers of tokens with which packed 2:4 linears are faster than dense ones, measured."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from common_kernels.decode import MOST
from common_kernels.matmul import is_faster
from models.linears import shape_of

if TYPE_CHECKING:
    from models.packed import PackedProduct

COUNTS = (1, 8, 64, 256, 1024, 4096, 16384)  # numbers of tokens for which products are measured


class Limits(NamedTuple):
    """The numbers of tokens with which a linear runs packed: at most `few` (0 = never) and at least
    `crossover` (None = never)."""

    few: int
    crossover: int | None

    def includes(self, tokens: int) -> bool:
        return tokens <= self.few or (self.crossover is not None and tokens >= self.crossover)


def measured(layers: Sequence[PackedProduct], graphs: bool) -> Limits:
    """The measured limits of layers of one shape."""
    few = 0
    if layers[0].fragments is not None:
        few = next((n for n in (MOST, 8, 4, 1) if _faster(layers, graphs, n)), 0)
    for layer in layers:
        layer.limits = Limits(0, 0)
    return Limits(few, least(functools.partial(_faster, layers, graphs)))


def _faster(layers: Sequence[PackedProduct], graphs: bool, tokens: int) -> bool:
    """True if layers of one shape are faster packed with this number of tokens."""
    layer = layers[0]
    device = layer.weight.device
    # `is_faster` also searches the fastest algorithm. It times one weight again and again, which
    # stays in the cache, unlike the weights of a model: in graphs its answer does not decide.
    many = tokens > layer.limits.few
    if many and not is_faster(layer.problem(tokens), device) and not graphs:
        return False
    size = tokens, shape_of(layer)[1]
    x = torch.randn(size, dtype=layer.packed.dtype, device=device)
    both: Any = [layer.dense for layer in layers], layers
    variants = [[functools.partial(run, x) for run in runs] for runs in both]
    dense_ms, sparse_ms = times_ms(variants, graphs)
    return sparse_ms < dense_ms


def least(faster: Callable[[int], bool]) -> int | None:
    """The least number of tokens from which on `faster` is true, up to a factor of 2; None if it is
    false for the largest of `COUNTS`."""
    found = None
    for tokens in reversed(COUNTS):
        if not faster(tokens):
            if found is not None and found >= 4 * tokens and faster(found // 2):
                return found // 2
            return found
        found = tokens
    return found


def times_ms(
    variants: Sequence[Sequence[Callable[[], Any]]], graphs: bool, repeats: int = 5
) -> list[float]:
    """The median milliseconds of a call of each variant.

    Args:
        variants: the calls of each variant. Every call should use its own memory, as the layers of
            a model do.
        graphs: replay all calls of a variant from a CUDA graph, instead of launching them from
            Python one after the other.
        repeats: the variants are timed in turns, this many times, so that the GPU's clock is the
            same for all.
    """
    runs = [_captured(calls) if graphs else functools.partial(_launch, calls) for calls in variants]
    samples: list[list[float]] = [[] for _ in variants]
    for turn in range(repeats + 1):
        for calls, run, found in zip(variants, runs, samples, strict=True):
            rounds = -(-16 // len(calls))
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(rounds):
                run()
            torch.cuda.synchronize()
            if turn:  # the first turn makes plans and allocates memory
                found.append(1e3 * (time.perf_counter() - start) / rounds / len(calls))
    return [statistics.median(found) for found in samples]


def _launch(calls: Sequence[Callable[[], Any]]) -> None:
    for call in calls:
        call()


@functools.cache  # cuSPARSELt's plans are cached for each stream
def _stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _captured(calls: Sequence[Callable[[], Any]]) -> Callable[[], None]:
    """A function that replays the calls from a CUDA graph."""
    stream = _stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _launch(calls)  # makes plans, which is impossible while a graph is captured
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Otherwise work of another thread, such as pinning memory, would break the capture.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            _launch(calls)
    return graph.replay
