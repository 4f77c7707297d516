"""The config and the encoder of BERT (Devlin et al., 2019, arXiv 1810.04805), and of Cramming's
variant of it (Geiping and Goldstein, 2023, arXiv 2212.14034).

Shapes: B sequences, T tokens, C = n_embd channels, H = n_head heads.

The original has layer norm after each residual sum (post-norm), biases, learned positions, GELU
(erf) and dropout. Cramming has layer norm before each sub-layer and after the last one (pre-norm),
linears without biases, GEGLU, scaled sinusoidal positions and no dropout. Both normalise the
embeddings and have two token types.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import base

TOKEN_TYPES = 2
EPS = 1e-12  # epsilon of the layer norms

_CRAMMING: dict[str, Any] = {
    "block_size": 128,
    "pre_norm": True,
    "bias": False,
    "glu": True,
    "positions": "sinusoidal",
    "head_transform": False,
    "dropout": 0.0,
}
SIZES: dict[str, dict[str, Any]] = {
    "nano": {"n_layer": 4, "n_head": 4, "n_embd": 128, "vocab_size": 2048, **_CRAMMING},
    "base": {"n_layer": 12, "n_head": 12, "n_embd": 768},
    "large": {"n_layer": 24, "n_head": 16, "n_embd": 1024},
    "cramming": {"n_layer": 16, "n_head": 12, "n_embd": 768, "vocab_size": 32768, **_CRAMMING},
}


@dataclass(frozen=True)
class BertConfig(base.TextConfig):
    """Shape and variant of a BERT.

    n_inner: outputs of a feed-forward network's first linear; None = 4 * n_embd. With `glu` half of
        them are the gates, so that the second linear takes n_inner / 2.
    vocab_size: 30528 is BERT's 30522 rounded up to a multiple of 64.
    block_size: longest sequence.
    pre_norm: True for layer norm before each sub-layer, False for after each residual sum.
    bias: True for biases of linears; layer norms always have biases.
    glu: True for GEGLU, False for GELU.
    positions: `learned` or `sinusoidal`.
    head_transform: True for a linear, GELU and layer norm before the decoder.
    next_sentence: True for a pooler and a classifier of sentence pairs.
    """

    n_layer: int
    n_head: int
    n_embd: int
    n_inner: int | None = None
    vocab_size: int = 30528
    block_size: int = 512
    pre_norm: bool = False
    bias: bool = True
    glu: bool = False
    positions: str = "learned"
    head_transform: bool = True
    next_sentence: bool = False
    dropout: float = 0.1

    sizes = SIZES

    def __post_init__(self) -> None:
        base.check_multiple(self, "n_embd", "n_head")
        base.check_choice(self, "positions", "learned", "sinusoidal")


def layer_norm(config: BertConfig) -> nn.LayerNorm:
    """A layer norm over the channels."""
    return nn.LayerNorm(config.n_embd, eps=EPS)


class SinusoidalPositions(nn.Module):
    """Sinusoidal position embeddings of Vaswani et al. (2017) times a learned scale, initially
    1 / sqrt(C) (Hua et al., 2022, arXiv 2202.10447): positions [T] -> [T, C]."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.table: Tensor
        table = base.sinusoids(config.block_size, config.n_embd)
        self.register_buffer("table", table, persistent=False)
        self.scale = nn.Parameter(torch.full((1,), config.n_embd**-0.5))

    def forward(self, positions: Tensor) -> Tensor:
        return self.scale * self.table[positions]


class Embeddings(nn.Module):
    """Normalised sum of token, type and position embeddings: ids and types [B, T] -> [B, T, C]."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.n_embd)
        self.position_embeddings = (
            nn.Embedding(config.block_size, config.n_embd)
            if config.positions == "learned"
            else SinusoidalPositions(config)
        )
        self.token_type_embeddings = nn.Embedding(TOKEN_TYPES, config.n_embd)
        self.norm = layer_norm(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, input: Tensor, token_types: Tensor | None) -> Tensor:
        if token_types is None:
            token_types = torch.zeros_like(input)
        positions = torch.arange(input.shape[1], device=input.device)
        x = self.word_embeddings(input) + self.token_type_embeddings(token_types)
        return self.dropout(self.norm(x + self.position_embeddings(positions)))


class SelfAttention(nn.Module):
    """Bidirectional self-attention without the output projection, [B, T, C] -> [B, T, C]."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        qkv, rate = base.split_heads(self.qkv(x), self.n_head), self.dropout * self.training
        y = F.scaled_dot_product_attention(*qkv, attn_mask=mask, dropout_p=rate)
        return y.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Self-attention and its projection, [B, T, C] -> [B, T, C]; mask [B, 1, 1, T] or None."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.self = SelfAttention(config)
        self.output = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.dropout(self.output(self.self(x, mask)))


def geglu(u: Tensor) -> Tensor:
    """value * GELU(gate), with the tanh form of GELU: [..., 2 n] -> [..., n]. The values are the
    first half, the gates the second half."""
    value, gate = u.chunk(2, dim=-1)
    return value * F.gelu(gate, approximate="tanh")


class Layer(nn.Module):
    """Transformer layer, [B, T, C] -> [B, T, C]."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.pre_norm = config.pre_norm
        self.attention = Attention(config)
        self.norm_1 = layer_norm(config)
        self.mlp = base.MLP(config, geglu if config.glu else F.gelu, config.glu, config.bias)
        self.norm_2 = layer_norm(config)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = base.residual(x, self.norm_1, lambda y: self.attention(y, mask), self.pre_norm)
        return base.residual(x, self.norm_2, self.mlp, self.pre_norm)


class Pooler(nn.Module):
    """Hidden states [B, T, C] -> tanh of a linear map of the first token's, [B, C]."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.dense(hidden[:, 0]))


class Bert(nn.Module):
    """BERT without its heads. `pooler` is None unless the config has `next_sentence`."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layer = nn.ModuleList(Layer(config) for _ in range(config.n_layer))
        self.norm = layer_norm(config) if config.pre_norm else nn.Identity()
        self.pooler = Pooler(config) if config.next_sentence else None

    def forward(
        self, input: Tensor, token_types: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Token ids [B, T] -> hidden states [B, T, C]. Raises ValueError if the sequence is longer
        than `block_size`.

        Args:
            token_types: [B, T] of 0 and 1; None = all 0.
            attention_mask: [B, T], 0 at padding; None = no padding, which is faster.
        """
        base.check_length(input.shape[1], self.config.block_size)
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        x = self.embeddings(input, token_types)
        for layer in self.layer:
            x = layer(x, mask)
        return self.norm(x)
