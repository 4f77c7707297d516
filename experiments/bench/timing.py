"""Times calls on a CPU or a GPU.

Under a steady load a GPU reaches its power limit and lowers its clock, for dense products more than
for sparse ones; after idle time both are faster for a while. On a GPU a comparison therefore begins
with work that is not timed, and the timed calls follow without a pause.
"""

import itertools
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from common_kernels.matmul.table import elapsed_ms

# A call takes the number of the buffer to work on. Tensors that it reads but does not create must
# keep their addresses, because a graph reads them there again; no call may replace them.
Call = Callable[[int], Any]

GRAPH_MS = 2.0  # least time of a replay, to be long compared with the events' resolution
SUSTAINED_S = 2.0  # seconds for which a comparison's calls run on a GPU before they are timed
ENOUGH, LIMIT_S = 5, 2.5  # least number of samples on a GPU, and seconds after which to stop

BLOCK_MS, BLOCK_STEPS = 300.0, 3  # least time and number of steps in a sample of whole steps
# A GPU has settled when TURNS turns differ by at most the share SETTLED of their time; after
# SETTLE_LIMIT_S seconds timing begins even if it has not.
TURNS, SETTLED, SETTLE_LIMIT_S = 3, 0.01, 30.0


@dataclass(frozen=True)
class Time:
    """Median, 20th and 80th percentile in milliseconds, and the clock: `host`, `graph` (replays of
    a CUDA graph) or `events` (calls from Python between two CUDA events).

    mhz, watts: medians of the GPU's SM clock and power during the first call; None if unknown.
    warm_s: seconds for which the calls ran before timing began.
    settled: True if their time had settled by then; None if `in_turns` did not wait for it.
    """

    ms: float
    p20: float
    p80: float
    clock: str
    mhz: float | None = None
    watts: float | None = None
    warm_s: float | None = None
    settled: bool | None = None


def quantiles(
    samples: list[float], clock: str = "host", load: tuple[float, float] | None = None, **warm: Any
) -> Time:
    """The `Time` of samples in milliseconds. load: (mhz, watts). warm: `warm_s` and `settled`."""
    fifths = statistics.quantiles(samples, n=5, method="inclusive")
    mhz, watts = load or (None, None)
    return Time(statistics.median(samples), fifths[0], fifths[-1], clock, mhz, watts, **warm)


def read_load() -> tuple[float, float] | None:
    """The SM clock in MHz and the power in W of the current GPU; None if they cannot be read."""
    try:
        return float(torch.cuda.clock_rate()), torch.cuda.power_draw() / 1e3
    except Exception:  # without pynvml, a driver or support by the card: each raises another error
        return None


def allow_repeated_steps() -> None:
    """Silence the warning that a step begins again: a benchmark measures it several times."""
    warnings.filterwarnings("ignore", message=r"on_step_begin\(")


def in_turns(
    calls: Mapping[str, Call],
    device: torch.device,
    repeats: int,
    buffers: int = 1,
    graphs: bool = True,
    steps: bool = False,
    seed: int = 0,
) -> dict[str, Time]:
    """The times of `calls`, measured in turns so that clocks and temperature are equal for all.

    Each turn has its own random order, which `seed` determines. At the power limit the clock lags
    behind the load, so a call takes longer after a heavy one: in a fixed order the ratio of two
    calls is wrong by up to 8 % (docs/tables.md).

    Args:
        repeats: samples of each call, after a warm-up of one turn, or on a GPU of SUSTAINED_S
            seconds. On a GPU long calls get fewer samples.
        steps: the calls are whole training steps. On a GPU a sample is then a block of consecutive
            steps (BLOCK_MS), the warm-up lasts until the GPU's clock has settled (TURNS), and all
            `repeats` samples are taken.
        buffers: the calls get the numbers below it in rotation. All buffers together should be
            larger than the last cache.
        graphs: capture the calls in CUDA graphs if possible; ignored on a CPU.
    """
    on_gpu = device.type == "cuda"
    clocks = {name: (host_clock(call, buffers), "host") for name, call in calls.items()}
    if on_gpu:
        clocks = gpu_clocks(calls, buffers, graphs, steps)
    settles, start, turns = on_gpu and steps, time.perf_counter(), []
    while True:
        turns.append(sum(milliseconds(None) for milliseconds, _ in clocks.values()))
        warm_s, steady = time.perf_counter() - start, settled(turns)
        enough = steady or not settles or warm_s >= SETTLE_LIMIT_S
        if enough and (not on_gpu or warm_s >= SUSTAINED_S):
            break
    samples: dict[str, list[float]] = {name: [] for name in calls}
    loads: list[tuple[float, float] | None] = []
    names, shuffled = list(calls), random.Random(seed)
    start = time.perf_counter()
    for turn in range(repeats):
        if on_gpu and not steps and turn >= ENOUGH and time.perf_counter() - start > LIMIT_S:
            break
        for name in shuffled.sample(names, len(names)):
            read = (lambda: loads.append(read_load())) if name == names[0] else None
            samples[name].append(clocks[name][0](read))
    known = [*zip(*filter(None, loads), strict=True)]
    load = (statistics.median(known[0]), statistics.median(known[1])) if known else None
    warm = {"warm_s": warm_s, "settled": steady if settles else None} if on_gpu else {}
    return {name: quantiles(samples[name], clocks[name][1], load, **warm) for name in calls}


