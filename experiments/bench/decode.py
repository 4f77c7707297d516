"""Measure a product with few tokens, as in decoding: `python -m experiments.bench decode`.

The weights of one shape take turns, so that none is read from a cache. The limit is the time of the
dense product times the share of its bytes that the packed 2:4 matrix has: 9/16, with values of 8 or
4 bits (rows `int8`, `int4`) 0.32 or 0.20. Rows `packed` are of `linear24`, not `few_tokens24`.
"""

import argparse
from typing import Any

import torch
import torch.nn.functional as F

from common_kernels import dequantize24, few_tokens24, fragments24, nm_mask, pack24, quantize24
from common_kernels.decode import MOST
from common_kernels.matmul import Problem, fastest, library_layout, linear24
from common_kernels.pack import Packed24
from common_kernels.pack.operands import pack24_
from experiments.bench import gates, variants
from experiments.bench.report import Report, Row
from experiments.bench.timing import Call, in_turns

QUICK_SHAPES = ((64, 128),)  # out, in
SHAPES = (
    (4096, 4096), (11008, 4096), (4096, 11008),  # LLaMA 7B
    (14336, 4096), (4096, 14336),  # 8B
    (28672, 8192), (8192, 28672),  # 70B
)  # fmt: skip
KINDS = {"": 16, ", int8": 8, ", int4": 4}  # bits of a value
PACKED = ", packed"  # by `linear24`, with the fastest kernel
CACHE = 240e6  # bytes of weights in turn, several times those of any GPU's cache


@torch.no_grad()
def bench(options: argparse.Namespace, report: Report) -> None:
    names = [f"{tokens} tokens{kind}" for kind in KINDS for tokens in (1, 4, 8, MOST)]
    names += [f"{tokens} tokens{PACKED}" for tokens in (8, 16, 32, 64, 128)]
    chosen = report.chosen(names)
    for shape in QUICK_SHAPES if options.quick or options.device.type == "cpu" else SHAPES:
        for name in chosen:
            measure(name, shape, options, report)


def measure(name: str, shape: tuple[int, int], options: argparse.Namespace, report: Report) -> None:
    """Add the row of one shape. Raises a `UserError` if the product is wrong."""
    (rows, columns), on, dtype = shape, options.device, torch.bfloat16
    many = name.endswith(PACKED)
    bits = 16 if many else KINDS[name[name.index(" tokens") + 7 :]]
    count = 2 if on.type == "cpu" else max(2, -int(-CACHE * 16 // (2 * rows * columns * bits)))
    weights = torch.randn(count, rows, columns, device=on, dtype=dtype)
    x = torch.randn(int(name.split()[0]), columns, device=on, dtype=dtype)
    used, product = "triton" if on.type == "cuda" else "cpu", few_tokens24
    packed: list[Any] = []
    if many:
        found = fastest(Problem(rows, columns, len(x), dtype, dtype, True, True), on)
        used, product = found.layout if found else library_layout(on), linear24  # type: ignore
    for w in weights:
        w *= nm_mask(w)
        if many:
            packed.append(Packed24.empty(w.shape, dtype, on, used))
            pack24_(packed[-1], w, "magnitude")
            continue
        values: Any = pack24(w, w != 0)
        if bits < 16:
            values = quantize24(values, bits)
            w.copy_(dequantize24(values, dtype))
        packed.append(fragments24(values))
    what = f"{name} x {columns} -> {rows}"
    allowed = gates.tolerance(variants.variant("dense"), dtype, columns)
    gates.agree(what, product(packed[-1], x), F.linear(x.float(), w.float()), allowed)
    calls: dict[str, Call] = {
        "dense": lambda i: F.linear(x, weights[i]),
        "2:4": lambda i: product(packed[i], x),
    }
    times = in_turns(calls, on, options.repeats, count)
    dense = times["dense"].ms
    report.add(
        Row(name, "bfloat16", f"{columns} -> {rows}", used, times["2:4"], {"dense": dense},
            limit_ms=share(bits) * dense)
    )  # fmt: skip


def share(bits: int) -> float:
    """The bytes of a packed 2:4 matrix over those of a dense one in bf16: half of the values, two
    bits of position for each, and a scale for 128 columns."""
    return (bits / 2 + 1 + (16 / 128 if bits < 16 else 0)) / 16
