"""Train one small GPT-2 densely and one with a 2:4 method, in a plain PyTorch loop.

    python examples/own_loop.py
    python examples/own_loop.py --method fst --steps 1000

The text is the source of four modules of Python's standard library, byte by byte. For each of the
two models it prints the validation loss, the share of non-zero weights in one layer, and the number
of groups of four that are not 2:4.
"""

from __future__ import annotations

import argparse
import inspect
import json
import textwrap
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import methods
from common_kernels import check24
from models.gpt2 import GPT, GPTConfig

MODULES = (argparse, inspect, json, textwrap)
SHAPE = GPTConfig(n_layer=2, n_head=4, n_embd=64, vocab_size=256, block_size=64)


def batches(text: Tensor, seed: int) -> Iterator[dict[str, Tensor]]:
    """Yields batches of 16 random windows of the text; the target is the next byte."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(text) - SHAPE.block_size - 1, (16, 1), generator=generator)
        windows = text[starts + torch.arange(SHAPE.block_size + 1)]
        yield {"input": windows[:, :-1], "target": windows[:, 1:]}


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor) -> float:
    """The mean loss over eight batches of the text, in nats per byte."""
    source = batches(text, seed=1)
    losses = [model(**next(source))[1] for _ in range(8)]
    return float(torch.stack(losses).mean())


def train(name: str, steps: int, text: Tensor) -> GPT:
    """A model trained by the method `name` and finished: its linears are plain `nn.Linear` modules
    with true zeros."""
    torch.manual_seed(0)
    model = GPT(SHAPE)
    method = methods.build(name, total_steps=steps)
    print(method.convert(model))
    optimizer = method.optimizer(model.parameters(), lr=3e-3, weight_decay=0.1)
    source = batches(text, seed=0)
    for step in range(steps):
        method.on_step_begin(step)
        method.loss(model, next(source)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        method.on_gradients(step, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        method.on_step_end(step)
    method.finalize(model)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", default="s_ste", choices=methods.available(), help="2:4 method")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of each model")
    options = parser.parse_args()
    source = "".join(inspect.getsource(module) for module in MODULES).encode()
    text = torch.tensor(list(source))
    train_text, val_text = text[: -len(text) // 10], text[-len(text) // 10 :]
    for name in ("dense", options.method):
        model = train(name, options.steps, train_text)
        weight = model.transformer.h[0].mlp.c_fc.weight
        print(
            f"{name}: validation loss {evaluate(model, val_text):.3f}, "
            f"{(weight != 0).float().mean():.0%} of the first layer's weights are not zero, "
            f"{int(check24(weight))} groups of four have more than two non-zeros"
        )


if __name__ == "__main__":
    main()
