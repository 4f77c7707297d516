"""Measures the cells of speed and memory tables.

Models and clocks are those of `experiments.bench`: dense and sparse in turns, on a GPU under a
sustained load, after the sparse products have agreed with plain formulas on the same shapes. Every
function of `MEASURES` takes the config and what is told of progress, and returns metrics and what
ran the products.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import methods
from experiments.bench import arms, linear
from experiments.bench.arms import Bench, Converted
from experiments.bench.sizes import parts
from experiments.bench.timing import Call, Time, in_turns
from experiments.support.errors import UserError
from models.gpt2 import MLP, Block, GPTConfig
from reproduce import sam

if TYPE_CHECKING:
    from reproduce.bench import Config

BUFFERS = 2
Metrics = dict[str, float | None]  # None: this device does not tell
Told = Callable[[str], None]


def of_linear(config: Config, _: Told) -> tuple[Metrics, str]:
    """Speed of one linear, forward and backward. `prune_ms`: time to choose masks and
    pack alone."""
    shape = (config.tokens, config.width, config.ffn)
    gate(config, (config.width, config.ffn))
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
    return metrics | clock_and_power(times), sparse.converted.used


MICRO_STEPS = 64  # in an iteration of the authors' logs


def of_gpt2(config: Config, _: Told) -> tuple[Metrics, str]:
    """Speed of a feed-forward network and of a block, in training and at inference.

    `<part>_speedup` is that of forward and backward alone, as in FST's logs, where masks are chosen
    and weights packed in the first iteration only; `<part>_step_speedup` has the hooks of a step
    with one micro-batch in it, and of the search its share.
    """
    shape = GPTConfig(1, config.heads, config.width, vocab_size=1, n_inner=config.inner)
    for widths in ((config.width, config.ffn), (config.ffn, config.width)):
        gate(config, widths)
    built = {"ffn": lambda: Named(mlp=MLP(shape)), "block": lambda: Block(shape)}
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
    return metrics, sparse.converted.used


def of_decoder(config: Config, _: Told) -> tuple[Metrics, str]:
    """Speed and memory of a decoder layer over dense, in training and at inference.

    Memory is that of what stays: weights, gradients, the moments of AdamW in fp32, masks, packed
    and dense operands; at inference the weights as they are stored. Activations are not in it.
    """
    include = ("*",) if config.method == "slope" else ("*mlp.*",)
    build = llama(config) if config.kv_heads else gpt2(config)
    for widths in ((config.width, config.ffn), (config.ffn, config.width)):
        gate(config, widths)
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
    return metrics, sparse.converted.used


def rank_suffix(percent: float) -> str:
    """The end of a metric's name that says the rank, `_1_56`."""
    return f"_{percent:g}".replace(".", "_")


def of_sam(config: Config, report: Told) -> tuple[Metrics, str]:
    """Speed of SAM's encoder: forward and backward with the hooks of a step. On a GPU it is
    compiled and in a CUDA graph; figures named `launched` are without both."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    on_gpu = config.on.type == "cuda"
    changed: dict[str, Any] = {"img_size": config.image}
    if config.width:
        changed |= {"embed_dim": config.width, "num_heads": config.heads}
    tokens = config.batch * (config.image // 16) ** 2
    with config.on:
        images = torch.randn(config.batch, 3, config.image, config.image, dtype=config.dtype)
    images.requires_grad_()
    built: dict[str, sam.EncoderStep] = {}
    for label, name in {"dense": "dense", "sparse": config.method}.items():
        before = allocated(config.on)
        torch.manual_seed(config.seed)
        with config.on:
            model: Any = sam.encoder(config.model, **changed).to(config.dtype)
        mlp = model.blocks[0].mlp
        for layer in (mlp.fc1, mlp.fc2):
            gate(config, (layer.in_features, layer.out_features), tokens)
        converted = convert(name, model, ("*mlp.*",), config, tokens)
        with torch.no_grad():
            gradient = torch.randn_like(model(images))
        built[label] = sam.EncoderStep(name, converted, images, gradient)
        built[label].bytes = allocated(config.on) - before
    calls: dict[str, Call] = {label: arm.step for label, arm in built.items()}
    metrics: Metrics = {"launched_speedup": None}
    # The only fused kernel that gives the gradient of a bias; torch may prefer others on some GPUs.
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        for label in built:
            metrics |= {f"{label}_launched_ms": None, f"{label}_gb": None}
        if on_gpu:
            times = in_turns(calls, config.on, config.repeats, graphs=False)
            metrics |= {f"{label}_launched_ms": time.ms for label, time in times.items()}
            metrics["launched_speedup"] = times["dense"].ms / times["sparse"].ms
            report(f"launched: dense {times['dense'].ms:.1f} ms, 2:4 {times['sparse'].ms:.1f} ms")
            for label, arm in built.items():
                start = time.monotonic()
                arm.compile()
                report(f"{label}: compiled in {time.monotonic() - start:.0f} s")
            for label, arm in built.items():
                others = sum(a.bytes for a in built.values() if a is not arm)
                metrics[f"{label}_gb"] = arm.peak(others) / 1e9
        times = in_turns(calls, config.on, config.repeats)
        for arm in built.values():
            arm.clear()
    metrics |= {f"{label}_ms": time.ms for label, time in times.items()}
    metrics["speedup"] = times["dense"].ms / times["sparse"].ms
    clocks = {time.clock for time in times.values()}
    how = {"graph": "in a CUDA graph", "events": "launched from Python", "host": "not compiled"}
    told = " and ".join(how[clock] for clock in sorted(clocks))
    return metrics | clock_and_power(times), f"{built['sparse'].converted.used}, {told}"


MEASURES = {"linear": of_linear, "gpt2": of_gpt2, "decoder": of_decoder, "sam": of_sam}


# --- what is built -------------------------------------------------------------------------------


class Named(nn.ModuleDict):
    """Modules called one after the other, under names that a method's globs can match."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__(modules)

    def forward(self, x: Tensor) -> Tensor:
        for module in self.values():
            x = module(x)
        return x


