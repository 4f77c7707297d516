"""Measure one linear under each method: `python -m experiments.bench linear`.

A row is a step with one micro-batch: the method's hooks (masks, packing, decay) and the three
products. It also has the times of its parts and of a dense linear, and the memory that the linear
holds. Weight, input and gradients are bf16 on a GPU and fp32 on a CPU. The limit is the time of the
three dense products by themselves, half of it for a product that runs sparse. The rows of `act24`
and `relu2` are of feed-forward networks, two linears with a squared ReLU between them.
"""

import argparse
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import methods
from common_kernels import relu24
from experiments.bench import dense_fp8, gates, variants
from experiments.bench.report import MIB, Report, Row
from experiments.bench.timing import Call, in_turns
from experiments.bench.variants import NETWORKS, VARIANTS, Bench
from experiments.support.errors import UserError
from methods.nn.gemms import DENSE

Shape = tuple[int, int, int]  # tokens, in, out

QUICK_SHAPES: tuple[Shape, ...] = ((64, 64, 128),)
CPU_SHAPES: tuple[Shape, ...] = ((2048, 768, 3072),)
GPU_SHAPES: tuple[Shape, ...] = (
    (16384, 1280, 5120),  # GPT-2 774M
    (16384, 5120, 1280),
    (13008, 1024, 4096),  # ViT-L
    (13008, 4096, 1024),
    (8192, 4096, 14336),
    (8192, 8192, 28672),
)
BUFFERS = 2


def bench(options: argparse.Namespace, report: Report) -> None:
    on_gpu = options.device.type == "cuda"
    names = variants.chosen(report, [*VARIANTS, *others(report)])
    own = variants.dtype_of(options.device), options.device, options.matmul
    shapes = GPU_SHAPES if on_gpu else CPU_SHAPES
    for shape in options.shapes or (QUICK_SHAPES if options.quick else shapes):
        for name in names:
            gate(name, shape, *own)
        report.note(f"correctness of {shape_name(shape)}: green")
        for network in (False, True):
            alike = [name for name in names if (name in NETWORKS) == network]
            for row in compared(alike, shape, options) if alike else ():
                report.add(row)
    if not on_gpu:
        report.leave_out("without a GPU: bf16, sparse and FP8 products, large shapes")


def others(report: Report) -> list[str]:
    """The methods without a setup that `--only` names."""
    found = [name for name in methods.available() if name in report.only and name not in VARIANTS]
    for name in found:
        own = variants.variant(name)
        if methods.build(own.method, **own.options).capabilities.needs_adamw:
            raise UserError(f"--only {name}: it needs AdamW, and this benchmark has no optimizer")
    return found


def compared(names: list[str], shape: Shape, options: argparse.Namespace) -> Iterator[Row]:
    """The rows of the named variants, all linears or all networks, in turns with dense ones."""
    rates, dtype = [dense_products(shape, options)], variants.dtype_of(options.device)
    peers, text = ["dense"], shape_name(shape)
    if names[0] in NETWORKS:
        rates.append(dense_products((shape[0], shape[2], shape[1]), options))
        peers, text = [variants.RELU2, variants.RELU2_FP8], f"{text} -> {shape[1]}"
    of = (shape, dtype, options.device, options.matmul, BUFFERS)
    built = {name: build(name, *of) for name in names}
    calls: dict[str, Call] = {peer: build(peer, *of).forward_backward for peer in peers}
    for name, one in built.items():
        calls |= {f"{name}: {part}": call for part, call in one.calls().items()}
    times = in_turns(calls, options.device, options.repeats, BUFFERS)
    for name, one in built.items():
        own, converted = variants.variant(name), one.converted
        fp8 = own.fp8 and not own.simulated and dense_fp8.E4M3 in rates[0]
        rate = dense_fp8.E4M3 if fp8 else dtype
        of_each = zip(rates, [*converted.sparse.values()] or [DENSE, DENSE], strict=False)
        parts = [part for part in one.calls() if part != "whole"]
        yield Row(
            name, "fp8" if fp8 else str(dtype).removeprefix("torch."), text,
            converted.used, times[f"{name}: whole"],
            peers={peer: times[peer].ms for peer in peers},
            limit_ms=sum(
                ms[rate][p] * (0.5 if getattr(sparse, p) else 1.0)
                for ms, sparse in of_each for p in variants.PRODUCTS
            ),
            figures={
                **{f"{part} ms": times[f"{name}: {part}"].ms for part in parts},
                **{f"{part} MiB": n / MIB for part, n in variants.bytes_held(converted).items()},
            },
        )  # fmt: skip


