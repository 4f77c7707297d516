"""How long a call takes, on a CPU or a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

# A call gets the number of the buffer that it shall work on.
Call = Callable[[int], Any]

GRAPH_MS = 2.0  # a replay shall take at least this long beside the resolution of the events


@dataclass(frozen=True)
class Time:
    """Median, 20th and 80th percentile in milliseconds, and the clock: `host`, `graph` (replays of
    a CUDA graph) or `events` (calls from Python between two CUDA events)."""

    ms: float
    p20: float
    p80: float
    clock: str


def quantiles(samples: list[float], clock: str = "host") -> Time:
    fifths = statistics.quantiles(samples, n=5, method="inclusive")
    return Time(statistics.median(samples), fifths[0], fifths[-1], clock)


def in_turns(
    calls: Mapping[str, Call],
    device: torch.device,
    repeats: int,
    buffers: int = 1,
    graphs: bool = True,
) -> dict[str, Time]:
    """Times of `calls`, taken in turns, so that clocks and temperature are the same for all.

    Args:
        repeats: samples of each call, after one that warms up.
        buffers: numbers below it go to the calls in rotation. Together the buffers should be
            larger than the last cache.
        graphs: capture the calls in CUDA graphs where that works; no matter on a CPU.
    """
    if device.type == "cpu":
        clocks = {name: (host_clock(call, buffers), "host") for name, call in calls.items()}
    else:
        clocks = {name: gpu_clock(call, buffers, graphs) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, (milliseconds, _) in clocks.items():
            elapsed = milliseconds()
            if turn:
                samples[name].append(elapsed)
    return {name: quantiles(samples[name], clocks[name][1]) for name in calls}


def host_clock(call: Call, buffers: int) -> Callable[[], float]:
    """The outputs live until the clock has stopped, so all of them pay for fresh memory."""
    turn = -1

    def milliseconds() -> float:
        nonlocal turn
        turn = (turn + 1) % buffers
        start = time.perf_counter()
        output = call(turn)
        elapsed = time.perf_counter() - start
        del output
        return 1e3 * elapsed

    return milliseconds


def gpu_clock(call: Call, buffers: int, graphs: bool) -> tuple[Callable[[], float], str]:
    """A clock for one call, and its kind."""
    # What the allocator has cached for one stream does not serve another: only graphs need one.
    stream = torch.cuda.Stream() if graphs else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(buffers):  # compiles, plans and allocates
            call(i)
        estimate = elapsed_ms(lambda: call(0))
        count = buffers * max(1, min(32, round(GRAPH_MS / max(estimate, 1e-3) / buffers)))
        capture = graphs and not waits(call)
        graph = captured(call, count, buffers, stream) if capture else None

    def run() -> None:
        for i in range(count):
            call(i % buffers)

    start = graph.replay if graph else run

    def milliseconds() -> float:
        with torch.cuda.stream(stream):
            return elapsed_ms(start) / count

    return milliseconds, "graph" if graph else "events"


def waits(call: Call) -> bool:
    """Whether a call waits for the GPU somewhere, which no graph can hold."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(0)
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def captured(
    call: Call, count: int, buffers: int, stream: torch.cuda.Stream
) -> torch.cuda.CUDAGraph | None:
    """A graph of `count` calls; None if a call cannot be captured for another reason."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            for i in range(count):
                call(i % buffers)
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph


def elapsed_ms(run: Callable[[], Any]) -> float:
    """Of what `run` puts on the current stream."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
