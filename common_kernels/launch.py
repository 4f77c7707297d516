"""Helpers that all Triton kernels share: launching a kernel, and loading groups of four.

A tensor is walked in memory order as `[rows, 4, lanes]` (layout.as_groups): group q = row * lanes +
lane, and its entries lie `lanes` apart. With lanes = 1 the entries are neighbours: a thread loads
all four at once and separates them in registers. With more lanes each entry is loaded separately,
over consecutive lanes. Either way every byte is read once, in whole lines, for any grouped dim.
"""

import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from common_kernels import backend

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
TABLES = 64  # tables of addresses that are kept, the most recently used ones
BLOCK = 512  # groups per program: the fastest of 256 to 4096 on an H200 for nearly every kernel


class Launched(NamedTuple):
    """A kernel as Triton has compiled it, and the number of its programs."""

    compiled: Any
    blocks: int


# Set by matmul/native.py where C++ can launch kernels: a function that prepares what Triton has
# launched on a device, and the operator that takes the result and the kernel's arguments.
prepare: Callable[[Sequence[Launched], int], int] | None = None
start: Any = None
KNOWN = 4096  # launches that are kept
_known: dict[tuple[Any, ...], tuple[int, list[int]]] = {}
_notes = threading.local()  # `launched`: what `noted` has yielded, in this thread


def launch(kernel: Any, blocks: int, device: torch.device, *args: Any, **options: Any) -> None:
    """Run `kernel` in `blocks` programs, if any, on `device`; from the second time on by C++ if it
    can, which takes the CPU a fraction of the time that Triton takes. Only constants of the kernel
    and options of Triton may be given by name."""
    noting = getattr(_notes, "launched", None) is not None
    if not blocks:
        return
    if prepare is None or noting or device.index != torch.cuda.current_device():
        by_triton(kernel, blocks, device, *args, **options)
        return
    numbers: list[Any] = []
    key: list[Any] = [kernel, blocks, device.index, *options.items()]
    for value in args:
        if isinstance(value, torch.Tensor):
            numbers.append(value.data_ptr())
            key += value.dtype, numbers[-1] % 16  # Triton compiles a kernel for aligned addresses
        else:
            numbers.append(value)
            key += type(value), value  # 1 == 1.0, but a kernel takes other bits
    known = _known.get(tuple(key))
    if known is None:
        launched = by_triton(kernel, blocks, device, *args, **options)
        if len(_known) >= KNOWN:
            _known.clear()
        kinds = enumerate(launched.compiled.src.signature.values())
        _known[tuple(key)] = (
            prepare([launched], device.index), [i for i, kind in kinds if kind != "constexpr"]
        )  # fmt: skip
        return
    given = [numbers[i] for i in known[1]]
    # Floats are given by their bits in fp32.
    start(known[0], [_INT32(_FP32(n))[0] if isinstance(n, float) else n for n in given])


def by_triton(
    kernel: Any, blocks: int, device: torch.device, *args: Any, **options: Any
) -> Launched:
    """Run `kernel` as `launch` does, for arguments that are other ones in each call.

    Fused multiply-adds are off: cpu.py has none, and the results must be bitwise equal.
    """
    with backend.current(device):
        launched = Launched(kernel[(blocks,)](*args, **options, enable_fp_fusion=False), blocks)
    if (notes := getattr(_notes, "launched", None)) is not None:
        notes.append(launched)
    return launched


@contextmanager
def noted() -> Iterator[list[Launched]]:
    """Yield a list that receives all that Triton launches meanwhile in this thread."""
    _notes.launched = found = []
    try:
        yield found
    finally:
        _notes.launched = None


_FP32, _INT32 = struct.Struct("f").pack, struct.Struct("i").unpack
_tables: dict[tuple[Any, ...], torch.Tensor] = {}
_captured: dict[tuple[Any, ...], torch.Tensor] = {}  # never freed: CUDA graphs use their memory


def table_of(device: torch.device, addresses: Sequence[int]) -> torch.Tensor:
    """The addresses as a flat int64 tensor on `device`, for a kernel that serves many tensors.

    Entries may also be placeholders, which one kernel fills in for another to read.
    """
    key = (device, *addresses)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        if key in _tables:
            _captured[key] = _tables[key]  # a graph keeps the table's address but no reference
            return _captured[key]
        # A capture cannot copy from pageable memory. The addresses are added as kernel arguments
        # instead, which the graph stores.
        table = torch.zeros(len(addresses), dtype=torch.int64, device=device)
        torch._foreach_add_(list(table.unbind()), list(addresses))
        return table
    table = _tables.pop(key, None)
    if table is None:
        table = torch.tensor(addresses, dtype=torch.int64).to(device, non_blocking=True)
        if len(_tables) >= TABLES:
            del _tables[next(iter(_tables))]
    _tables[key] = table  # the most recently used one comes last
    return table


@triton.jit
def pointer(row, PLACE: tl.constexpr, DTYPE: tl.constexpr):
    """The pointer whose address is at PLACE in a row of a table."""
    return tl.load(row + PLACE).to(tl.pointer_type(DTYPE))


@triton.jit
def vectors(row, PLACE: tl.constexpr, DTYPE: tl.constexpr):
    """The pointer to a matrix, which Triton knows to be aligned to 16 bytes.

    It is computed from the row's own aligned pointer. Triton 3.6 ignores alignment hints on a
    pointer made from an integer, and would then load and store single entries.
    """
    distance = tl.multiple_of(tl.load(row + PLACE) - row.to(tl.int64), 16)
    return (row.to(tl.pointer_type(tl.uint8)) + distance).to(tl.pointer_type(DTYPE))


