"""The Transformer of Vaswani et al. (2017, arXiv 1706.03762): an encoder and a decoder.

Shapes: B pairs, S source and T target tokens, C = n_embd channels, H = n_head heads, V =
vocab_size.

Layer norm follows each residual sum (post-norm); with `pre_norm` it precedes each sub-layer and
follows both stacks. Source, target and output share one embedding, which is one entry of
`parameters()` and two of `state_dict()`. Names are those of fairseq, except `mlp`.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.base import MLP, Model, TextConfig, check_length, check_multiple, residual, sinusoids

SIZES: dict[str, dict[str, Any]] = {
    "nano": {"n_layer": 2, "n_head": 4, "n_embd": 128, "vocab_size": 384, "block_size": 64},
    "base": {"n_layer": 6, "n_head": 8, "n_embd": 512},
}


@dataclass(frozen=True)
class TransformerConfig(TextConfig):
    """Shape of a Transformer.

    n_layer: layers of the encoder, and as many of the decoder.
    n_inner: width of the feed-forward networks; None = 4 * n_embd.
    vocab_size: 37056 is the paper's 37000 rounded up to a multiple of 64.
    block_size: longest source and longest target.
    pre_norm: True for layer norm before each sub-layer, False for after each residual sum.
    dropout: rate after each sub-layer and on the sums of embeddings and positions.
    label_smoothing: in training, the share of the target distribution spread over all tokens.
    """

    n_layer: int
    n_head: int
    n_embd: int
    n_inner: int | None = None
    vocab_size: int = 37056
    block_size: int = 1024
    pre_norm: bool = False
    dropout: float = 0.1
    label_smoothing: float = 0.1

    sizes = SIZES

    def __post_init__(self) -> None:
        check_multiple(self, "n_embd", "n_head")


KeysValues = tuple[Tensor, Tensor]  # each [B, H, T, C/H]


class Attention(nn.Module):
    """Multi-head attention from x [B, T, C] to keys and values -> [B, T, C]."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.q_proj = nn.Linear(config.n_embd, config.n_embd)
        self.k_proj = nn.Linear(config.n_embd, config.n_embd)
        self.v_proj = nn.Linear(config.n_embd, config.n_embd)
        self.out_proj = nn.Linear(config.n_embd, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.n_head, -1)).transpose(1, 2)

    def keys_values(self, memory: Tensor) -> KeysValues:
        """The keys and values of hidden states [B, T, C]."""
        return self._heads(self.k_proj(memory)), self._heads(self.v_proj(memory))

    def forward(
        self, x: Tensor, to: KeysValues, mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        q = self._heads(self.q_proj(x))
        y = F.scaled_dot_product_attention(q, *to, attn_mask=mask, is_causal=causal)
        return self.dropout(self.out_proj(y.transpose(1, 2).flatten(2)))


class EncoderLayer(nn.Module):
    """Layer of the encoder, [B, S, C] -> [B, S, C]; mask [B, 1, 1, S] or None."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.pre_norm = config.pre_norm
        self.self_attn = Attention(config)
        self.norm_1 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config, F.relu)
        self.norm_2 = nn.LayerNorm(config.n_embd)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        attend = self.self_attn
        x = residual(
            x, self.norm_1, lambda y: attend(y, attend.keys_values(y), mask), self.pre_norm
        )
        return residual(x, self.norm_2, self.mlp, self.pre_norm)


@dataclass
class LayerState:
    """The keys and values of one decoder layer during generation: those of the encoder's output
    (`source`) and those of the tokens generated so far (`own`)."""

    source: KeysValues
    own: KeysValues | None = None

    def extend(self, new: KeysValues) -> KeysValues:
        """Append the keys and values of new tokens to `own`, and return all of them."""
        if self.own is not None:
            new = torch.cat([self.own[0], new[0]], 2), torch.cat([self.own[1], new[1]], 2)
        self.own = new
        return new

    def select(self, rows: Tensor) -> None:
        """Replace the batch by these of its rows, in place; a row may be repeated."""
        self.source = self.source[0][rows], self.source[1][rows]
        if self.own is not None:
            self.own = self.own[0][rows], self.own[1][rows]


class DecoderLayer(nn.Module):
    """Layer of the decoder, [B, T, C] -> [B, T, C].

    memory: the encoder's output [B, S, C]; or, during generation, the state of the layer. Then x is
    the one token that follows those of the state, and its keys and values are added to the state.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.pre_norm = config.pre_norm
        self.self_attn = Attention(config)
        self.norm_1 = nn.LayerNorm(config.n_embd)
        self.encoder_attn = Attention(config)
        self.norm_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config, F.relu)
        self.norm_3 = nn.LayerNorm(config.n_embd)

    def forward(self, x: Tensor, memory: Tensor | LayerState, mask: Tensor | None) -> Tensor:
        attend, across, pre_norm = self.self_attn, self.encoder_attn, self.pre_norm
        if causal := isinstance(memory, Tensor):
            memory = LayerState(across.keys_values(memory))
        own, source = memory.extend, memory.source
        x = residual(
            x, self.norm_1, lambda y: attend(y, own(attend.keys_values(y)), causal=causal), pre_norm
        )
        x = residual(x, self.norm_2, lambda y: across(y, source, mask), pre_norm)
        return residual(x, self.norm_3, self.mlp, pre_norm)


