"""Measures decoding with a LLaMA, dense and with packed 2:4 linears."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from experiments.bench.timing import Call, in_turns
from reproduce.measure.base import Layer, Report, Result
from reproduce.measure.packed import SERVED, to_packed
from reproduce.measure.setup import clock_and_power, launched, llama_config


@dataclass(frozen=True, kw_only=True)
class Settings(Layer):
    """`new` tokens after a prompt of `length`, by `layers` layers of LLaMA."""

    products: ClassVar[tuple[str, ...]] = SERVED
    layers: int = 1
    new: int = 0


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Let torch create tensors of this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Decoding:
    """A LLaMA with a cache of `length` tokens for one sequence, and the two calls of a generation:
    `prefill`, which reads the prompt, and `step`, which adds a token at the end of the cache.

    Only attention makes a step slower the longer the text is. All steps are therefore represented
    by one whose cache has the average length of the text.
    """

    def __init__(self, model: Any, prompt: int, length: int) -> None:
        from transformers import StaticCache

        self.model = model.eval()
        self.cache = StaticCache(
            config=model.config, max_cache_len=length, max_batch_size=1,
            device=model.device, dtype=model.dtype,
        )  # fmt: skip
        with model.device:
            self.ids = torch.randint(model.config.vocab_size, (1, length))
            self.positions = torch.arange(length)
        self.prompt, self.length = prompt, length

    @torch.no_grad()
    def logits(self, start: int, end: int) -> Tensor:
        """Logits [V] of the token that follows position end - 1. Reads the tokens from `start` to
        `end` and stores their keys and values in the cache."""
        positions = self.positions[start:end]
        # Where the cache writes. Its layers count since transformers 5.6, and in place, for CUDA
        # graphs; before, `cache_position` tells them.
        for layer in getattr(self.cache, "layers", ()):
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length.fill_(start)
        visible = self.positions[None, None, None, :] <= positions[None, None, :, None]
        # By position, since transformers renames the cache's argument.
        output = self.model(
            self.ids[:, start:end], visible, positions[None], self.cache,
            use_cache=True, logits_to_keep=1, cache_position=positions,
        )  # fmt: skip
        return output.logits[0, -1]

    def prefill(self, _: int = 0) -> Tensor:
        """Read the prompt and return the most likely next token."""
        return self.logits(0, self.prompt).argmax()

    def step(self, _: int = 0) -> Tensor:
        """Read one more token and return the most likely next one."""
        return self.logits(self.length - 1, self.length).argmax()


def llama(config: Settings) -> Any:
    """A LLaMA of the config's shape with random weights."""
    vocab_size = 32_000 if config.on.type == "cuda" else 320
    shape = llama_config(config, config.layers, vocab_size)
    from transformers import LlamaForCausalLM

    torch.manual_seed(config.seed)
    with config.on, default_dtype(config.dtype):
        return LlamaForCausalLM(shape)


def measure(config: Settings, _: Report) -> Result:
    """Generated tokens per second of one sequence, dense and with all linears of the layers packed,
    for `new` tokens after a prompt of `length`. Computed from the time to read the prompt and the
    time of one further token."""
    length = config.length + config.new // 2
    dense = llama(config)
    sparse = copy.deepcopy(dense)
    layout = to_packed(sparse, lambda name: ".layers." in name, (1, config.length), config.on)
    built = {"dense": dense, "sparse": sparse}
    runs = {name: Decoding(model, config.length, length) for name, model in built.items()}
    for run in runs.values():
        run.ids = runs["dense"].ids
    calls: dict[str, Call] = {}
    for name, run in runs.items():
        calls |= {f"{name} prompt": run.prefill, f"{name} step": run.step}
    times = in_turns(calls, config.on, config.repeats)
    metrics, rates = clock_and_power(times), {}
    for name in built:
        prompt, step = (times[f"{name} {part}"].ms for part in ("prompt", "step"))
        rates[name] = 1e3 * config.new / (prompt + config.new * step)
        metrics |= {f"{name}_prompt_ms": prompt, f"{name}_step_ms": step}
        metrics[f"{name}_rate"] = rates[name]
    metrics["speedup"] = rates["sparse"] / rates["dense"]
    return metrics, f"{layout}, {launched(times)}"
