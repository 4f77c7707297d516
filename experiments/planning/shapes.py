"""Models and micro-batches as meta or fake tensors, for planning.

A transformers checkpoint is planned by its shape, which is read from the `config.json` of a local
folder or, for the checkpoints of the experiment files, known here, so that nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import methods
from experiments.config.run import KINDS, RunConfig
from experiments.data.mlm import MLMConfig
from experiments.data.parallel import PairsConfig
from experiments.support.errors import UserError
from models.bert import BertLM
from models.dino import DINO
from models.hf import DROPOUT, CausalLM
from models.vit import ViTConfig

# OPT (Zhang et al., arXiv 2205.01068, table 1): layers, heads, width.
_OPT = {
    "facebook/opt-125m": (12, 12, 768),
    "facebook/opt-1.3b": (24, 32, 2048),
    "facebook/opt-2.7b": (32, 32, 2560),
    "facebook/opt-6.7b": (32, 32, 4096),
    "facebook/opt-13b": (40, 40, 5120),
    "facebook/opt-30b": (48, 56, 7168),
    "facebook/opt-66b": (64, 72, 9216),
}


def transformers_config(path: str) -> Any:
    """The transformers config of a checkpoint: a local folder, or one whose shape is known here."""
    from transformers import AutoConfig, GPT2Config, LlamaConfig, OPTConfig

    if (Path(path) / "config.json").is_file():
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    name = path.partition("@")[0]
    if name in _OPT:
        layers, heads, width = _OPT[name]
        return OPTConfig(
            num_hidden_layers=layers,
            num_attention_heads=heads,
            hidden_size=width,
            ffn_dim=4 * width,
            word_embed_proj_dim=width,
        )
    if name == "openai-community/gpt2":
        return GPT2Config()
    if name == "meta-llama/Llama-2-7b-hf":  # the default is LLaMA's
        return LlamaConfig(max_position_embeddings=4096)
    raise UserError(
        f"model.path={path} is no folder with a config.json, and its shape is not known here: "
        f"known are {', '.join(_OPT)}, openai-community/gpt2 and meta-llama/Llama-2-7b-hf"
    )


@contextmanager
def stand_in(config: Any) -> Iterator[str]:
    """A context with a temporary folder that has this config but no weights, as a checkpoint
    path."""
    with TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        save_file({}, Path(folder) / "model.safetensors")
        yield folder


def build(run: RunConfig, hf: Any = None) -> nn.Module:
    """The model of a run with arbitrary weights, built of fake tensors.

    hf: the transformers config of its checkpoint, if it starts from one.
    """
    shape: Any = run.model
    if hf is None:
        model: Any = KINDS[type(shape)](shape)
        return model if run.dino is None else DINO(model, run.dino)
    from transformers import AutoModelForCausalLM

    for name in DROPOUT:  # as `CausalLM.from_pretrained` does
        if hasattr(hf, name):
            setattr(hf, name, 0.0)
    return CausalLM(AutoModelForCausalLM.from_config(hf), shape.block_size)


def loss_of(
    run: RunConfig, method: methods.Method, samples: int, hf: Any = None
) -> Callable[[Any], Tensor]:
    """A function that computes the model's loss on a micro-batch of `samples` samples."""
    shape: Any = run.model
    if isinstance(shape, ViTConfig):
        size = (3, shape.image_size, shape.image_size)
        if run.dino is None:
            return lambda model: method.loss(
                model,
                {"input": torch.zeros(samples, *size), "target": torch.zeros(samples).long()},
            )
        local = (run.dino.local_crops, 3, run.dino.local_size, run.dino.local_size)
        return lambda model: method.loss(
            model,
            {
                "global_crops": torch.zeros(samples, 2, *size),
                "local_crops": torch.zeros(samples, *local),
            },
        )
    if isinstance(run.data, MLMConfig):
        tokens = run.data.sequence_length or shape.block_size
        most = run.data.max_predictions or tokens
        predicted = samples * min(most, max(1, round(run.data.mask_probability * tokens)))
        return lambda model: _masked_loss(model, samples, tokens, predicted)
    names: tuple[str, ...] = ("input", "target")
    if isinstance(run.data, PairsConfig):  # a sample is a bundle of pairs
        tokens = min(run.data.max_tokens or shape.block_size, shape.block_size)
        samples *= max(1, run.data.batch_tokens // tokens)
        names = ("source", "source_mask", *names)
    else:
        tokens = shape.block_size or hf.max_position_embeddings
    return lambda model: method.loss(
        model, {name: torch.zeros(samples, tokens, dtype=torch.int64) for name in names}
    )


def _masked_loss(model: BertLM, samples: int, tokens: int, predicted: int) -> Tensor:
    """The loss of masked words; here simply the first words are masked."""
    hidden = model.bert(torch.zeros(samples, tokens, dtype=torch.int64))
    logits = model.predictions(hidden.flatten(0, 1)[:predicted])
    return F.cross_entropy(logits, torch.zeros(predicted, dtype=torch.int64))
