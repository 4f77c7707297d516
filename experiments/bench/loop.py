"""A user's own loop, as in docs/own_loop.md: `python -m experiments.bench loop`.

A transformers LLaMA with random weights, fp32 with bf16 autocast on a GPU, whose linears are all
converted, trains step by step from Python: hooks, loss, clipping, optimizer. Each method takes
turns with the dense model in the same loop. The rows `host, METHOD` time the host alone, which
often decides: one layer's forward and backward pass with few tokens, and `nn.Linear`'s, without
waiting for the device.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import methods
from common_kernels.matmul import linear24
from experiments.bench import linear, variants
from experiments.bench.report import Report, Row
from experiments.bench.timing import Call, in_turns, quantiles
from experiments.bench.variants import Converted
from experiments.support import memory
from methods.nn.linear import SparseLinear
from methods.nn.operands import Packed

COMPILED, ADAMW = ", compiled", ", torch's AdamW"
METHODS = ("fst", "s_ste", "slope")
# The rows by name; a row without ADAMW has methods.FusedAdamW.
NAMES = (
    *(name + COMPILED for name in METHODS),
    *METHODS,
    *(f"{name}, fp8{COMPILED}" for name in ("s_ste", "fst")),
    f"fst{ADAMW}{COMPILED}",
)
HOSTS = tuple(f"host, {name}" for name in (*METHODS, "s_ste, fp8"))
TOKENS, CALLS = 64, 20  # of the rows of the host


@dataclass(frozen=True)
class Size:
    """A LLaMA and its batch, and the width of the layers of the host's rows."""

    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    batch: tuple[int, int]
    host: int

    @property
    def tokens(self) -> int:
        return self.batch[0] * self.batch[1]

    @property
    def shape(self) -> str:
        sequences, length = self.batch
        widths = f"{self.hidden} -> {self.intermediate}"
        return f"LLaMA, {self.layers} x {widths}, {sequences} x {length}"


QUICK = Size(2, 64, 128, 320, (2, 32), 64)
LARGE = Size(12, 2048, 8192, 32000, (8, 1024), 4096)


def bench(options: argparse.Namespace, report: Report) -> None:
    on_gpu, matmul = options.device.type == "cuda", variants.default_matmul(options)
    size = LARGE if on_gpu and not options.quick else QUICK
    chosen = report.chosen([*HOSTS, *NAMES])
    for name in [name for name in HOSTS if name in chosen]:
        report.add(host(name, size.host, matmul, options))
    for compiled in (False, True):
        names = [n for n in NAMES if n in chosen and n.endswith(COMPILED) is compiled]
        if compiled and not on_gpu:
            report.leave_out(f"without a GPU: {', '.join(names)}")
        elif names:
            dense = Loop("dense", size, compiled, matmul, options.device)
            for name in names:
                measure(name, size, dense, matmul, options, report)
            dense.close()