class Hidden(nn.Module):
    """A transformers model without its embeddings: hidden states [B, T, C] -> [B, T, C]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(inputs_embeds=x, use_cache=False).last_hidden_state


def gpt2(config: Config) -> Callable[[], nn.Module]:
    """A function that builds one GPT-2 block of the config's shape."""
    shape = GPTConfig(1, config.heads, config.width, vocab_size=1, n_inner=config.inner)
    return lambda: Block(shape)


def llama(config: Config) -> Callable[[], nn.Module]:
    """A function that builds one LLaMA layer of the config's shape."""
    try:
        from transformers import LlamaConfig, LlamaModel
    except ImportError as error:
        raise UserError(
            "a LLaMA layer needs transformers: pip install -e '.[hf]' in the checkout"
        ) from error
    shape = LlamaConfig(
        hidden_size=config.width,
        intermediate_size=config.ffn,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        num_hidden_layers=1,
        vocab_size=8,
    )
    return lambda: Hidden(LlamaModel(shape))


def matmul(config: Config) -> str:
    """The backend of sparse products to measure with: `auto` on a GPU, `dense` on a CPU."""
    return "auto" if config.on.type == "cuda" else "dense"


def gate(config: Config, widths: tuple[int, int], tokens: int | None = None) -> None:
    """Raise a `UserError` if the products of a linear of these widths are wrong under the
    method."""
    shape = (tokens or config.tokens, *widths)
    linear.gate(config.method, shape, config.dtype, config.on, matmul(config))


def convert(
    name: str,
    model: nn.Module,
    include: tuple[str, ...],
    config: Config,
    tokens: int,
    products: str | None = None,
    **options: Any,
) -> Converted:
    """`experiments.bench.arms.convert`, with further options of the method. products: their
    backend instead of `matmul(config)`."""
    arm = arms.arm(name)
    chosen: dict[str, Any] = {**arm.options, **options, "include": include, "measure_every": 0}
    if arm.method == "slope":
        chosen["exclude"] = ()
    method = methods.build(arm.method, **chosen)
    method.convert(model, config.dtype)
    sparse = {} if arm.method == "dense" else method.accelerate(tokens, products or matmul(config))
    used = {arms.used_by(products) for products in sparse.values()} or {"dense"}
    return Converted(model, method, "; ".join(sorted(used)), sparse)


def bench(
    config: Config,
    name: str,
    build: Callable[[], nn.Module],
    include: tuple[str, ...],
    **options: Any,
) -> Bench:
    """A module made by `build`, under the method, with random inputs and output gradients."""
    torch.manual_seed(config.seed)
    size = (BUFFERS, config.batch, config.length, config.width)
    with config.on:
        model = build().to(config.dtype)
        xs, dys = (list(torch.randn(size, dtype=config.dtype)) for _ in range(2))
    return Bench(convert(name, model, include, config, config.tokens, **options), xs, dys)


# --- what is measured ----------------------------------------------------------------------------


def ends_dense(config: Config) -> bool:
    """True for FST, which leaves a dense model: its inference is that of a dense one."""
    return config.method == "t_sr_ste"


def evaluating(arm: Bench) -> Call:
    """A forward pass of the model in evaluation mode."""
    model = arm.converted.model

    def call(i: int) -> Tensor:
        model.eval()
        with torch.no_grad():
            y = model(arm.inputs[i])
        model.train()
        return y

    return call


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


def clock_and_power(times: dict[str, Time]) -> Metrics:
    """SM clock in MHz and power in W of the GPU during a comparison."""
    first = next(iter(times.values()))
    return {"sm_mhz": first.mhz, "watts": first.watts}


def allocated(device: torch.device) -> int:
    """Bytes that torch has allocated on a GPU; 0 on a CPU."""
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


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
