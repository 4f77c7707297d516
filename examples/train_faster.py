"""Train my LLaMA faster: the same loop densely and with a 2:4 method, side by side.

    python examples/train_faster.py                                     # a tiny LLaMA, on a CPU
    python examples/train_faster.py --model FOLDER --text FILE --method fst --fp8 hopper

Needs the extra `hf`. It prints the validation loss and the milliseconds of a step of both, and
saves the second as transformers' `from_pretrained` reads it. Without sparse products (on a CPU)
masked weights are multiplied as dense ones, and no time is saved.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import methods

LENGTH, BATCH = 64, 8
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}


def load(folder: str | None, device: str) -> torch.nn.Module:
    """The model in the folder, or a tiny LLaMA with random weights that reads bytes."""
    torch.manual_seed(0)
    if folder is None:
        return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **TINY)).to(device)
    return AutoModelForCausalLM.from_pretrained(folder).to(device)


def batches(tokens: Tensor, seed: int) -> Iterator[dict[str, Tensor]]:
    """Yields batches of random windows of the tokens."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(tokens) - LENGTH, (BATCH, 1), generator=generator)
        rows = tokens[starts.to(tokens.device) + torch.arange(LENGTH, device=tokens.device)]
        yield {"input_ids": rows, "labels": rows}


@torch.no_grad()
def evaluate(model: torch.nn.Module, tokens: Tensor) -> float:
    """The mean loss over eight batches, in nats per token."""
    source = batches(tokens, seed=1)
    return float(torch.stack([model(**next(source)).loss for _ in range(8)]).mean())


def train(model: torch.nn.Module, method: methods.Method, tokens: Tensor, steps: int) -> float:
    """Train and finish the model; return the mean milliseconds of a step."""
    cuda = tokens.is_cuda
    print(method.convert(model, dtype=torch.bfloat16 if cuda else None))
    if cuda:
        method.accelerate(LENGTH * BATCH)
        print(method.acceleration)
    optimizer = method.optimizer(model.parameters(), lr=1e-3)
    source, begun = batches(tokens, seed=0), time.perf_counter()
    for step in range(steps):
        method.on_step_begin(step)
        with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
            loss = method.loss(model, next(source))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        method.on_gradients(step, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        method.on_step_end(step)
    if cuda:
        torch.cuda.synchronize()
    method.finalize(model)
    return (time.perf_counter() - begun) / steps * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder of a model; default: a tiny LLaMA")
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__), help="text file")
    parser.add_argument("--method", default="s_ste", choices=methods.available())
    parser.add_argument("--fp8", default="off", help="hopper: FP8 products on a GPU that has them")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of each model")
    parser.add_argument("--to", type=Path, default=Path("runs/examples/train_faster"))
    options = parser.parse_args()
    text = options.text.read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(options.model)(text)["input_ids"] if options.model else None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = torch.tensor(ids or list(text.encode()), device=device)
    train_tokens, val_tokens = tokens[: -len(tokens) // 10], tokens[-len(tokens) // 10 :]
    fp8 = {} if options.fp8 == "off" else {"fp8": options.fp8}
    for name, given in (("dense", {}), (options.method, fp8)):
        model = load(options.model, device)
        method = methods.build(name, total_steps=options.steps, **given)
        ms = train(model, method, train_tokens, options.steps)
        sparse = sum(bool(holds) for holds in methods.check(model).values())
        loss = evaluate(model, val_tokens)
        print(f"{name}: validation loss {loss:.3f}, {ms:.1f} ms a step, {sparse} linears are 2:4")
    model.save_pretrained(options.to)


if __name__ == "__main__":
    main()