class Stack(nn.Module):
    """The layers of the encoder or of the decoder, and with `pre_norm` the norm at their end."""

    def __init__(self, config: TransformerConfig, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd) if config.pre_norm else nn.Identity()


class Transformer(Model):
    """The Transformer as a translation model."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.positions: Tensor
        table = sinusoids(config.block_size, config.n_embd)
        self.register_buffer("positions", table, persistent=False)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = Stack(config, EncoderLayer)
        self.decoder = Stack(config, DecoderLayer)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.head.weight = self.embedding.weight
        self._init_weights()

    @torch.no_grad()
    def _init_weights(self) -> None:
        """Draw the embeddings from N(0, 1/C) and the linears from Glorot's uniform distribution;
        set biases to zero. As in fairseq, queries, keys and values count as one linear."""
        for name, parameter in self.named_parameters():
            if name == "embedding.weight":
                parameter.normal_(std=self.config.n_embd**-0.5)
            elif parameter.dim() == 2:
                is_qkv = name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
                nn.init.xavier_uniform_(parameter, gain=2**-0.5 if is_qkv else 1.0)
            elif name.endswith("bias"):
                parameter.zero_()

    def _embed(self, tokens: Tensor, first: int = 0) -> Tensor:
        """The embeddings of tokens whose first one has position `first`."""
        last = first + tokens.shape[1]
        check_length(last, self.config.block_size)
        x = self.embedding(tokens) * math.sqrt(self.config.n_embd)
        return self.dropout(x + self.positions[first:last])

    def encode(self, source: Tensor, source_mask: Tensor | None = None) -> Tensor:
        """Source tokens [B, S] -> hidden states [B, S, C]. source_mask: [B, S], 0 at padding."""
        x = self._embed(source)
        for layer in self.encoder.layers:
            x = layer(x, _broadcast(source_mask))
        return self.encoder.norm(x)

    def decode(self, input: Tensor, memory: Tensor, source_mask: Tensor | None = None) -> Tensor:
        """Target tokens [B, T] -> logits [B, T, V] of the token that follows each. memory: the
        encoder's output."""
        x = self._embed(input)
        for layer in self.decoder.layers:
            x = layer(x, memory, _broadcast(source_mask))
        return self.head(self.decoder.norm(x))

    def start(self, memory: Tensor) -> list[LayerState]:
        """The state of `decode_next` before the first token. memory: the encoder's output."""
        layers: Any = self.decoder.layers
        return [LayerState(layer.encoder_attn.keys_values(memory)) for layer in layers]

    def decode_next(
        self, input: Tensor, state: list[LayerState], source_mask: Tensor | None = None
    ) -> Tensor:
        """One target token [B, 1] -> logits [B, V] of the token that follows it.

        The token follows those in `state`, and its keys and values are added to the state.
        """
        before = 0 if state[0].own is None else state[0].own[0].shape[2]
        x = self._embed(input, before)
        for layer, layer_state in zip(self.decoder.layers, state, strict=True):
            x = layer(x, layer_state, _broadcast(source_mask))
        return self.head(self.decoder.norm(x))[:, -1]

    def forward(
        self,
        source: Tensor,
        input: Tensor,
        target: Tensor | None = None,
        source_mask: Tensor | None = None,
        target_tokens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Pairs -> (logits [B, T, V], loss or None).

        The loss is the sum of the cross entropies in nats, label-smoothed in training, divided by
        `target_tokens`. Raises ValueError if a sequence is longer than `block_size`.

        Args:
            source: [B, S]. input: [B, T], the target tokens before those to predict.
            target: [B, T], the tokens to predict; -1 is ignored.
            source_mask: [B, S], 0 at padding; None = no padding.
            target_tokens: scalar; None = the number of predicted tokens, for a mean loss.
        """
        logits = self.decode(input, self.encode(source, source_mask), source_mask)
        if target is None:
            return logits, None
        loss = F.cross_entropy(
            logits.flatten(0, 1),
            target.flatten(),
            ignore_index=-1,
            reduction="sum",
            label_smoothing=self.config.label_smoothing if self.training else 0.0,
        )
        count = (target != -1).sum() if target_tokens is None else target_tokens
        return logits, loss / count


def _broadcast(mask: Tensor | None) -> Tensor | None:
    """A token mask [B, S] as [B, 1, 1, S], for all heads and queries."""
    return None if mask is None else mask.bool()[:, None, None, :]
