"""Settings and results of all measures, and the modules and calls that they time."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import methods
from common_kernels.matmul import unavailable
from experiments.bench import linear, variants
from experiments.bench.timing import SUSTAINED_S, Call, Time, in_turns
from experiments.bench.variants import Bench
from experiments.support import results
from experiments.support.errors import check_installed
from experiments.support.names import Identified
from models.gpt2 import GPTConfig

Report = Callable[[str], None]
Metrics = dict[str, float | None]  # None: it cannot be measured on this device
Result = tuple[Metrics, str]  # metrics by name, and a description of what ran the products
BUFFERS = 2  # inputs of every call, used in rotation
LAUNCHED = {"graph": "in a CUDA graph", "events": "launched from Python", "host": "not in a graph"}
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Times(dict[str, float]):
    """Milliseconds of calls that took turns, by name. load: the GPU's SM clock in MHz and its power
    in W meanwhile, as metrics. launched: a description of how the calls were launched."""

    def __init__(self, times: Mapping[str, Time]) -> None:
        super().__init__((name, time.ms) for name, time in times.items())
        first = next(iter(times.values()))
        self.load: Metrics = {"sm_mhz": first.mhz, "watts": first.watts}
        self.launched = " and ".join(sorted({LAUNCHED[time.clock] for time in times.values()}))


@dataclass(frozen=True, kw_only=True)
class Base(Identified):
    """The settings of every measure."""

    what: ClassVar[str]  # the name of the measure
    products: ClassVar[tuple[str, ...]] = ("cusparselt",)  # one of which must be there on a GPU
    precision: str = "bf16"  # of weights and products on a GPU, or fp16; a CPU uses fp32
    repeats: int = 7  # samples of each time
    device: str = "auto"  # or `cuda` to require a GPU
    threads: int = 2
    seed: int = 0
    tier: str = "none"
    runs: str = "runs"

    @property
    def on(self) -> torch.device:
        """The device to measure on."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and products."""
        return PRECISIONS[self.precision] if self.on.type == "cuda" else torch.float32

    @property
    def matmul(self) -> str:
        """The backend of sparse products to measure with: `auto` on a GPU, `dense` on a CPU."""
        return "auto" if self.on.type == "cuda" else "dense"

    @property
    def no_products(self) -> str:
        """Why this device has no 2:4 products for the measure; "" if it has them or needs none.
        Dense products would be measured in their place."""
        reasons = [unavailable(name, self.on, self.dtype) for name in self.products]
        return "" if None in reasons else "; ".join(map(str, reasons))

    def measure(self, report: Report) -> Result:
        """Measure, reporting progress; return metrics by name and what ran the products."""
        raise NotImplementedError

    def in_turns(
        self, calls: Mapping[str, Call], buffers: int = BUFFERS, graphs: bool = True
    ) -> Times:
        """The times of calls that take turns, each on its inputs in rotation. Repeats of a
        measurement, which differ in their seed, have other orders."""
        return Times(in_turns(calls, self.on, self.repeats, buffers, graphs, seed=self.seed))

    def identity(self) -> dict[str, Any]:
        """Everything that the result depends on, including the device, as plain values."""
        fields = {"what": self.what, **dataclasses.asdict(self)}
        del fields["tier"], fields["runs"]
        sustained = SUSTAINED_S if self.on.type == "cuda" else None
        machine = {"device": results.device_name(), "torch": torch.__version__}
        return {**fields, **machine, "sustained_s": sustained, "order": "random"}

    def directory(self) -> Path:
        """The directory of the result."""
        device = re.sub(r"\W+", "-", results.device_name().lower())
        return Path(self.runs, "bench", device, f"{self.what}-{self.digest()}")


