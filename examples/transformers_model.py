"""Train a causal language model of transformers with a 2:4 method, save it, and load it again.

    python examples/transformers_model.py                       # a tiny LLaMA with random weights
    python examples/transformers_model.py --model FOLDER --text FILE

Needs the extra `hf`. transformers alone can load the saved model: it is a plain one, in
which pruned weights are zeros. Prints how many they are.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

import methods
from common_kernels import check24
from methods.integrations.trainer import MethodCallback

LENGTH = 64  # tokens of a training sequence


def tiny_llama() -> PreTrainedModel:
    """A LLaMA that reads bytes, with random weights."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, **shape))


def sequences(text: str, folder: str | None) -> list[dict[str, torch.Tensor]]:
    """The text as samples of `LENGTH` tokens: bytes, or those of the tokenizer in `folder`."""
    ids = (
        list(text.encode())
        if folder is None
        else AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    )
    rows = torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder of a model to train; default: a tiny LLaMA")
    parser.add_argument(
        "--text", type=Path, default=Path(argparse.__file__), help="file to train on"
    )
    parser.add_argument("--method", default="s_ste", choices=methods.available(), help="2:4 method")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument(
        "--to",
        type=Path,
        default=Path("runs/examples/transformers_model"),
        help="folder to save the model in",
    )
    options = parser.parse_args()

    model = (
        tiny_llama()
        if options.model is None
        else AutoModelForCausalLM.from_pretrained(options.model)
    )
    arguments = TrainingArguments(
        output_dir=str(options.to),
        max_steps=options.steps,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        report_to=[],
        save_strategy="no",
    )
    method = methods.build(options.method)
    callback = MethodCallback(method, model, arguments)  # converts the model
    dataset = sequences(options.text.read_text(encoding="utf-8"), options.model)
    trainer = Trainer(
        model,
        arguments,
        train_dataset=dataset,
        callbacks=[callback],
        optimizers=callback.optimizers,
    )
    trainer.train()
    method.finalize(model)
    trainer.save_model()

    stored = AutoModelForCausalLM.from_pretrained(options.to)
    weights = {n: p for n, p in stored.named_parameters() if ".mlp." in n and p.dim() == 2}
    zeros = sum(int((p == 0).sum()) for p in weights.values())
    total = sum(p.numel() for p in weights.values())
    dense_groups = sum(int(check24(p)) for p in weights.values())
    print(
        f"{options.to}: {zeros / total:.0%} of the feed-forward weights are zero, {dense_groups} "
        "groups of four have more than two non-zeros"
    )


if __name__ == "__main__":
    main()
