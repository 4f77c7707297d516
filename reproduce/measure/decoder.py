"""Measures a decoder layer under a method, in training and at inference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from experiments.bench.timing import in_turns
from experiments.bench.variants import Bench, bytes_held
from reproduce.measure.base import MethodLayer, Metrics, Report, Result
from reproduce.measure.setup import (
    BUFFERS,
    bench,
    check_ffn,
    clock_and_power,
    described,
    ends_dense,
    gpt2,
    llama_layer,
    milliseconds,
    rank_suffix,
    to_compare,
)


@dataclass(frozen=True, kw_only=True)
class Settings(MethodLayer):
    """A decoder layer.

    kv_heads: number of key and value heads of a LLaMA layer; null = a GPT-2 block, which has OPT's
        shapes.
    ranks: ranks of adapters at inference, in percent of the width.
    """

    kv_heads: int | None = None
    ranks: tuple[float, ...] = ()


def measure(config: Settings, _: Report) -> Result:
    """Speed and memory of a decoder layer over dense, in training and at inference.

    Memory is what stays allocated: in training weights, gradients, the moments of AdamW in fp32,
    masks, packed and dense operands; at inference the weights as they are stored. Activations are
    not included.
    """
    include = ("*",) if config.method == "slope" else ("*mlp.*",)
    build = llama_layer(config) if config.kv_heads else gpt2(config)
    check_ffn(config)
    dense = bench(config, "dense", build, include)
    sparse = bench(config, config.method, build, include)
    trained = {} if ends_dense(config) else {"": sparse}
    suffixes = {percent: rank_suffix(percent) for percent in config.ranks}
    for percent, suffix in suffixes.items() if trained else ():
        rank = max(1, round(config.width * percent / 100))
        options: dict[str, Any] = {"adapter_rank": rank, "adapter_fraction": 1.0, "total_steps": 1}
        trained[suffix] = bench(config, config.method, build, include, **options)
    calls = to_compare(dense, sparse, {f"inference{s}": one for s, one in trained.items()})
    found = in_turns(calls, config.on, config.repeats, BUFFERS)
    times = milliseconds(found, sparse)
    metrics: Metrics = {
        "train_speedup": times["dense"] / times["step"],
        "train_memory": training_bytes(sparse) / training_bytes(dense),
        **clock_and_power(found),
    }
    for suffix in ("", *suffixes.values()):
        speedup = memory = 1.0
        if suffix in trained:
            speedup = times["dense inference"] / times[f"inference{suffix}"]
            memory = stored_bytes(trained[suffix]) / stored_bytes(dense)
        metrics[f"inference_speedup{suffix}"] = speedup
        metrics[f"inference_memory{suffix}"] = memory
    return metrics, described(sparse, found)


def training_bytes(built: Bench) -> int:
    """Bytes that stay during training: weights, gradients, two fp32 moments, and what the converted
    layers keep."""
    trained = [p for p in built.converted.model.parameters() if p.requires_grad]
    gradients = sum(p.nbytes for p in trained)
    moments = 2 * 4 * sum(p.numel() for p in trained)
    return sum(bytes_held(built.converted).values()) + gradients + moments


def stored_bytes(built: Bench) -> int:
    """Bytes of the model after training: its parameters, and the row masks of SLoPe's layers."""
    model = built.converted.model
    masks = [b for name, b in model.named_buffers() if name.endswith(("row_mask", "left_mask"))]
    return sum(t.nbytes for t in [*model.parameters(), *masks])