def settled(turns: list[float]) -> bool:
    """True if the last TURNS turns took the same time, as on a GPU whose clock has settled."""
    last = turns[-TURNS:]
    return len(last) == TURNS and max(last) <= (1 + SETTLED) * min(last)


Clock = Callable[[Callable[[], None] | None], float]


def host_clock(call: Call, buffers: int) -> Clock:
    """The clock of a call on the CPU."""
    numbers = itertools.cycle(range(buffers))

    def milliseconds(_: Any) -> float:
        number, start = next(numbers), time.perf_counter()
        output = call(number)
        elapsed = time.perf_counter() - start
        del output  # only now, so that every call pays for new memory
        return 1e3 * elapsed

    return milliseconds


def gpu_clocks(
    calls: Mapping[str, Call], buffers: int, graphs: bool, steps: bool
) -> dict[str, tuple[Clock, str]]:
    """(clock, its kind) of each call on the GPU. A clock calls the function that it is given while
    the GPU works. Graphs share memory: what calls pass to one another was allocated before."""
    # Only graphs get a separate stream, since memory cached for one stream cannot serve another.
    stream = torch.cuda.Stream() if graphs else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    clocks, pool = {}, None
    for name, call in calls.items():
        pool = pool or (torch.cuda.graph_pool_handle() if graphs else None)
        clocks[name] = gpu_clock(call, buffers, stream, pool, steps)
        if clocks[name][1] == "events":
            pool = None  # a failed capture may still hold it
    return clocks


def gpu_clock(
    call: Call, buffers: int, stream: torch.cuda.Stream, pool: Any, steps: bool
) -> tuple[Clock, str]:
    """(clock, its kind) of one call; without a pool the call is not captured in a graph."""
    long, least, most = (BLOCK_MS, BLOCK_STEPS, 256) if steps else (GRAPH_MS, 1, 32)
    with torch.cuda.stream(stream):
        for i in range(buffers):  # compiles, plans and allocates
            call(i)
        estimate = max(elapsed_ms(lambda: call(0)), 1e-3)
        count = buffers * max(least, min(most, round(long / estimate / buffers)))

        def run() -> None:
            for i in range(count):
                call(i % buffers)

        capture = pool is not None and not waits(call)
        graph = captured(run, stream, pool) if capture else None
    start = graph.replay if graph else run

    def milliseconds(meanwhile: Callable[[], None] | None) -> float:
        with torch.cuda.stream(stream):
            return elapsed_ms(start, meanwhile) / count

    return milliseconds, "graph" if graph else "events"


def load_text(mhz: Iterable[float | None], watts: Iterable[float | None]) -> str:
    """A phrase on the GPU's clock and power during the measurements."""

    def span(values: Iterable[float | None], unit: str) -> str:
        known = sorted(value for value in values if value is not None)
        if not known:
            return "not read"
        ends = dict.fromkeys(f"{value:,.0f}" for value in (known[0], known[-1]))
        return f"{' to '.join(ends)} {unit}"

    return (
        f"sustained load, {SUSTAINED_S:g} s of the same calls before each comparison; SM clock "
        f"{span(mhz, 'MHz')}, power {span(watts, 'W')}"
    )


def waits(call: Call) -> bool:
    """True if a call waits for the GPU, which cannot be captured in a CUDA graph."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(0)
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def captured(
    run: Callable[[], None], stream: torch.cuda.Stream, pool: Any
) -> torch.cuda.CUDAGraph | None:
    """A CUDA graph of `run`; None if it cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool, stream):
            run()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph
