"""One cell of a speed or memory table, measured on the device that is there.

A driver like those of `experiments`: `load`, `run`, `finished`. What is timed is built from
`experiments.bench`, dense and sparse in turns, after the sparse products have agreed with plain
formulas on the same shapes. The result is known by its config and the device, and is kept.
"""

from __future__ import annotations

import dataclasses
import gc
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import methods
from experiments import results
from experiments.bench import arms, linear
from experiments.bench.arms import ARMS, Bench, Converted
from experiments.bench.memory import parts
from experiments.bench.timing import in_turns
from experiments.config import digest, one_line_errors, typed
from experiments.errors import UserError
from models.gpt2 import MLP, Block, GPTConfig

BUFFERS = 2
Metrics = dict[str, float | None]  # None: this device does not tell
KINDS = ("linear", "gpt2", "decoder", "vit")


@dataclass(frozen=True, kw_only=True)
class Config:
    """What is measured, beside a dense model of the same shape.

    what: `linear` (batch * length tokens, width -> inner); `gpt2` (a feed-forward network and a
        whole block); `decoder` (a layer of a language model, with `ranks` of adapters at
        inference); `vit` (a timm model, forward and backward). method: of experiments.bench.ARMS.
    inner: width of the feed-forward network; null = 4 * width. kv_heads: of a LLaMA layer; null =
        a GPT-2 block, which has OPT's shapes. ranks: of adapters, in percent of the width.
    model, image: timm's name, and the side of its images. repeats: samples of each time.
    shrink: divisor of width and inner. device: `auto`, or `cuda` if nothing else will do.
    """

    what: str
    method: str
    batch: int = 1
    length: int = 1
    width: int = 0
    inner: int | None = None
    heads: int = 1
    kv_heads: int | None = None
    ranks: tuple[float, ...] = ()
    model: str = ""
    image: int = 224
    repeats: int = 7
    shrink: int = 1
    device: str = "auto"
    threads: int = 2
    seed: int = 0
    tier: str = "none"
    runs: str = "runs"

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(self.ranks))
        known = {"what": KINDS, "method": tuple(ARMS), "device": ("auto", "cuda")}
        for name, choices in known.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)}; choose of {', '.join(choices)}")

    @property
    def on(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.on.type == "cuda" else torch.float32

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def ffn(self) -> int:
        return self.inner or 4 * self.width

    def shrunk(self) -> Config:
        """The same with its widths divided."""
        inner = None if self.inner is None else self.inner // self.shrink
        return dataclasses.replace(self, width=self.width // self.shrink, inner=inner, shrink=1)

    def identity(self) -> dict[str, Any]:
        """Everything that the figures depend on, and the device they are measured on."""
        fields = dataclasses.asdict(self)
        for name in ("tier", "runs"):
            del fields[name]
        return {**fields, "device": device_name(self.on), "torch": torch.__version__}

    def digest(self) -> str:
        return digest(self.identity())

    def directory(self) -> Path:
        device = re.sub(r"\W+", "-", device_name(self.on).lower())
        return Path(self.runs, "bench", device, f"{self.what}-{self.method}-{self.digest()}")


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else results.cpu_name()


def load(overrides: list[str]) -> Config:
    """The config of `key=value` overrides, written as hydra's.

    Raises:
        UserError: a key or value that does not exist.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    with one_line_errors():
        parsed = OverridesParser.create().parse_overrides(overrides)
        values = {override.key_or_group: override.value() for override in parsed}
        values = {k: str(v) if hasattr(v, "text") else v for k, v in values.items()}
        return typed(Config, "bench", values).shrunk()


def finished(config: Config) -> dict[str, Any] | None:
    return results.read_finished(config.directory(), config.digest())


def run(config: Config, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure, or do nothing if it is done; returns the content of `result.json`.

    Raises:
        UserError: products that are wrong, or a package that is missing.
    """
    done = finished(config)
    if done is not None:
        return done
    if config.device == "cuda" and config.on.type != "cuda":
        raise UserError("device=cuda, but torch sees no GPU here; tier=smoke runs on a CPU")
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        measure = {"linear": of_linear, "gpt2": of_gpt2, "decoder": of_decoder, "vit": of_vit}
        metrics, used = measure[config.what](config)
    finally:
        torch.set_num_threads(threads)
        gc.collect()
        if config.on.type == "cuda":
            torch.cuda.empty_cache()
    result = {
        "config_hash": config.digest(),
        "config": config.identity(),
        "seed": config.seed,
        "tier": config.tier,
        "metrics": metrics,
        "backend": used,
    }
    known = {name: figure for name, figure in metrics.items() if figure is not None}
    report(", ".join(f"{name} {figure:.4g}" for name, figure in known.items()))
    return results.write_result(config.directory(), result)


def of_linear(config: Config) -> tuple[Metrics, str]:
    """Forward and backward of one linear. `prune_ms`: choosing masks and packing alone."""
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
    return metrics, sparse.converted.used


MICRO_STEPS = 64  # in an iteration of the authors' logs


def of_gpt2(config: Config) -> tuple[Metrics, str]:
    """A feed-forward network and a block, trained and at inference.

    `<part>_speedup` is that of forward and backward alone, as in FST's logs, where masks are chosen
    and weights packed in the first iteration only; `<part>_step_speedup` has the hooks of a step
    with one micro-batch in it, and of the search its share.
    """
    shape = GPTConfig(1, config.heads, config.width, vocab_size=1, n_inner=config.inner)
    for widths in ((config.width, config.ffn), (config.ffn, config.width)):
        gate(config, widths)
    metrics: Metrics = {}
    used = ""
    built = {"ffn": lambda: Named(mlp=MLP(shape)), "block": lambda: Block(shape)}
    for part, build in built.items():
        dense = bench(config, "dense", build, ("*mlp.*",))
        sparse = bench(config, config.method, build, ("*mlp.*",))
        times = training_times(config, dense, sparse) | inference_times(config, dense, sparse)
        used = sparse.converted.used
        metrics |= {
            f"{part}_dense_ms": MICRO_STEPS * times["dense"],
            f"{part}_sparse_ms": MICRO_STEPS * times["products"],
            f"{part}_speedup": times["dense"] / times["products"],
            f"{part}_step_speedup": times["dense"] / times["step"],
            f"{part}_inference_speedup": times["dense inference"] / times["inference"],
        }
    return metrics, used


def of_decoder(config: Config) -> tuple[Metrics, str]:
    """A decoder layer: speed of training and inference, and what they hold, over dense.

    Memory is that of what stays: weights, gradients, the moments of AdamW in fp32, masks, packed
    and dense operands; at inference the weights as they are stored. Activations are not in it.
    """
    include = ("*",) if config.method == "slope" else ("*mlp.*",)
    build = llama(config) if config.kv_heads else gpt2(config)
    for widths in ((config.width, config.ffn), (config.ffn, config.width)):
        gate(config, widths)
    dense = bench(config, "dense", build, include)
    sparse = bench(config, config.method, build, include)
    times = training_times(config, dense, sparse) | inference_times(config, dense, sparse)
    one = training_bytes(dense)
    metrics: Metrics = {
        "train_speedup": times["dense"] / times["step"],
        "train_memory": training_bytes(sparse) / one,
    }
    suffixes = {percent: f"_{percent:g}".replace(".", "_") for percent in config.ranks}
    if config.method == "t_sr_ste":  # FST: its model ends dense
        ones = {f"inference_{what}{s}": 1.0 for what in ("speedup", "memory")
                for s in ("", *suffixes.values())}  # fmt: skip
        return metrics | ones, sparse.converted.used
    metrics["inference_speedup"] = times["dense inference"] / times["inference"]
    metrics["inference_memory"] = stored_bytes(sparse) / stored_bytes(dense)
    for percent, suffix in suffixes.items():
        rank = max(1, round(config.width * percent / 100))
        options = {"adapter_rank": rank, "adapter_fraction": 1.0, "total_steps": 1}
        adapted = bench(config, config.method, build, include, **options)
        times = inference_times(config, dense, adapted)
        metrics[f"inference_speedup{suffix}"] = times["dense inference"] / times["inference"]
        metrics[f"inference_memory{suffix}"] = stored_bytes(adapted) / stored_bytes(dense)
        del adapted
    return metrics, sparse.converted.used


def of_vit(config: Config) -> tuple[Metrics, str]:
    """Forward and backward of a timm model with the hooks of a step; on a GPU compiled.

    `graph_ms` is the same in a CUDA graph: launched from Python, the sparse model may wait for the
    CPU.
    """
    import timm

    on_gpu = config.on.type == "cuda"
    torch.manual_seed(config.seed)
    with config.on:
        model: Any = timm.create_model(config.model, img_size=config.image).to(config.dtype)
        images = torch.randn(config.batch, 3, config.image, config.image, dtype=config.dtype)
    tokens = config.batch * model.patch_embed.num_patches + config.batch
    converted = convert(config.method, model, ("*mlp.*",), config, tokens)
    mlp = model.blocks[0].mlp
    for layer in (mlp.fc1, mlp.fc2):
        gate(config, (layer.in_features, layer.out_features), tokens)
    forward = torch.compile(model) if on_gpu else model

    def step(_: int) -> None:
        model.zero_grad()
        converted.before(0)
        forward(images).float().sum().backward()
        converted.after(0)

    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    launched = in_turns({"step": step}, config.on, config.repeats, graphs=False)["step"]
    metrics: Metrics = {"ms": launched.ms, "graph_ms": None, "peak_gb": None}
    if on_gpu:
        metrics["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        replayed = in_turns({"step": step}, config.on, config.repeats)["step"]
        metrics["graph_ms"] = replayed.ms if replayed.clock == "graph" else None
    return metrics, converted.used


# --- what is built -------------------------------------------------------------------------------


class Named(nn.ModuleDict):
    """Modules one after the other under names that globs can match."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__(modules)

    def forward(self, x: Tensor) -> Tensor:
        for module in self.values():
            x = module(x)
        return x


class Hidden(nn.Module):
    """A transformers model without embeddings: hidden states to hidden states."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(inputs_embeds=x, use_cache=False).last_hidden_state


def gpt2(config: Config) -> Callable[[], nn.Module]:
    shape = GPTConfig(1, config.heads, config.width, vocab_size=1, n_inner=config.inner)
    return lambda: Block(shape)


def llama(config: Config) -> Callable[[], nn.Module]:
    try:
        from transformers import LlamaConfig, LlamaModel
    except ImportError as error:
        raise UserError("a LLaMA layer needs transformers: pip install 'sparse24[hf]'") from error
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
    return "auto" if config.on.type == "cuda" else "dense"


def gate(config: Config, widths: tuple[int, int], tokens: int | None = None) -> None:
    """UserError if the products of a linear of these widths are wrong under the method."""
    shape = (tokens or config.tokens, *widths)
    linear.gate(config.method, shape, config.dtype, config.on, matmul(config))


def convert(
    name: str,
    model: nn.Module,
    include: tuple[str, ...],
    config: Config,
    tokens: int,
    **options: Any,
) -> Converted:
    """`experiments.bench.arms.convert`, with further options of the method."""
    arm = ARMS[name]
    chosen: dict[str, Any] = {**arm.options, **options, "include": include, "measure_every": 0}
    if arm.method == "slope":
        chosen["exclude"] = ()
    method = methods.build(arm.method, **chosen)
    method.convert(model, config.dtype)
    sparse = {} if arm.method == "dense" else method.accelerate(tokens, matmul(config))
    used = {arms.used_by(products) for products in sparse.values()} or {"dense"}
    return Converted(model, method, "; ".join(sorted(used)), sparse)


def bench(
    config: Config,
    name: str,
    build: Callable[[], nn.Module],
    include: tuple[str, ...],
    **options: Any,
) -> Bench:
    torch.manual_seed(config.seed)
    size = (BUFFERS, config.batch, config.length, config.width)
    with config.on:
        model = build().to(config.dtype)
        xs, dys = (list(torch.randn(size, dtype=config.dtype)) for _ in range(2))
    return Bench(convert(name, model, include, config, config.tokens, **options), xs, dys)


# --- what is measured ----------------------------------------------------------------------------


def training_times(config: Config, dense: Bench, sparse: Bench) -> dict[str, float]:
    """Milliseconds of `dense`, of the sparse `products` alone, and of a whole sparse `step`, with
    its share of the search for masks."""
    calls = {"dense": dense.forward_backward, **sparse.calls()}
    times = {k: t.ms for k, t in in_turns(calls, config.on, config.repeats, BUFFERS).items()}
    search = times.get("hooks, masks chosen", times["hooks"]) - times["hooks"]
    times["step"] = times["whole"] + max(0.0, search) / sparse.converted.method.mask_period
    return times


def inference_times(config: Config, dense: Bench, sparse: Bench) -> dict[str, float]:
    """Milliseconds of a forward pass of each, in evaluation mode."""

    def call(arm: Bench) -> Callable[[int], Tensor]:
        def forward(i: int) -> Tensor:
            with torch.no_grad():
                return model(arm.inputs[i])

        arm.converted.before(0)
        model = arm.converted.model
        return forward

    calls = {"dense inference": call(dense), "inference": call(sparse)}
    for arm in (dense, sparse):
        arm.converted.model.eval()
    times = in_turns(calls, config.on, config.repeats, BUFFERS)
    for arm in (dense, sparse):
        arm.converted.model.train()
    return {name: time.ms for name, time in times.items()}


def training_bytes(arm: Bench) -> int:
    """Weights, gradients, two moments in fp32, and what the converted layers keep beside them."""
    trained = [p for p in arm.converted.model.parameters() if p.requires_grad]
    gradients = sum(p.nbytes for p in trained)
    moments = 2 * 4 * sum(p.numel() for p in trained)
    return sum(parts(arm.converted).values()) + gradients + moments


def stored_bytes(arm: Bench) -> int:
    """Of the model after training: its parameters, and the row masks of SLoPe's layers."""
    model = arm.converted.model
    masks = [b for name, b in model.named_buffers() if name.endswith(("row_mask", "left_mask"))]
    return sum(t.nbytes for t in [*model.parameters(), *masks])
