"""Measure a feed-forward block of GPT-2 under each method: `python -m experiments.bench block`.

Layer norm, two linears with GELU between them, and the residual; compiled on a GPU.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from experiments.bench import linear, variants
from experiments.bench.report import Report, Row
from experiments.bench.timing import Time
from experiments.bench.variants import Bench
from models.gpt2 import MLP, GPTConfig

NAMES = ("dense", "dense fp8", "fst", "s_ste", "s_ste, fp8", "slope")
# Size of GPT-2 and tokens.
QUICK_SHAPE = ("nano", 64)
CPU_SHAPE = ("nano", 512)
GPU_SHAPE = ("774M", 16384)
BUFFERS = 2


class FeedForwardBlock(nn.Module):
    """The norm, feed-forward network and residual sum of a GPT-2 block, [T, C] -> [T, C]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def bench(options: argparse.Namespace, report: Report) -> None:
    on_gpu = options.device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    size, tokens = QUICK_SHAPE if options.quick else GPU_SHAPE if on_gpu else CPU_SHAPE
    config = GPTConfig.of_size(size)
    names = variants.chosen(report, [*NAMES, *variants.others(report)])
    matmul = variants.default_matmul(options)
    arguments = (config, tokens, dtype, options.device, matmul)
    with variants.compiling():
        dense = build("dense", *arguments)
        built = {name: build(name, *arguments) for name in names}
        for name in names:
            for widths in ((config.n_embd, config.ffn_width), (config.ffn_width, config.n_embd)):
                linear.gate(name, (tokens, *widths), dtype, options.device, matmul)
            gate(name, built[name])
        report.note("correctness: green")
        compared = variants.compare(dense, built, options.device, options.repeats, BUFFERS)
    for name, times in compared.items():
        report.add(row(name, built[name], times, dtype))


def row(name: str, built: Bench, times: dict[str, Time], dtype: torch.dtype) -> Row:
    tokens, width = built.inputs[0].shape
    return Row(
        name, "fp8" if variants.variant(name).fp8 else str(dtype).removeprefix("torch."),
        f"GPT-2, {tokens} x {width}", built.converted.used, times["whole"],
        peers={"dense": times["dense"].ms},
        figures=variants.parts(times),
    )  # fmt: skip


def build(
    name: str, config: GPTConfig, tokens: int, dtype: torch.dtype, device: torch.device, matmul: str
) -> Bench:
    torch.manual_seed(0)
    with device:
        model = FeedForwardBlock(config).to(dtype)
        converted = variants.convert(name, model, ("*mlp.*",), dtype, tokens, matmul)
        shape = (BUFFERS, tokens, config.n_embd)
        xs, dys = (list(torch.randn(shape, dtype=dtype)) for _ in range(2))
    return Bench(converted, xs, dys, compiled=device.type == "cuda")


def gate(name: str, built: Bench) -> None:
    """Raise a `UserError` unless the compiled block's gradients equal those of the block
    uncompiled."""
    found = []
    for run in (built.converted.model, built.run):
        built.converted.before(0)
        built.run = run
        built.forward_backward(0)
        found.append([built.inputs[0].grad, *(p.grad for p in built.parameters)])
    variants.check_same(name, found[1], found[0])
