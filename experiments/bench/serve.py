"""Times prefill and generation with packed 2:4 weights: `python -m experiments.bench serve`.

A transformers LLaMA with random weights, whose linears except the head are 2:4, runs

    dense    unchanged
    few      with every linear packed for few tokens alone
    int4     the same with weights of its own, integers of four bits
    adapters as `few`, and every linear has SLoPe's adapters of a rank of 1/16 of the width
    packed   with every linear packed, for any number of tokens
    chosen   as set up by `models.packed.pack`: packed within the measured limits, else dense; with
             --thorough, since measuring takes minutes, the first time also to compile kernels

A text is 128 tokens of one sequence after a prompt, both timed as a whole; each token replays a
CUDA graph (models/decoding.py), and in rows "compiled text" the blocks are compiled. A prefill
reads a batch of prompts of up to 2,048 tokens and keeps their cache. A generation step reads one
token of each sequence after 128 others, on a GPU in a CUDA graph, as serving engines replay it.
"""

import argparse
import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from common_kernels import nm_mask
from common_kernels.decode import MOST
from experiments.bench.gates import agree
from experiments.bench.report import Report, Row
from experiments.bench.timing import in_turns
from models.decoding import Decoder
from models.packed import Limits, PackedProduct, limits_of, pack
from models.quantized import quantize
from models.sparse import add_low_rank

PROMPT, CONTEXT, NEW = 2048, 128, 128  # tokens
WORK = {  # the variants of each kind of work
    "text": ("dense", "few", "int4", "adapters"),
    "compiled text": ("dense", "few", "int4"),
    "prefill": ("dense", "packed"),
    "generation": ("dense", "few", "int4", "packed"),
}
THOROUGH = {w: (*v, "chosen") if w in ("prefill", "generation") else v for w, v in WORK.items()}
LIMITS = {
    "few": Limits(MOST, None),
    "int4": Limits(MOST, None),
    "adapters": Limits(MOST, None),
    "packed": Limits(MOST, 0),
    "chosen": None,
}


@dataclass(frozen=True)
class Size:
    """A LLaMA, and the tokens of a prompt (`text`) and of a prefill, and the sequences of a
    generation, a row for each."""

    name: str
    shape: Mapping[str, int]
    counts: Mapping[str, tuple[int, ...]]


