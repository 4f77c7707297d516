"""Measures packing for cuSPARSELt and for our own kernels, compared with its byte limit and other
packers; a part of `ops` on a GPU.

The least that any packer can move: the matrix (and its mask, a byte per entry) read once, values
and two bits per position written once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from common_kernels import nm_mask, transposable_mask24
from common_kernels.pack import BUFFERED, Packed24
from common_kernels.pack.operands import pack24_, pack_both24_, sample_pack24
from experiments.bench.timing import Call
from experiments.support.errors import UserError

if TYPE_CHECKING:
    from experiments.bench.report import Report

aten = torch.ops.aten
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
OWN = "cutlass_sm90"  # the layout of our own kernels
FLOORS = 1.4  # goal: at most this many times the time that moving its bytes takes


class Inputs:
    """The inputs of all packers: a matrix w, its transposable mask, a scale, a random key, and
    buffers to pack into by layout; `pruned` is w pruned to 2:4 along its rows, `pruned_fp8` the
    same in e4m3."""

    def __init__(self, w: Tensor) -> None:
        self.w, self.mask, device = w, transposable_mask24(w), w.device
        self.scale = torch.tensor(1.5, device=device)
        self.key = torch.tensor([77, 1], device=device)
        self.pruned = w * nm_mask(w)
        self.pruned_fp8 = self.pruned.to(FP8)
        self.out_fp8 = Packed24.empty(w.shape, FP8, device)
        out, transposed = (Packed24.empty(s, BF16, device) for s in (w.shape, w.shape[::-1]))
        self.out = {layout: replace(out, layout=layout) for layout in (BUFFERED, OWN)}
        self.transposed = {layout: replace(transposed, layout=layout) for layout in self.out}


@dataclass(frozen=True)
class Packer:
    """A packer. run: packs the inputs by a backend. moved: least bytes read and written per entry,
    given the bytes of an entry. peer: torch's packer for a bf16 matrix, or None."""

    run: Callable[[Inputs, str | None], tuple[Packed24, ...]]
    moved: Callable[[float], float]
    peer: tuple[str, Callable[[Inputs], Any]]


def one_way(
    i: Inputs, backend: str | None, source: str, fp8: bool = False, layout: str = BUFFERED
) -> tuple[Packed24, ...]:
    out = i.out_fp8 if fp8 else i.out[layout]
    mask, scale = i.mask if source == "mask" else None, i.scale if source == "soft" else None
    pack24_(out, i.w, source, mask, scale, backend=backend)
    return (out,)


def two_ways(
    i: Inputs, backend: str | None, searched: bool, layout: str = BUFFERED
) -> tuple[Packed24, ...]:
    out = i.out[layout], i.transposed[layout]
    pack_both24_(*out, i.w, None if searched else i.mask, backend=backend)
    return out


def sample(i: Inputs, backend: str | None, layout: str = BUFFERED) -> tuple[Packed24, ...]:
    stride = i.w.numel() // 4
    return (sample_pack24(i.w, i.key, stride, dtype=BF16, layout=layout, backend=backend),)


LIBRARY = ("_cslt_compress", lambda i: aten._cslt_compress(i.pruned))
LIBRARY_FP8 = ("_cslt_compress", lambda i: aten._cslt_compress(i.pruned_fp8))
TILE = (
    "_sparse_semi_structured_tile",
    lambda i: aten._sparse_semi_structured_tile(i.w, "largest_abs_values_greedy"),
)

PACKERS = {
    "pack, magnitude": Packer(
        partial(one_way, source="magnitude"), lambda b: b + 1.125, LIBRARY
    ),
    "pack, soft threshold and scale": Packer(
        partial(one_way, source="soft"), lambda b: b + 1.125, LIBRARY
    ),
    "pack, soft threshold and scale, fp8": Packer(
        partial(one_way, source="soft", fp8=True), lambda b: b + 0.625, LIBRARY_FP8
    ),
    "pack, given mask": Packer(partial(one_way, source="mask"), lambda b: b + 2.125, LIBRARY),
    "pack both ways, given mask": Packer(
        partial(two_ways, searched=False), lambda b: b + 3.25, TILE
    ),
    "pack both ways, exact search": Packer(
        partial(two_ways, searched=True), lambda b: b + 2.25, TILE
    ),
    "pack sample of a gradient": Packer(sample, lambda b: b + 1.125, LIBRARY),
    "pack, given mask, for our own kernels": Packer(
        partial(one_way, source="mask", layout=OWN), lambda b: b + 2.125, LIBRARY
    ),
    "pack both ways, given mask, for our own kernels": Packer(
        partial(two_ways, searched=False, layout=OWN), lambda b: b + 3.25, TILE
    ),
    "pack sample of a gradient, for our own kernels": Packer(
        partial(sample, layout=OWN), lambda b: b + 1.125, LIBRARY
    ),
}  # fmt: skip


def check(name: str, w: Tensor, backend: str | None = None) -> None:
    """Raise a `UserError` if the packer's bytes differ from those of plain PyTorch."""
    inputs = Inputs(w)
    got = [packed.buffer.clone() for packed in PACKERS[name].run(inputs, backend)]
    want = [packed.buffer for packed in PACKERS[name].run(inputs, "cpu")]
    if not all(torch.equal(*pair) for pair in zip(got, want, strict=True)):
        raise UserError(
            f"{name} writes other bytes than plain PyTorch for shape {tuple(w.shape)}, {w.dtype}: "
            "no time is reported; run `pytest tests/common_kernels`"
        )


def calls(name: str, inputs: list[Inputs], report: Report) -> dict[str, Call]:
    """The packer's call and, for a bf16 matrix, other libraries' calls for the same work."""

    def on_buffer(run: Callable[[Inputs], Any], i: int) -> Any:
        return run(inputs[i])

    packer = PACKERS[name]
    found: dict[str, Call] = {name: partial(on_buffer, lambda i: packer.run(i, None))}
    if inputs[0].w.dtype == BF16:
        peers = dict([packer.peer])
        if packer.peer is TILE and (other := xformers_packer(report)):
            peers["xformers"] = lambda i: other(i.w)
        for label, peer in peers.items():
            if report.usable(f"{label} beside {name}", partial(peer, inputs[0])):
                found[label] = partial(on_buffer, peer)
    return found


def xformers_packer(report: Report) -> Callable[[Tensor], Any] | None:
    try:
        from xformers.ops import sparsify24
    except ImportError as error:
        report.leave_out(f"xformers' packer: {error}")
        return None
    return lambda w: sparsify24(w, "largest_abs_values_greedy")
