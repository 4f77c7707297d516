"""Models and micro-batches as meta or fake tensors, for planning.

A transformers checkpoint is planned by its shape, which is read from the `config.json` of a local
folder or, for some published checkpoints, known here, so that nothing is downloaded.
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
from experiments.config.run import RunConfig
from experiments.data.mlm import MLMConfig
from experiments.data.parallel import PairsConfig
from experiments.support.errors import UserError
from models.bert import BertConfig, BertLM
from models.dino import DINO
from models.gpt2 import GPT, GPTConfig
from models.hf import DROPOUT, CausalLM
from models.transformer import Transformer, TransformerConfig
from models.vit import ViT, ViTConfig

# OPT (Zhang et al., arXiv 2205.01068, table 1): layers, heads, width.
_OPT = {
    "125m": (12, 12, 768),
    "350m": (24, 16, 1024),
    "1.3b": (24, 32, 2048),
    "2.7b": (32, 32, 2560),
    "6.7b": (32, 32, 4096),
    "13b": (40, 40, 5120),
    "30b": (48, 56, 7168),
    "66b": (64, 72, 9216),
}
_GPT2 = {"": (12, 12, 768), "-medium": (24, 16, 1024), "-large": (36, 20, 1280)}
_GPT2["-xl"] = (48, 25, 1600)


def _published(path: str) -> Any:
    """The transformers config of a checkpoint on the hub; None if its shape is not known here."""
    from transformers import GPT2Config, LlamaConfig, OPTConfig

    owner, _, name = path.partition("@")[0].partition("/")
    if owner == "facebook" and name.removeprefix("opt-") in _OPT:
        layers, heads, width = _OPT[name.removeprefix("opt-")]
        ends: dict[str, Any] = {"word_embed_proj_dim": width}
        if name == "opt-350m":
            ends = {"word_embed_proj_dim": 512, "do_layer_norm_before": False}
        return OPTConfig(
            num_hidden_layers=layers,
            num_attention_heads=heads,
            hidden_size=width,
            ffn_dim=4 * width,
            **ends,
        )
    if owner == "openai-community" and name.removeprefix("gpt2") in _GPT2:
        layers, heads, width = _GPT2[name.removeprefix("gpt2")]
        return GPT2Config(n_layer=layers, n_head=heads, n_embd=width)
    if path.partition("@")[0] == "meta-llama/Llama-2-7b-hf":  # the default is LLaMA's
        return LlamaConfig(max_position_embeddings=4096)
    return None


def transformers_config(path: str) -> Any:
    """The transformers config of a checkpoint: a local folder, or one whose shape is known here.

    Raises:
        UserError: it is neither.
    """
    from transformers import AutoConfig

    if (Path(path) / "config.json").is_file():
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    if (found := _published(path)) is None:
        raise UserError(
            f"model.path={path} is no folder with a config.json, and its shape is not known here: "
            "known are facebook/opt-*, openai-community/gpt2* and meta-llama/Llama-2-7b-hf"
        )
    return found


@contextmanager
def stand_in(config: Any) -> Iterator[str]:
    """A context with a temporary folder that has this config but no weights, as a checkpoint
    path."""
    with TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        save_file({}, Path(folder) / "model.safetensors")
        yield folder


def build(run: RunConfig, hf: Any = None) -> nn.Module:
    """The model of a run with arbitrary weights; meant for the meta device.

    hf: the transformers config of its checkpoint, if it starts from one.
    """
    shape: Any = run.model
    if hf is not None:
        from transformers import AutoModelForCausalLM

        for name in DROPOUT:  # as `CausalLM.from_pretrained` does
            if hasattr(hf, name):
                setattr(hf, name, 0.0)
        return CausalLM(AutoModelForCausalLM.from_config(hf), shape.block_size)
    if isinstance(shape, ViTConfig):
        return ViT(shape) if run.dino is None else DINO(ViT(shape), run.dino)
    kinds: dict[type, Callable[[Any], nn.Module]] = {
        GPTConfig: GPT, BertConfig: BertLM, TransformerConfig: Transformer
    }  # fmt: skip
    return kinds[type(shape)](shape)


def tokens_per_sample(run: RunConfig, hf: Any = None) -> int:
    """The number of tokens per sample that a linear layer of the model sees; for a bundle of pairs,
    the largest possible number."""
    shape: Any = run.model
    if isinstance(shape, ViTConfig):
        return shape.tokens
    if isinstance(run.data, PairsConfig):
        return run.data.batch_tokens
    if isinstance(run.data, MLMConfig):
        return run.data.sequence_length or shape.block_size
    return shape.block_size or hf.max_position_embeddings


def loss_of(
    run: RunConfig, method: methods.Method, samples: int, tokens: int
) -> Callable[[Any], Tensor]:
    """A function that computes the model's loss on a micro-batch of `samples` samples."""
    shape: Any = run.model
    if isinstance(shape, ViTConfig):
        size = (3, shape.image_size, shape.image_size)
        if run.dino is None:
            return lambda model: method.loss(
                model,
                {
                    "input": torch.zeros(samples, *size),
                    "target": torch.zeros(samples, dtype=torch.int64),
                },
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
        most = run.data.max_predictions or tokens
        predicted = samples * min(most, max(1, round(run.data.mask_probability * tokens)))
        return lambda model: _masked_loss(model, samples, tokens, predicted)
    names: tuple[str, ...] = ("input", "target")
    if isinstance(run.data, PairsConfig):
        longest = min(run.data.max_tokens or shape.block_size, shape.block_size, tokens)
        samples, tokens = samples * (tokens // longest), longest
        names = ("source", "source_mask", *names)
    return lambda model: method.loss(
        model, {name: torch.zeros(samples, tokens, dtype=torch.int64) for name in names}
    )


def _masked_loss(model: BertLM, samples: int, tokens: int, predicted: int) -> Tensor:
    """The loss of masked words; here simply the first words are masked."""
    hidden = model.bert(torch.zeros(samples, tokens, dtype=torch.int64))
    logits = model.predictions(hidden.flatten(0, 1)[:predicted])
    return F.cross_entropy(logits, torch.zeros(predicted, dtype=torch.int64))