@dataclass(frozen=True, kw_only=True)
class Layer(Base):
    """The settings of a measure of a layer on batch * length tokens."""

    batch: int = 1
    length: int = 1
    width: int = 0
    inner: int | None = None  # width of the feed-forward network; null = 4 * width
    heads: int = 1
    shrink: int = 1  # divisor of width and inner, for small tiers

    def __post_init__(self) -> None:
        for name in ("width", "inner"):
            if value := getattr(self, name):
                object.__setattr__(self, name, value // self.shrink)

    @property
    def tokens(self) -> int:
        """Number of tokens of a batch."""
        return self.batch * self.length

    @property
    def ffn(self) -> int:
        """Width of the feed-forward network."""
        return self.inner or 4 * self.width

    @property
    def block(self) -> GPTConfig:
        """The shape of a GPT-2 block."""
        return GPTConfig(1, self.heads, self.width, vocab_size=1, n_inner=self.inner)


@dataclass(frozen=True, kw_only=True)
class MethodLayer(Layer):
    """The settings of a measure of a layer under a method."""

    method: str  # a key of experiments.bench.variants.VARIANTS, or the name of a method

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method not in variants.VARIANTS:
            methods.module(self.method)  # whose error lists the names

    @property
    def ends_dense(self) -> bool:
        """True for FST, which leaves a dense model: its inference is that of a dense one."""
        return self.method == "fst"


class LlamaLayer(nn.Module):
    """A layer of transformers' LLaMA with its norm: hidden states [B, T, C] -> [B, T, C].

    It calls the model's parts: the model's own forward pass looks for several sequences in one, so
    that it waits for the GPU and cannot be captured in a CUDA graph.
    """

    def __init__(self, config: Layer) -> None:
        super().__init__()
        shape = llama_config(config, layers=1, vocab_size=8)
        from transformers import LlamaModel

        self.model: Any = LlamaModel(shape)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)[None]
        rotations = self.model.rotary_emb(x, position_ids=positions)
        for layer in self.model.layers:  # without a mask, attention is causal
            x = layer(x, position_ids=positions, position_embeddings=rotations)
        return self.model.norm(x)


def llama_config(config: Any, layers: int, vocab_size: int) -> Any:
    """transformers' config of a LLaMA of the config's shape."""
    check_installed("transformers", "a LLaMA needs transformers", "hf")
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=config.width,
        intermediate_size=config.ffn,
        num_attention_heads=config.heads,
        num_key_value_heads=getattr(config, "kv_heads", None) or config.heads,
        num_hidden_layers=layers,
        vocab_size=vocab_size,
    )


# Raises a `UserError` if a method's products of a shape are wrong. Cached for all repeats: the
# expected products are in fp32, which takes long.
gate = functools.cache(linear.gate)


def bench(
    config: Layer,
    name: str,
    build: Callable[[], nn.Module],
    include: tuple[str, ...],
    products: str | None = None,
    **options: Any,
) -> Bench:
    """A module made by `build`, under the method `name`, with random inputs and output gradients;
    if `config` needs sparse products, those of its feed-forward network were checked.

    products: their backend, instead of `config.matmul`. options: further ones of the method.
    """
    by, ffn = products or config.matmul, (config.width, config.ffn)
    for widths in (ffn, ffn[::-1]) if config.products and name != "dense" else ():
        gate(name, (config.tokens, *widths), config.dtype, config.on, by)
    torch.manual_seed(config.seed)
    size = (BUFFERS, config.batch, config.length, config.width)
    with config.on:
        model = build().to(config.dtype)
        xs, dys = (list(torch.randn(size, dtype=config.dtype)) for _ in range(2))
    converted = variants.convert(name, model, include, config.dtype, config.tokens, by, **options)
    return Bench(converted, xs, dys)


def adapting(rank: int) -> dict[str, Any]:
    """The options of SLoPe with adapters of this rank from the first step on."""
    return {"adapter_rank": rank, "adapter_fraction": 1.0, "total_steps": 1}


def evaluating(built: Bench) -> Call:
    """A forward pass of the model in evaluation mode."""
    model = built.converted.model

    @torch.no_grad()
    def call(i: int) -> Tensor:
        model.eval()
        y = model(built.inputs[i])
        model.train()
        return y

    return call


def to_compare(dense: Bench, sparse: Bench, trained: Mapping[str, Bench]) -> dict[str, Call]:
    """The calls to time: training steps of both models, whole and in parts, and forward passes in
    evaluation mode of the models in `trained`, if there are any, and of the dense one."""
    calls = {"dense": dense.forward_backward, **sparse.calls()}
    for name, built in ({"dense": dense, **trained} if trained else {}).items():
        built.converted.before(0)
        calls[f"inference {name}"] = evaluating(built)
    return calls


def inference_speedup(times: Mapping[str, float], name: str) -> float:
    """The speed of a model of `to_compare` over dense at inference; 1 if it ends dense."""
    return times.get("inference dense", 1.0) / times.get(f"inference {name}", 1.0)


def step_ms(times: Mapping[str, float], sparse: Bench) -> float:
    """The time of a sparse step of `to_compare`, with its share of the mask search."""
    search = times.get("hooks, masks chosen", times["hooks"]) - times["hooks"]
    return times["whole"] + max(0.0, search) / sparse.converted.method.capabilities.mask_period


def ranks_of(width: int, percents: Iterable[float]) -> dict[str, int]:
    """The ranks of adapters by the end of their metrics' names, `_1_56` for 1.56 % of the width."""
    ranks = {f"_{p:g}": max(1, round(width * p / 100)) for p in percents}
    return {name.replace(".", "_"): rank for name, rank in ranks.items()}
