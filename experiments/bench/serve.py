"""Times prefill and generation with packed 2:4 weights: `python -m experiments.bench serve`.

A transformers LLaMA with random weights, whose linears except the head are 2:4, runs

    dense    unchanged
    packed   with every linear packed, for any number of tokens
    chosen   as set up by `models.packed.pack`: packed within the measured limits, else dense; they
             are measured for launched layers, or for layers in a graph

A prefill reads a batch of prompts of up to 2,048 tokens and keeps their cache. A generation step
reads one token of each sequence after 128 others. Python launches every kernel, as in transformers'
`generate`; generation steps are also timed in a CUDA graph, as serving engines replay them.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from common_kernels import nm_mask
from common_kernels.decode import MOST
from experiments.bench.report import Report, Row
from experiments.bench.timing import Time, in_turns
from experiments.bench.variants import agree
from models.hf import cached
from models.packed import Limits, PackedProduct, limits_of, pack

PROMPT, CONTEXT = 2048, 128  # tokens
VARIANTS = ("dense", "packed", "chosen")
WORK = ("prefill", "generation", "generation in a CUDA graph")


@dataclass(frozen=True)
class Size:
    """A LLaMA, the tokens of a prefill and the sequences of a generation."""

    name: str
    shape: Mapping[str, int]
    tokens: tuple[int, ...]
    sequences: tuple[int, ...]


SIZES = {
    "nano": Size(
        "LLaMA nano",
        {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1},
        (8, 128), (1, 4),
    ),
    "1.1B": Size(
        "LLaMA 1.1B",
        {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632,
         "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4},
        (16, 64, 256, 1024, 4096, 16384), (1, 16, 64, 256, 1024),
    ),
    "7B": Size(
        "LLaMA 7B",
        {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32},
        (64, 256, 1024, 4096), (1, 64, 256),
    ),
}  # fmt: skip


@torch.inference_mode()
def bench(options: argparse.Namespace, report: Report) -> None:
    on_gpu = options.device.type == "cuda"
    chosen = report.chosen([f"{work}, {variant}" for work in WORK for variant in VARIANTS])
    for name in options.size if on_gpu and not options.quick else ["nano"]:
        measure(SIZES[name], chosen, options, report)
    if not on_gpu:
        report.leave_out("without a GPU: larger models, and CUDA graphs")


def measure(size: Size, chosen: list[str], options: argparse.Namespace, report: Report) -> None:
    """Add the rows `chosen` of one model."""
    models = build(size, options.device, report)
    gate(models, size, report)
    if "chosen" in models:
        add_limits("", models["chosen"], size, report)
    for work in WORK:
        graphs = work.endswith("graph")
        wanted = [name for name in models if f"{work}, {name}" in chosen]
        if not wanted or (graphs and options.device.type != "cuda"):
            continue
        start = prefill if work == "prefill" else generation
        if graphs and "chosen" in models:
            pack(models["chosen"], graphs=True)
            add_limits(" in a CUDA graph", models["chosen"], size, report)
        unit = "tokens" if work == "prefill" else "sequences"
        for count in size.tokens if work == "prefill" else size.sequences:
            timed = dict.fromkeys(["dense", *wanted])
            calls = {name: start(models[name], count) for name in timed}
            times = in_turns(calls, options.device, options.repeats, graphs=graphs)
            if graphs and any(time.clock != "graph" for time in times.values()):
                report.leave_out(f"{work}, {count} sequences: it cannot be captured here")
                continue
            for name in wanted:
                shape = f"{size.name}, {count} {unit}"
                used = used_by(models[name])
                report.add(row(f"{work}, {name}", shape, used, times, count))


def build(size: Size, device: torch.device, report: Report) -> dict[str, nn.Module]:
    """The variants by name."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    settings: dict[str, Any] = {**size.shape, "max_position_embeddings": 2 * PROMPT}
    with device, torch.inference_mode(False), torch.no_grad():
        dense = LlamaForCausalLM(LlamaConfig(**settings)).bfloat16().eval()
        for name, parameter in dense.named_parameters():
            if "_proj" in name:
                parameter *= nm_mask(parameter)
        models: dict[str, nn.Module] = {"dense": dense.requires_grad_(False)}
        for name, limits in (("packed", Limits(MOST, 0)), ("chosen", None)):
            model = copy.deepcopy(dense)
            try:
                pack(model, limits)
            except ValueError as reason:
                report.leave_out(f"{name}: {reason}")
            else:
                models[name] = model
    return models


def used_by(model: nn.Module) -> str:
    """The layouts of a model's packed weights, which show what multiplies them; `dense` if none."""
    layers = (m for m in model.modules() if isinstance(m, PackedProduct))
    return ", ".join(sorted({layer.packed.layout for layer in layers})) or "dense"


def gate(models: Mapping[str, Any], size: Size, report: Report) -> None:
    """Raise a `UserError` for a variant whose output differs from that of dense products by more
    than bf16's error over some layers."""
    ids = tokens(models["dense"], 2, 64)
    outputs = {name: model.model(ids).last_hidden_state.float() for name, model in models.items()}
    want = outputs["dense"]
    for name, output in outputs.items():
        agree(f"{name} disagrees with dense:", output, want, 2**-4)
    report.note(f"correctness of {size.name}: green")


def tokens(model: Any, rows: int, length: int) -> torch.Tensor:
    """Random ids [rows, length] on the model's device."""
    generator = torch.Generator(model.device).manual_seed(0)
    size = (rows, length)
    return torch.randint(model.config.vocab_size, size, device=model.device, generator=generator)


def prefill(model: Any, count: int) -> Callable[[int], Any]:
    """A call that reads prompts of `count` tokens together."""
    length = min(count, PROMPT)
    ids = tokens(model, count // length, length)
    return lambda _: model(input_ids=ids, use_cache=True, logits_to_keep=1).logits


def generation(model: Any, count: int) -> Callable[[int], Any]:
    """A call that reads the next token of `count` sequences. Their cache keeps its content and its
    address, from which a graph of the call reads it."""
    ids = tokens(model, count, CONTEXT + 1)
    [(name, cache)] = cached(model).items()
    model(input_ids=ids[:, :-1], use_cache=True, logits_to_keep=1, **{name: cache})
    last = ids[:, -1:].contiguous()

    def step(_: int) -> Any:
        grown = copy.copy(cache)  # only the copy's layers get longer tensors
        grown.layers = [copy.copy(layer) for layer in cache.layers]
        return model(input_ids=last, use_cache=True, **{name: grown}).logits

    return step


def row(name: str, shape: str, used: str, times: Mapping[str, Time], count: int) -> Row:
    own = times[name.rpartition(", ")[2]]
    peers = {"dense": times["dense"].ms}
    figures = {"tokens/s": 1e3 * count / own.ms}
    return Row(name, "bfloat16", shape, used, own, peers, figures=figures)


def add_limits(where: str, model: nn.Module, size: Size, report: Report) -> None:
    """Add two rows for each shape of a model's 2:4 linears: the most tokens with which the product
    for few runs, and the crossover; without a figure if there is none."""
    found, used = limits_of(model), used_by(model)
    limits = {
        f"{layer.in_features} -> {layer.out_features}": found.get(at, Limits(0, None))
        for at, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and "_proj" in at
    }
    for layer, (few, crossover) in limits.items():
        for name, count in (("few", few or None), ("crossover", crossover)):
            figures = {} if count is None else {"tokens": float(count)}
            at = f"{size.name}, {layer}"
            report.add(Row(name + where, "bfloat16", at, used, figures=figures))