def shape_name(shape: Shape) -> str:
    tokens, inputs, outputs = shape
    return f"{tokens} x {inputs} -> {outputs}"


def build(
    name: str, shape: Shape, dtype: torch.dtype, device: torch.device, matmul: str, buffers: int
) -> Bench:
    """A linear without bias, or a network, under the method `name`, with inputs for it."""
    tokens, inputs, outputs = shape
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int, std: float = 1.0) -> torch.Tensor:
        x = torch.empty(size, device=device).normal_(std=std, generator=generator)
        return x.to(dtype)

    linear = nn.Linear(inputs, outputs, bias=False, device="meta")
    linear.weight = nn.Parameter(normal(outputs, inputs, std=0.02))
    model = nn.Sequential(linear)
    if name in NETWORKS:
        model.extend([nn.Identity(), nn.Linear(outputs, inputs, bias=False, device="meta")])
        vars(model[1])["forward"] = partial(relu24, prune=False)
        model[2].weight = nn.Parameter(normal(inputs, outputs, std=0.02))
        outputs = inputs
    converted = variants.convert(name, model, ("*",), dtype, tokens, matmul)
    xs = [normal(tokens, inputs) for _ in range(buffers)]
    return Bench(converted, xs, [normal(tokens, outputs) for _ in range(buffers)])


def gate(name: str, shape: Shape, dtype: torch.dtype, device: torch.device, matmul: str) -> None:
    """Raise a `UserError` unless the linear's products agree with masked dense formulas."""
    built = build(name, shape, dtype, device, matmul, 1)
    if name in NETWORKS:
        gates.check_network(name, built)
    else:
        gates.check(name, built, shape)


def dense_products(
    shape: Shape, options: argparse.Namespace
) -> dict[torch.dtype, dict[str, float]]:
    """Milliseconds of each of the three products, dense, and on a GPU also in FP8, by dtype."""
    (tokens, inputs, outputs), device = shape, options.device
    dtype = variants.dtype_of(device)
    x, dy, w = (
        [torch.randn(size, device=device, dtype=dtype) for _ in range(BUFFERS)]
        for size in ((tokens, inputs), (tokens, outputs), (outputs, inputs))
    )
    calls: dict[str, Call] = {
        "fprop": lambda i: F.linear(x[i], w[i]),
        "dgrad": lambda i: dy[i] @ w[i],
        "wgrad": lambda i: dy[i].t() @ x[i],
    }
    prefixes = {dtype: ""}
    if device.type == "cuda":
        prefixes[dense_fp8.E4M3] = "fp8 "
        x8, w8 = ([dense_fp8.quantize(t, dense_fp8.E4M3) for t in own] for own in (x, w))
        dy8 = [dense_fp8.quantize(t, dense_fp8.E5M2) for t in dy]  # as above: codes, transposed
        of, product = ((torch.ones((), device=device),) * 2, dtype), dense_fp8.product
        calls["fp8 fprop"] = lambda i: product(x8[i][0], w8[i][0], *of, fast=True)
        calls["fp8 dgrad"] = lambda i: product(dy8[i][0], w8[i][1], *of)
        calls["fp8 wgrad"] = lambda i: product(dy8[i][1], x8[i][1], *of)
    times = in_turns(calls, device, options.repeats, BUFFERS)
    return {r: {p: times[of + p].ms for p in variants.PRODUCTS} for r, of in prefixes.items()}