@triton.jit
def first_entries(start, lanes, M: tl.constexpr, BLOCK: tl.constexpr):
    """The offsets, int64 `[BLOCK]`, of the first entries of BLOCK groups of M in `[rows, M,
    lanes]`, from group `start` (int64) on.

    A 64-bit division takes about a hundred instructions, so only one is made, for the whole block.
    """
    if (start | lanes) >> 31 == 0:
        row = (start.to(tl.int32) // tl.cast(lanes, tl.int32)).to(tl.int64)
    else:
        row = start // lanes
    lane, i = start - row * lanes, tl.arange(0, BLOCK)
    if lanes >= BLOCK:  # the block crosses at most one end of a row
        rows_on = (i >= tl.minimum(lanes - lane, BLOCK).to(tl.int32)).to(tl.int32)
    else:
        rows_on = (lane.to(tl.int32) + i) // tl.cast(lanes, tl.int32)
    return (row * (M * lanes) + lane) + (i + rows_on.to(tl.int64) * ((M - 1) * lanes))


@triton.jit
def load_groups(base, start, count, lanes, BLOCK: tl.constexpr, NEIGHBOURS: tl.constexpr):
    """Load the entries 0 to 3 of the groups from `start` on, each `[BLOCK]`; 0 beyond `count`."""
    if NEIGHBOURS:
        at = 4 * start + tl.arange(0, 4 * BLOCK)
        inside = at < 4 * tl.cast(count, tl.int64)
        return split_groups(tl.load(base + at, mask=inside, other=0), 2)
    else:
        at = base + first_entries(start, lanes, 4, BLOCK)
        inside, entries = start + tl.arange(0, BLOCK) < count, ()
        for i in tl.static_range(4):
            entries += (tl.load(at + i * lanes, mask=inside, other=0),)
        return entries


@triton.jit
def store_groups(
    base, a0, a1, a2, a3, start, count, lanes, BLOCK: tl.constexpr, NEIGHBOURS: tl.constexpr
):
    """Store the entries of the groups from `start` on, in the layout that load_groups reads."""
    if NEIGHBOURS:
        at = 4 * start + tl.arange(0, 4 * BLOCK)
        entries = join_groups((a0, a1, a2, a3), 2)
        tl.store(
            base + at, cast(entries, base.dtype.element_ty), mask=at < 4 * tl.cast(count, tl.int64)
        )
    else:
        at = base + first_entries(start, lanes, 4, BLOCK)
        inside = start + tl.arange(0, BLOCK) < count
        tl.store(at, cast(a0, base.dtype.element_ty), mask=inside)
        tl.store(at + lanes, cast(a1, base.dtype.element_ty), mask=inside)
        tl.store(at + 2 * lanes, cast(a2, base.dtype.element_ty), mask=inside)
        tl.store(at + 3 * lanes, cast(a3, base.dtype.element_ty), mask=inside)


@triton.jit
def split_groups(entries, LEVELS: tl.constexpr):
    """Split each run of 2^LEVELS <= 32 neighbours into a tuple with one tensor for each place."""
    parts = (entries,)  # ordered by the reversed bits of the place
    for level in tl.static_range(LEVELS):
        halves = ()
        for i in tl.static_range(1 << level):
            even, odd = tl.split(tl.reshape(parts[i], [parts[i].numel // 2, 2]))
            halves += (even, odd)
        parts = halves
    ordered = ()
    for i in tl.static_range(1 << LEVELS):
        ordered += (parts[reversed_bits(i) >> 5 - LEVELS],)
    return ordered


@triton.jit
def join_groups(ordered, LEVELS: tl.constexpr):
    """The inverse of `split_groups`: one tensor with the entries side by side again."""
    parts = ()
    for i in tl.static_range(1 << LEVELS):
        parts += (ordered[reversed_bits(i) >> 5 - LEVELS],)
    for level in tl.static_range(LEVELS):
        wholes = ()
        for i in tl.static_range(1 << LEVELS - 1 - level):
            pair = tl.join(parts[2 * i], parts[2 * i + 1])
            wholes += (tl.reshape(pair, [pair.numel]),)
        parts = wholes
    return parts[0]


@triton.constexpr_function
def reversed_bits(i):
    """i, a number of five bits, with its bits in reverse order."""
    return int(f"{i:05b}"[::-1], 2)


@triton.jit
def cast(a, dtype: tl.constexpr):
    """a in `dtype`, rounded to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16 and a.dtype != tl.bfloat16:
        # Triton's interpreter truncates when it casts to bf16.
        bits = a.to(tl.float32).to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        nan = (bits >> 16) | 0x40
        bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, nan, nearest)
        return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return a.to(dtype)


@triton.jit
def magnitude(a):
    """|a| as integers that rank as |a| does: NaN above Inf above every finite number."""
    if a.dtype == tl.float32:
        return a.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        return a.to(tl.int16, bitcast=True) & 0x7FFF


@triton.jit
def keep24(a0, a1, a2, a3):
    """Flags for the two largest of four magnitudes; the lower index wins a tie."""
    w01, w02, w03 = (a0 >= a1).to(tl.int32), (a0 >= a2).to(tl.int32), (a0 >= a3).to(tl.int32)
    w12, w13, w23 = (a1 >= a2).to(tl.int32), (a1 >= a3).to(tl.int32), (a2 >= a3).to(tl.int32)
    return (
        w01 + w02 + w03 >= 2,
        w12 + w13 - w01 >= 1,
        w23 - w02 - w12 >= 0,
        -w03 - w13 - w23 >= -1,
    )