SIZES = {
    "nano": Size(
        "LLaMA nano",
        {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1},
        {"text": (8,), "prefill": (8, 128), "generation": (1, 4)},
    ),
    "1.1B": Size(
        "LLaMA 1.1B",
        {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632,
         "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4},
        {"text": (128, 1024), "prefill": (256, 4096, 16384), "generation": (1, 16, 256, 1024)},
    ),
    "7B": Size(
        "LLaMA 7B",
        {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32},
        {"text": (128, 1024), "prefill": (1024, 4096), "generation": (1, 16, 256)},
    ),
}  # fmt: skip


@torch.inference_mode()
def bench(options: argparse.Namespace, report: Report) -> None:
    on_gpu = options.device.type == "cuda"
    work = THOROUGH if options.thorough else WORK
    chosen = report.chosen(f"{name}, {own}" for name, variants in work.items() for own in variants)
    for name in options.size if on_gpu and not options.quick else ["nano"]:
        measure(SIZES[name], chosen, options, report)
    if not on_gpu:
        report.leave_out("without a GPU: larger models, and CUDA graphs")


def measure(size: Size, chosen: list[str], options: argparse.Namespace, report: Report) -> None:
    """Add the rows `chosen` of one model."""
    dense, graphs = build(size, options.device), options.device.type == "cuda"
    for work in dict.fromkeys(name.partition(", ")[0] for name in chosen):
        if work == "compiled text" and not graphs:
            continue
        wanted = [name.partition(", ")[2] for name in chosen if name.startswith(f"{work}, ")]
        in_graphs = graphs and work != "prefill"
        models = {"dense": dense}
        for name in (name for name in wanted if name != "dense"):
            models |= packed(dense, name, in_graphs, report)
        gate(models, size, report)
        if "chosen" in models:
            where = " in a CUDA graph" if in_graphs else ""
            add_limits(where, models["chosen"], size, report)
        generate = functools.partial(text, compiled=work == "compiled text")
        kinds = {"prefill": ("tokens", prefill), "generation": ("sequences", generation)}
        unit, start = kinds.get(work, (f"tokens and {NEW} new ones", generate))
        for count in size.counts[work.removeprefix("compiled ")]:
            calls = {name: start(model, count) for name, model in models.items()}
            # The calls of a text replay graphs of their own.
            captured = work == "generation"
            times = in_turns(calls, options.device, options.repeats, graphs=captured)
            if captured and graphs and any(time.clock != "graph" for time in times.values()):
                report.leave_out(f"{work}, {count} sequences: it cannot be captured here")
                continue
            done = NEW if "text" in work else count
            for name in (name for name in wanted if name in models):
                shape, used = f"{size.name}, {count} {unit}", used_by(models[name])
                peers = {"dense": times["dense"].ms}
                figures = {"tokens/s": 1e3 * done / times[name].ms}
                what = (f"{work}, {name}", "bfloat16", shape, used, times[name])
                report.add(Row(*what, peers, figures=figures))


def build(size: Size, device: torch.device) -> Any:
    """The dense model."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    settings: dict[str, Any] = {**size.shape, "max_position_embeddings": 2 * PROMPT}
    with device, torch.inference_mode(False), torch.no_grad():
        config = LlamaConfig(**settings)
        dense: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        for name, parameter in dense.named_parameters():
            if "_proj" in name:
                parameter *= nm_mask(parameter)
    return dense.requires_grad_(False)


def packed(dense: Any, name: str, graphs: bool, report: Report) -> dict[str, nn.Module]:
    """The packed variant of a model, which shares all weights but integers; {} if it cannot be."""
    with torch.inference_mode(False):
        own = {id(p) for n, p in dense.named_parameters() if name == "int4" and "_proj" in n}
        shared = {id(p): p for p in dense.parameters() if id(p) not in own}
        model = copy.deepcopy(dense, shared)
        if own:
            quantize(model, 4)
        for layer in [m for n, m in model.named_modules() if name == "adapters" and "_proj" in n]:
            rank = model.config.hidden_size // 16
            left = torch.randn(rank, layer.in_features, device=model.device)
            # Without an effect, so that the model's output is that of `dense`.
            add_low_rank(layer, left, left.new_zeros(rank, layer.out_features))
    try:
        pack(model, LIMITS[name], graphs=graphs)
    except ValueError as reason:
        report.leave_out(f"{name}: {reason}")
        return {}
    return {name: model}


def used_by(model: nn.Module) -> str:
    """The layouts of a model's packed weights, which show what multiplies them; `few` if they are
    packed for few tokens alone, `dense` if none is packed."""
    forms = [m.packed for m in model.modules() if isinstance(m, PackedProduct)]
    return ", ".join(sorted({f.layout if f else "few" for f in forms})) or "dense"


def gate(models: Mapping[str, Any], size: Size, report: Report) -> None:
    """Raise a `UserError` for a variant whose output is off by more than bf16's error over some
    layers from that of dense products; for integers, of their own."""
    ids = tokens(models["dense"], 2, 64)
    want: dict[str, torch.Tensor] = {}
    for length in (64, 4):  # the second for products with few tokens
        for name, model in models.items():
            output = model.model(ids[:, :length]).last_hidden_state.float()
            expected = want.setdefault(name if name == "int4" else "dense", output)
            agree(f"{name} disagrees with dense:", output, expected[:, :length], 2**-4)
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
    """A call that reads the next token of `count` sequences at a fixed place, as graphs need it."""
    ids = tokens(model, count, CONTEXT + 1)
    decoder = Decoder(model, count, CONTEXT + 1)
    decoder.read(ids[:, :-1])
    last = ids[:, -1:].contiguous()

    def step(_: int) -> Any:
        decoder.place(CONTEXT)
        return decoder.logits(last)

    return step


def text(model: Any, prompt: int, compiled: bool) -> Callable[[int], Any]:
    """A call that generates NEW tokens after a prompt."""
    ids = tokens(model, 1, prompt)
    decoder = Decoder(model, 1, prompt + NEW, compiled)

    def generate(_: int) -> Any:
        logits = decoder.read(ids)
        for _ in range(NEW - 1):
            logits = decoder.step(logits.argmax(-1))
        return logits.argmax(-1)

    return generate


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