class Loop:
    """A model in the loop of docs/own_loop.md, with the setup of a row."""

    def __init__(
        self, name: str, size: Size, compiled: bool, matmul: str, device: torch.device
    ) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        self.compiled, self.device = compiled, device
        config = LlamaConfig(
            vocab_size=size.vocabulary, hidden_size=size.hidden, num_hidden_layers=size.layers,
            intermediate_size=size.intermediate, num_attention_heads=max(2, size.hidden // 128),
            use_cache=False,
        )  # fmt: skip
        with device:
            self.model: Any = LlamaForCausalLM(config)
            ids = torch.randint(size.vocabulary, size.batch)
        self.batch = {"input_ids": ids, "labels": ids}
        setup, dtype = name.removesuffix(COMPILED).removesuffix(ADAMW), dtype_of(device)
        self.converted: Converted = variants.convert(
            setup, self.model, "all", dtype, size.tokens, matmul
        )
        parameters, fused = self.model.parameters(), setup != "dense" and ADAMW not in name
        kind: Any = methods.FusedAdamW if fused else torch.optim.AdamW
        self.optimizer = kind(parameters, lr=1e-4, **({} if fused else {"fused": True}))
        if compiled:
            for block in self.model.model.layers:
                block.compile()
        self.numbers = itertools.count()

    def step(self, _: int) -> None:
        method, number = self.converted.method, next(self.numbers)
        method.on_step_begin(number)
        with autocast(self.device):
            loss = method.loss(self.model, self.batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        method.on_gradients(number, self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()
        method.on_step_end(number)

    def close(self) -> None:
        """Free the model's memory."""
        del self.model, self.converted, self.optimizer
        memory.free(self.device)


def measure(
    name: str,
    size: Size,
    dense: Loop,
    matmul: str,
    options: argparse.Namespace,
    report: Report,
) -> None:
    """Add a row, once the products of its layers are found right."""
    setup, on = name.removesuffix(COMPILED).removesuffix(ADAMW), options.device
    for widths in ((size.hidden, size.intermediate), (size.intermediate, size.hidden)):
        linear.gate(setup, (size.tokens, *widths), dtype_of(on), on, matmul)
    loop = Loop(name, size, dense.compiled, matmul, on)
    with variants.compiling() if dense.compiled else nullcontext():
        calls: dict[str, Call] = {name: loop.step, "dense": dense.step}
        times = in_turns(calls, on, options.repeats, graphs=False, steps=True)
    acceleration = loop.converted.method.acceleration
    promised = acceleration.saved_ms if acceleration else 0.0
    report.add(
        Row(
            name, precision(on), size.shape, loop.converted.used, times[name],
            {"dense": times["dense"].ms},
            figures={
                "tokens/s": 1e3 * size.tokens / times[name].ms, "promised saving ms": promised
            },
        )
    )  # fmt: skip
    loop.close()


# --- the host alone ------------------------------------------------------------------------------


def host(name: str, width: int, matmul: str, options: argparse.Namespace) -> Row:
    """The host's time of a layer's passes, with that of `nn.Linear` as the peer, and of a product
    with that of `F.linear`."""
    on, dtype = options.device, dtype_of(options.device)
    plain = nn.Linear(width, width, bias=False, device=on)
    model = nn.Sequential(nn.Linear(width, width, bias=False, device=on))
    # Every product that can be sparse is, even if that is slower for the device.
    matmul = "cusparselt" if on.type == "cuda" and matmul == "auto" else matmul
    converted = variants.convert(name.removeprefix("host, "), model, ("*",), dtype, TOKENS, matmul)
    converted.before(0)
    x = torch.randn(TOKENS, width, device=on, dtype=dtype, requires_grad=True)
    dy = torch.ones(TOKENS, width, device=on, dtype=dtype)

    def passes(layer: nn.Module) -> None:
        x.grad = None
        layer.zero_grad()
        with autocast(on):
            y = layer(x)
        y.backward(dy)

    weight, (layer,) = plain.weight.detach().to(dtype), model
    calls = {
        "sparse": lambda: passes(model), "dense": lambda: passes(plain),
        "F.linear": lambda: F.linear(x.detach(), weight),
    }  # fmt: skip
    assert isinstance(layer, SparseLinear)
    packed = layer.packed_operands()[0] if layer.dtype == dtype and layer.packed is not None else 0
    if isinstance(packed, Packed) and not converted.sparse["0"].fp8:
        calls["product"] = lambda: linear24(packed, x.detach())
    samples: dict[str, list[float]] = {call: [] for call in calls}
    for turn in range(options.repeats + 1):
        for call, run in calls.items():
            milliseconds = launched(run, on)
            if turn:  # the first one compiles
                samples[call].append(milliseconds)
    found = {call: statistics.median(own) for call, own in samples.items()}
    figures = {f"{call} us": 1e3 * found[call] for call in ("product", "F.linear") if call in found}
    shape, time_ = f"{TOKENS} x {width} -> {width}", quantiles(samples["sparse"])
    used, peers = converted.used, {"dense": found["dense"]}
    return Row(name, precision(on), shape, used, time_, peers, figures=figures)


def launched(run: Any, device: torch.device) -> float:
    """The milliseconds that the host takes for a call, without waiting for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        run()
    return 1e3 * (time.perf_counter() - start) / CALLS


def dtype_of(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def precision(device: torch.device) -> str:
    return "bfloat16 autocast" if device.type == "cuda" else "float32"


def autocast(device: torch.device) -> Any:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()
