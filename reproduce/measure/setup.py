"""Builds what measures time: modules under a method, with inputs and calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from experiments.bench import linear, variants
from experiments.bench.timing import Call
from experiments.bench.variants import Bench
from experiments.support.errors import check_installed
from models.gpt2 import Block, GPTConfig
from reproduce.measure.base import BUFFERS, Layer, MethodLayer


class Hidden(nn.Module):
    """A transformers LLaMA without its embeddings: hidden states [B, T, C] -> [B, T, C].

    It calls the model's parts, because the forward pass of the model itself waits for the GPU when
    it looks for several sequences in one, and can then not be captured in a CUDA graph.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)[None]
        rotations = self.model.rotary_emb(x, position_ids=positions)
        for layer in self.model.layers:  # without a mask, attention is causal
            x = layer(x, position_ids=positions, position_embeddings=rotations)
        return self.model.norm(x)


def gpt2(config: Layer) -> Callable[[], nn.Module]:
    """A function that builds one GPT-2 block of the config's shape."""
    shape = GPTConfig(1, config.heads, config.width, vocab_size=1, n_inner=config.inner)
    return lambda: Block(shape)


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


def llama_layer(config: Layer) -> Callable[[], nn.Module]:
    """A function that builds one LLaMA layer of the config's shape."""
    shape = llama_config(config, layers=1, vocab_size=8)
    from transformers import LlamaModel

    return lambda: Hidden(LlamaModel(shape))


# --- modules under a method ----------------------------------------------------------------------


def check_products(config: Any, widths: tuple[int, int], tokens: int | None = None) -> None:
    """Raise a `UserError` if the products of a linear of these widths are wrong under the config's
    method."""
    shape = (tokens or config.tokens, *widths)
    check_once(config.method, shape, config.dtype, config.on, config.matmul)


@functools.cache
def check_once(
    method: str, shape: linear.Shape, dtype: torch.dtype, device: torch.device, products: str
) -> None:
    """Raise a `UserError` if a method's products of this shape by the backend `products` are wrong.
    Cached for all repeats: the expected products are in fp32, which takes long."""
    linear.gate(method, shape, dtype, device, products)


def check_ffn(config: MethodLayer) -> None:
    """Raise a `UserError` if the products of one of the two linears of a feed-forward network are
    wrong under the config's method."""
    for widths in ((config.width, config.ffn), (config.ffn, config.width)):
        check_products(config, widths)


def bench(
    config: Layer,
    name: str,
    build: Callable[[], nn.Module],
    include: tuple[str, ...],
    products: str | None = None,
    **options: Any,
) -> Bench:
    """A module made by `build`, under the method `name`, with random inputs and output gradients.

    products: the backend of the products, instead of `config.matmul`. options: further options of
    the method.
    """
    torch.manual_seed(config.seed)
    size = (BUFFERS, config.batch, config.length, config.width)
    with config.on:
        model = build().to(config.dtype)
        xs, dys = (list(torch.randn(size, dtype=config.dtype)) for _ in range(2))
    by = products or config.matmul
    converted = variants.convert(name, model, include, config.dtype, config.tokens, by, **options)
    return Bench(converted, xs, dys)


def adapting(rank: int) -> dict[str, Any]:
    """The options of SLoPe with adapters of this rank from the first step on."""
    return {"adapter_rank": rank, "adapter_fraction": 1.0, "total_steps": 1}


def evaluating(built: Bench) -> Call:
    """A forward pass of the model in evaluation mode."""
    model = built.converted.model

    def call(i: int) -> Tensor:
        model.eval()
        with torch.no_grad():
            y = model(built.inputs[i])
        model.train()
        return y

    return call


# --- training steps and forward passes of a dense and a sparse module ----------------------------


def to_compare(dense: Bench, sparse: Bench, inference: dict[str, Bench]) -> dict[str, Call]:
    """The calls to time: training steps of both models, whole and in parts, and forward passes in
    evaluation mode of the dense model (`dense inference`) and of the models in `inference`."""
    calls = {"dense": dense.forward_backward, **sparse.calls()}
    if inference:
        inference = {"dense inference": dense, **inference}
    for name, built in inference.items():
        built.converted.before(0)
        calls[name] = evaluating(built)
    return calls


def step_ms(times: Mapping[str, float], sparse: Bench) -> float:
    """The time of a whole sparse step with its share of the mask search. times: those of the calls
    of `to_compare`."""
    search = times.get("hooks, masks chosen", times["hooks"]) - times["hooks"]
    return times["whole"] + max(0.0, search) / sparse.converted.method.capabilities.mask_period


def ranks_of(width: int, percents: Iterable[float]) -> dict[str, int]:
    """The ranks of adapters by the end of their metrics' names, `_1_56` for 1.56 % of the width."""
    return {
        f"_{percent:g}".replace(".", "_"): max(1, round(width * percent / 100))
        for percent in percents
    }
