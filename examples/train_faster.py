"""Train my LLaMA faster: the same loop densely and with a 2:4 method, one after the other.

    python examples/train_faster.py                 # a LLaMA 2048 wide; on a CPU a tiny one
    python examples/train_faster.py --model FOLDER --text FILE --method fst --fp8 hopper

Needs the extra `hf`. It prints the validation loss and the milliseconds of a step of both, and
saves the second as transformers' `from_pretrained` reads it. This is the fast loop of
docs/own_loop.md: fp32 weights, bf16 products, compiled blocks, FusedAdamW.
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

CUDA = torch.cuda.is_available()
DEVICE, LENGTH = ("cuda", 1024) if CUDA else ("cpu", 64)
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
WIDE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 12}


def load(folder: str | None) -> torch.nn.Module:
    """The model in the folder, with fp32 weights, or a LLaMA with random ones that reads bytes."""
    if folder is not None:
        return AutoModelForCausalLM.from_pretrained(folder).float().to(DEVICE)
    torch.manual_seed(0)
    sizes = WIDE if CUDA else TINY
    heads = sizes["hidden_size"] // (128 if CUDA else 16)
    config = LlamaConfig(vocab_size=256, num_attention_heads=heads, **sizes)
    return LlamaForCausalLM(config).to(DEVICE)


def batches(tokens: Tensor, shape: tuple[int, int], seed: int) -> Iterator[dict[str, Tensor]]:
    """Yields batches of random windows of the tokens, of this shape [sequences, length]."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(tokens) - shape[1], (shape[0], 1), generator=generator)
        rows = tokens[starts + torch.arange(shape[1])].to(DEVICE)
        yield {"input_ids": rows, "labels": rows}


@torch.no_grad()
def evaluate(model: torch.nn.Module, source: Iterator[dict[str, Tensor]]) -> float:
    """The mean loss over eight batches, in nats per token."""
    with torch.autocast(DEVICE, torch.bfloat16, enabled=CUDA):
        return float(torch.stack([model(**next(source)).loss for _ in range(8)]).mean())


def train(
    model: torch.nn.Module,
    method: methods.Method,
    source: Iterator[dict[str, Tensor]],
    steps: int,
    tokens: int,
) -> float:
    """Train and finish the model on batches of so many tokens; return the mean milliseconds of a
    step without the first quarter, in which blocks are compiled, and the last, in which `fst` is
    dense."""
    report = method.convert(model, dtype=torch.bfloat16 if CUDA else None)
    if CUDA:
        method.accelerate(tokens)
        for block in model.model.layers:
            block.compile()
    if not report.measured:  # by `dense`, which converts nothing
        print(report, *[method.acceleration] * CUDA, sep="\n")
    own = type(method).optimizer is not methods.Method.optimizer  # an update rule, as of AST
    optimizer = (method.optimizer if own else methods.FusedAdamW)(model.parameters(), lr=3e-4)
    quarter, times = steps // 4, {}
    for step in range(steps):
        if step in (quarter, steps - quarter):
            times[step] = now()
        method.on_step_begin(step)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=CUDA):
            loss = method.loss(model, next(source))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        method.on_gradients(step, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        method.on_step_end(step)
    method.finalize(model)
    return (times.get(steps - quarter, now()) - times[quarter]) / (steps - 2 * quarter) * 1e3


def now() -> float:
    """The time in seconds when the device has done what it was given."""
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder of a LLaMA; default: one with random weights")
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__), help="text file")
    parser.add_argument("--method", default="s_ste", choices=methods.available())
    parser.add_argument("--include", default="all", choices=["ffn", "all"], help="which linears")
    parser.add_argument("--fp8", default="off", help="hopper: FP8 products on a GPU that has them")
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of each model")
    parser.add_argument("--to", type=Path, default=Path("runs/examples/train_faster"))
    options = parser.parse_args()
    if not CUDA:
        print("No NVIDIA GPU here: this shows the loop and the loss; nothing trains faster.")
    text = options.text.read_text(encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(options.model) if options.model else None
    tokens = torch.tensor(tokenizer(text)["input_ids"] if tokenizer else list(text.encode()))
    held_out = len(tokens) // 10
    shape = options.batch, options.length
    given = {"include": options.include, "total_steps": options.steps, "measure_every": 0}
    fp8 = {} if options.fp8 == "off" else {"fp8": options.fp8}
    for name, own in (("dense", {}), (options.method, fp8)):
        model = None  # frees the memory of the one before
        model = load(options.model)
        method = methods.build(name, **given, **own)
        source = batches(tokens[:-held_out], shape, seed=0)
        ms = train(model, method, source, options.steps, shape[0] * shape[1])
        sparse = sum(bool(holds) for holds in methods.check(model).values())
        loss = evaluate(model, batches(tokens[-held_out:], shape, seed=1))
        print(f"{name}: validation loss {loss:.3f}, {ms:.1f} ms a step, {sparse} linears are 2:4")
    model.save_pretrained(options.to)
    if tokenizer:
        tokenizer.save_pretrained(options.to)


if __name__ == "__main__":
    main()
