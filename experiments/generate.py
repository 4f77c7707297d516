"""Greedy text from a finished run: `python -m experiments.generate run=DIR prompt="import "`.

With `sparse=true` (the default) the same weights go on as torch's semi-structured tensors, where
the device can multiply with them, and the tokens per second of both are compared: the median of
`repeats` generations of `tokens` tokens, prompt included, after one that is not counted. Where it
cannot, the reason is printed.

It shows that the weights work, not that they are fast: a token at a time gives products of a few
rows, and torch's cuSPARSELt operator plans each of them anew on the CPU. On an H200 (torch 2.11)
GPT-2 of 124M to 1558M generated 0.17 to 0.23 times as fast as dense, at batches of 1 to 256.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments import export, semi_structured
from experiments.config import driver, typed
from experiments.distributed import world
from experiments.errors import UserError
from experiments.finished import FinishedRun
from experiments.optimization import DTYPES
from experiments.pretrain import process_settings
from experiments.settings import ImplConfig
from models.gpt2 import GPT
from models.hf import CausalLM


@dataclass(frozen=True, kw_only=True)
class Settings:
    """run: directory of a finished run of a causal model. batch: copies of the prompt that are
    continued at once."""

    run: str
    prompt: str
    tokens: int = 64
    batch: int = 1
    repeats: int = 5
    sparse: bool = True

    def __post_init__(self) -> None:
        for name in ("tokens", "batch", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; it must be at least 1")


@dataclass(frozen=True)
class GenerateConfig:
    settings: Settings
    impl: ImplConfig


def generation_model(run: FinishedRun) -> CausalLM:
    """The model of a run as one of transformers with `nn.Linear`s, which keeps a KV cache.

    Raises:
        UserError: it is no causal language model.
    """
    model = run.model()
    if not isinstance(model, GPT | CausalLM):
        raise UserError(f"{run.directory} is a {type(model).__name__}, which continues no text")
    export.merge_low_rank(model)
    return model if isinstance(model, CausalLM) else CausalLM(export.to_transformers(model))


@torch.no_grad()
def greedy(model: CausalLM, ids: Tensor, count: int) -> Tensor:
    """The `count` most likely next tokens, one after the other: [B, T] -> [B, T + count]."""
    return model.model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        pad_token_id=0,  # never used: all rows are of one length
    )


def timed(model: CausalLM, ids: Tensor, count: int, repeats: int) -> tuple[Tensor, float]:
    """What `greedy` gives, and its tokens per second over all rows."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        out = greedy(model, ids, count)
        if ids.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return out, ids.shape[0] * count / statistics.median(seconds[1:])


def run(config: GenerateConfig) -> None:
    """Generate and print.

    Raises:
        UserError: no causal model, or prompt and text are longer than the model takes.
    """
    settings, impl = config.settings, config.impl
    with process_settings(impl), world(impl.device) as here:
        source = FinishedRun.open(Path(settings.run))
        model, encoding = generation_model(source), source.tokenizer()
        prompt = encoding.encode_ordinary_batch([settings.prompt])[0] or [encoding.eot_token]
        if len(prompt) + settings.tokens > model.block_size:
            raise UserError(
                f"{len(prompt)} tokens of prompt and tokens={settings.tokens} exceed the "
                f"{model.block_size} that the model takes"
            )
        model = model.to(here.device, DTYPES[impl.dtype] or torch.float32).eval()
        ids = torch.tensor([prompt] * settings.batch, device=here.device)
        dense, dense_rate = timed(model, ids, settings.tokens, settings.repeats)
        print(encoding.decode(dense[0].tolist()))
        print(f"dense products: {dense_rate:.1f} tokens/s")
        if not settings.sparse:
            return
        try:
            names = semi_structured.to_semi_structured(model)
        except UserError as reason:
            print(f"2:4 products: not run, {reason}")
            return
        sparse, rate = timed(model, ids, settings.tokens, settings.repeats)
        equal = int((dense[0] == sparse[0]).long().cumprod(0).sum()) - len(prompt)
        print(
            f"2:4 products in {len(names)} linears: {rate:.1f} tokens/s, {rate / dense_rate:.2f} "
            f"of dense; the first {equal} of {settings.tokens} tokens are the same"
        )
        if equal < settings.tokens:  # sums in another order can turn a close choice
            print(encoding.decode(sparse[0].tolist()))


def freeze(composed: Any) -> GenerateConfig:
    """The typed form of a composed `DictConfig`."""
    from omegaconf import OmegaConf

    values: Any = OmegaConf.to_container(composed, resolve=True)
    if values["run"] is None:
        raise UserError("run=DIR is missing: the directory of a finished run")
    impl = typed(ImplConfig, "impl", values.pop("impl"))
    return GenerateConfig(typed(Settings, "the config", values), impl)


@driver("generate", freeze, "begins it anew")
def main(config: GenerateConfig) -> None:
    run(config)


if __name__ == "__main__":
    main()
