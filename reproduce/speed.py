"""Measures speed and memory of single linears, feed-forward networks and decoder layers.

Models are timed by `experiments.bench`: dense and sparse in turns, on a GPU under a sustained load,
after the sparse products have agreed with plain formulas on the same shapes. `MEASURES` as
explained in speed_setup.py.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from torch import nn

from experiments.bench import linear
from experiments.bench.arms import Bench
from experiments.bench.sizes import parts
from experiments.bench.timing import Call, Time, in_turns
from models.gpt2 import MLP, Block, GPTConfig
from reproduce.engine import Report
from reproduce.speed_setup import (
    BUFFERS,
    Metrics,
    bench,
    check_ffn,
    check_products,
    clock_and_power,
    evaluating,
    gpt2,
    launched,
    llama_layer,
    matmul,
    rank_suffix,
)

if TYPE_CHECKING:
    from reproduce.bench import Config

MICRO_STEPS = 64  # forward and backward passes in one iteration of the logs of FST's authors


def of_linear(config: Config, _: Report) -> tuple[Metrics, str]:
    """Speed of one linear, forward and backward. `prune_ms`: time to choose masks and
    pack alone."""
    shape = (config.tokens, config.width, config.ffn)
    check_products(config, (config.width, config.ffn))
    of = (shape, config.dtype, config.on, matmul(config), BUFFERS)
    dense, sparse = linear.build("dense", *of), linear.build(config.method, *of)
    calls = {
        "dense": dense.forward_backward,
        "sparse": sparse.whole,
        "prune": lambda _: sparse.hooks(sparse.converted.searching),
    }
    times = in_turns(calls, config.on, config.repeats, BUFFERS)
    metrics: Metrics = {f"{name}_ms": time.ms for name, time in times.items()}
    metrics["speedup"] = times["dense"].ms / times["sparse"].ms
    return metrics | clock_and_power(times), described(sparse, times)


def of_gpt2(config: Config, _: Report) -> tuple[Metrics, str]:
    """Speed of a feed-forward network (`ffn`) and of a whole GPT-2 block (`block`), in training and
    at inference.

    `<part>_speedup` is that of forward and backward alone, as in FST's logs, where masks are chosen
    and weights packed in the first iteration only. `<part>_step_speedup` includes the hooks of a
    step with one micro-batch, and the step's share of the mask search.
    """
    shape = GPTConfig(1, config.heads, config.width, vocab_size=1, n_inner=config.inner)
    check_ffn(config)
    built = {
        "ffn": lambda: nn.Sequential(OrderedDict(mlp=MLP(shape))),  # a name for the method's globs
        "block": lambda: Block(shape),
    }
    pairs: dict[str, tuple[Bench, Bench]] = {}
    calls: dict[str, Call] = {}
    for part, build in built.items():
        dense, sparse = (bench(config, n, build, ("*mlp.*",)) for n in ("dense", config.method))
        pairs[part] = dense, sparse
        inference = {} if ends_dense(config) else {"inference": sparse}
        named = to_compare(dense, sparse, inference).items()
        calls |= {f"{part} {name}": call for name, call in named}
    found = in_turns(calls, config.on, config.repeats, BUFFERS)
    metrics = clock_and_power(found)
    for part, (_dense, sparse) in pairs.items():
        own = {n.removeprefix(f"{part} "): t for n, t in found.items() if n.startswith(part)}
        times = milliseconds(own, sparse)
        metrics |= {
            f"{part}_dense_ms": MICRO_STEPS * times["dense"],
            f"{part}_sparse_ms": MICRO_STEPS * times["products"],
            f"{part}_speedup": times["dense"] / times["products"],
            f"{part}_step_speedup": times["dense"] / times["step"],
            f"{part}_inference_speedup": 1.0,
        }
        if not ends_dense(config):
            speedup = times["dense inference"] / times["inference"]
            metrics[f"{part}_inference_speedup"] = speedup
    return metrics, described(sparse, found)


def of_decoder(config: Config, _: Report) -> tuple[Metrics, str]:
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
        options = {"adapter_rank": rank, "adapter_fraction": 1.0, "total_steps": 1}
        trained[suffix] = bench(config, config.method, build, include, **options)
    calls = to_compare(dense, sparse, {f"inference{s}": arm for s, arm in trained.items()})
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


def described(sparse: Bench, times: dict[str, Time]) -> str:
    """A description of what ran the sparse products, and of how the calls were launched."""
    return f"{sparse.converted.used}, {launched(times, on_cpu='not in a graph')}"


def ends_dense(config: Config) -> bool:
    """True for FST, which leaves a dense model: its inference is that of a dense one."""
    return config.method == "fst"


def to_compare(dense: Bench, sparse: Bench, inference: dict[str, Bench]) -> dict[str, Call]:
    """The calls to time: training steps of both models, whole and in parts, and forward passes in
    evaluation mode of the dense model (`dense inference`) and of the models in `inference`."""

    def forward(arm: Bench) -> Call:
        arm.converted.before(0)
        return evaluating(arm)

    calls = {"dense": dense.forward_backward, **sparse.calls()}
    if inference:
        calls["dense inference"] = forward(dense)
    return calls | {name: forward(arm) for name, arm in inference.items()}


def milliseconds(found: dict[str, Time], sparse: Bench) -> dict[str, float]:
    """The times of the calls of `to_compare`, and `step`: a whole sparse step with its share of the
    mask search."""
    times = {name: time.ms for name, time in found.items()}
    search = times.get("hooks, masks chosen", times["hooks"]) - times["hooks"]
    times["step"] = times["whole"] + max(0.0, search) / sparse.converted.method.mask_period
    return times


def training_bytes(arm: Bench) -> int:
    """Bytes that stay during training: weights, gradients, two fp32 moments, and what the converted
    layers keep."""
    trained = [p for p in arm.converted.model.parameters() if p.requires_grad]
    gradients = sum(p.nbytes for p in trained)
    moments = 2 * 4 * sum(p.numel() for p in trained)
    return sum(parts(arm.converted).values()) + gradients + moments


def stored_bytes(arm: Bench) -> int:
    """Bytes of the model after training: its parameters, and the row masks of SLoPe's layers."""
    model = arm.converted.model
    masks = [b for name, b in model.named_buffers() if name.endswith(("row_mask", "left_mask"))]
    return sum(t.nbytes for t in [*model.parameters(), *masks])


MEASURES = {"linear": of_linear, "gpt2": of_gpt2, "decoder": of_decoder}
