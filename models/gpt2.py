"""GPT-2 (Radford et al., 2019), with the module names and the initialisation of nanoGPT.

Shapes: B sequences, T tokens, C = n_embd channels, H = n_head heads, V = vocab_size, L = n_layer.

The head is tied to the token embedding: `lm_head.weight is transformer.wte.weight`, which is one
entry of `parameters()` and two of `state_dict()`. `load_state_dict` takes checkpoints of nanoGPT.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import base

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel

SIZES: dict[str, dict[str, int]] = {
    "nano": {"n_layer": 4, "n_head": 4, "n_embd": 128, "vocab_size": 2048, "block_size": 128},
    "124M": {"n_layer": 12, "n_head": 12, "n_embd": 768},
    "350M": {"n_layer": 24, "n_head": 16, "n_embd": 1024},
    "774M": {"n_layer": 36, "n_head": 20, "n_embd": 1280},
    "1558M": {"n_layer": 48, "n_head": 25, "n_embd": 1600},
}


@dataclass(frozen=True)
class GPTConfig(base.TextConfig):
    """Shape of a GPT-2.

    vocab_size: 50304 is GPT-2's 50257 rounded up to a multiple of 64.
    block_size: longest sequence.
    bias: True for biases in all linears and layer norms; the head and the embeddings have none.
    gelu: `erf` (exact) or `tanh` (the approximation that the released GPT-2 uses); or `relu2`,
        squared ReLU in its place.
    n_inner: width of the feed-forward networks; None = 4 * n_embd. With 2 * n_embd a dense model
        has as many weights there as a 2:4 model has non-zero ones (FST's baseline "half").
    """

    n_layer: int
    n_head: int
    n_embd: int
    vocab_size: int = 50304
    block_size: int = 1024
    bias: bool = False
    dropout: float = 0.0
    gelu: str = "erf"
    n_inner: int | None = None

    sizes = SIZES

    def __post_init__(self) -> None:
        base.check_multiple(self, "n_embd", "n_head")
        base.check_choice(self, "gelu", "erf", "tanh", "relu2")


class Attention(nn.Module):
    """Causal multi-head self-attention, [B, T, C] -> [B, T, C]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        qkv, rate = base.split_heads(self.c_attn(x), self.n_head), self.dropout * self.training
        y = F.scaled_dot_product_attention(*qkv, dropout_p=rate, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).flatten(2)))


class MLP(nn.Module):
    """Feed-forward network, [B, T, C] -> [B, T, ffn_width] -> [B, T, C]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.ffn_width, bias=config.bias)
        approximation = "none" if config.gelu == "erf" else "tanh"
        squared = config.gelu == "relu2"
        self.gelu = base.SquaredReLU() if squared else nn.GELU(approximate=approximation)
        self.c_proj = nn.Linear(config.ffn_width, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    """Transformer block with layer norm before each sub-layer, [B, T, C] -> [B, T, C]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    """Embeddings, blocks and the final layer norm: token ids [B, T] -> hidden states [B, T, C]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)

    def forward(self, idx: Tensor) -> Tensor:
        positions = torch.arange(idx.shape[1], device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        return self.ln_f(x)


class GPT(base.Model):
    """GPT-2 language model."""

    TRUNK: ClassVar[str] = "transformer"

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = Transformer(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        # The 2L projections into the residual stream are smaller.
        std = 0.02 / math.sqrt(2 * config.n_layer)
        base.draw_weights(self, lambda name: std if name.endswith("c_proj.weight") else 0.02)

    def forward(self, input: Tensor, target: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Token ids [B, T] -> (logits [B, T, V] of every position, loss or None).

        `target` [B, T] has the ids to predict, already shifted by one; -1 is ignored. The loss is
        the mean cross entropy in nats. Raises a `ValueError` if the sequence is longer than
        `block_size`.
        """
        base.check_length(input.shape[1], self.config.block_size)
        logits = self.lm_head(self.transformer(input))
        if target is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-1)


# Hugging Face's GPT-2 stores these weights as [in, out] (its Conv1D), torch.nn.Linear as [out, in].
_CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
_GELU_FROM_HF = {"gelu": "erf", "gelu_pytorch_tanh": "tanh", "gelu_new": "tanh", "relu2": "relu2"}
_GELU_TO_HF = {ours: theirs for theirs, ours in _GELU_FROM_HF.items()}
# Our fields by the names of transformers' settings; ours has one dropout rate for all places.
_FIELDS = {
    **{name: name for name in ("n_layer", "n_head", "n_embd", "vocab_size", "n_inner")},
    "n_positions": "block_size",
    "embd_pdrop": "dropout",
}


def _transpose_conv1d(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with the weights of `Conv1D` layers transposed, which converts the layout of
    transformers into ours and back. The names are the same in both."""
    return {k: v.t().contiguous() if k.endswith(_CONV1D) else v for k, v in state.items()}


@torch.no_grad()
def from_hf(source: GPT2LMHeadModel | str | Path) -> GPT:
    """Our GPT with a copy of the weights of transformers' `GPT2LMHeadModel`, in its dtype.

    `transformers.Trainer` takes it as `models.hf.ForTrainer(from_hf(...))`. Raises ValueError if
    the model has settings that ours lacks, all of which are named, or the folder cannot be read.

    Args:
        source: the model, or the local folder of its checkpoint in safetensors.
    """
    hf_model: Any = source
    if isinstance(source, str | Path):
        import transformers

        from models.hf import read_checkpoint

        hf_model = read_checkpoint(transformers.GPT2LMHeadModel, source)
    hf = hf_model.config
    required = {
        "model_type": "gpt2",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
        "layer_norm_epsilon": 1e-5,
        "resid_pdrop": hf.embd_pdrop,  # one dropout rate for all places
        "attn_pdrop": hf.embd_pdrop,
    }
    problems = []
    if hf.activation_function not in _GELU_FROM_HF:
        choices = ", ".join(_GELU_FROM_HF)
        problems.append(f"activation_function={hf.activation_function!r} (needs one of {choices})")
    values = base.converted("GPT-2", hf, _FIELDS, required, *problems)
    config = GPTConfig(**values, bias=True, gelu=_GELU_FROM_HF[hf.activation_function])
    return base.copied(GPT(config), _transpose_conv1d(hf_model.state_dict()), hf_model)


@torch.no_grad()
def to_hf(model: GPT) -> GPT2LMHeadModel:
    """transformers' `GPT2LMHeadModel` with a copy of our weights, in their dtype. It always has
    biases, which are zeros if our model has none. Its begin and end tokens are unset, because our
    model does not know its tokenizer. Raises a `ValueError` if the model has tensors that GPT-2
    does not have, as while a sparse method is attached."""
    from transformers import GPT2Config, GPT2LMHeadModel

    base.check_as_built("GPT-2", model)
    state, config = model.state_dict(), model.config
    hf_model: Any = GPT2LMHeadModel(
        GPT2Config(
            **{theirs: getattr(config, ours) for theirs, ours in _FIELDS.items()},
            activation_function=_GELU_TO_HF[config.gelu],
            resid_pdrop=config.dropout,
            attn_pdrop=config.dropout,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    biases = {k: torch.zeros_like(v) for k, v in hf_model.state_dict().items() if "bias" in k}
    return base.copied(hf_model, {**biases, **_transpose_conv1d(state)}, model)
