"""The numbers of tokens with which packed 2:4 linears are faster than dense ones, measured."""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from common_kernels.decode import MOST
from common_kernels.matmul import is_faster
from models.linears import shape_of

COUNTS = (1, 8, 64, 256, 1024, 4096, 16384)  # numbers of tokens for which products are measured


class Limits(NamedTuple):
    """The numbers of tokens with which a linear runs packed: at most `few` (0 = never) and at least
    `crossover` (None = never)."""

    few: int
    crossover: int | None

    def includes(self, tokens: int) -> bool:
        return tokens <= self.few or (self.crossover is not None and tokens >= self.crossover)


MANY = Limits(0, 0)  # always the packed form for many tokens


def measured(layers: Sequence[Any], graphs: bool) -> Limits:
    """The measured limits of layers of one shape, which are `PackedProduct`s."""
    faster = functools.partial(_faster, layers, graphs)
    many = Limits(0, least(faster))
    if layers[0].fragments is not None:
        for tokens in (MOST, 8, 4, 1):
            if faster(tokens, Limits(tokens, None), MANY if many.includes(tokens) else None):
                return many._replace(few=tokens)
    return many


def _faster(
    layers: Sequence[Any], graphs: bool, tokens: int, limits: Limits = MANY,
    other: Limits | None = None,
) -> bool:  # fmt: skip
    """True if layers of one shape are faster with this number of tokens within these limits than
    within others, or than dense (None)."""
    layer = layers[0]
    device = layer.weight.device
    # In graphs the answer of `is_faster` does not decide, but it searches the fastest algorithm.
    if limits == MANY and not is_faster(layer.problem(tokens), device) and not graphs:
        return False
    size = tokens, shape_of(layer)[1]
    x = torch.randn(size, dtype=layer.packed.dtype, device=device)
    variants = [functools.partial(_run, x, layers, own) for own in (other, limits)]
    other_ms, ms = times_ms(variants, len(layers), graphs)
    return ms < other_ms


def _run(x: torch.Tensor, layers: Sequence[Any], limits: Limits | None) -> None:
    """Each layer's product within these limits, or dense."""
    for layer in layers:
        if limits is None:
            layer.dense(x)
        else:
            layer.limits = limits
            layer(x)


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


def times_ms(variants: Sequence[Callable[[], Any]], products: int, graphs: bool) -> list[float]:
    """The median milliseconds of a product of each variant.

    Args:
        variants: each makes so many `products`. Each of these should use its own memory, as the
            layers of a model do.
        graphs: replay a variant from a CUDA graph, instead of launching its products from Python
            one after the other.
    """
    runs = [_captured(run) if graphs else run for run in variants]
    samples: list[list[float]] = [[] for _ in variants]
    rounds = -(-16 // products)
    for turn in range(6):  # in turns, so that the GPU's clock is the same for all
        for run, found in zip(runs, samples, strict=True):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(rounds):
                run()
            torch.cuda.synchronize()
            if turn:  # the first turn makes plans and allocates memory
                found.append(1e3 * (time.perf_counter() - start) / rounds / products)
    return [statistics.median(found) for found in samples]


_stream = functools.cache(torch.cuda.Stream)  # cuSPARSELt's plans are cached for each stream


def _captured(run: Callable[[], Any]) -> Callable[[], None]:
    """A function that replays `run` from a CUDA graph."""
    stream = _stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # makes plans, which is impossible while a graph is captured
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Otherwise work of another thread, such as pinning memory, would break the capture.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            run()
    return graph.replay
