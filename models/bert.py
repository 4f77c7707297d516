"""BERT (Devlin et al., 2019, arXiv 1810.04805), and Cramming's variant of it (Geiping and
Goldstein, 2023, arXiv 2212.14034).

Shapes: B sequences, T tokens, C = n_embd channels, H = n_head heads, V = vocab_size, N predicted
tokens.

Original: every sub-layer's sum is normed (post-norm), biases, learned positions, GELU (erf), a
transform before the decoder, dropout. Cramming: sub-layers take a normed input (pre-norm, and a
norm at the end), linears without biases, GEGLU, scaled sinusoidal positions, no transform, no
dropout. Both norm the embeddings and have two token types.

The decoder is tied to the word embeddings: one entry of `parameters()`, two in `state_dict()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.base import Model, check_sizes
from models.positions import sinusoids

if TYPE_CHECKING:
    from transformers import BertForMaskedLM, BertForPreTraining

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
class BertConfig:
    """Shape and variant of a BERT. `vocab_size` 30528 is BERT's 30522 rounded up to a multiple of
    64.

    n_inner: outputs of a feed-forward network's first linear; None = 4 * n_embd. With `glu` half of
        them are the gates, so that the second linear takes n_inner / 2.
    block_size: longest sequence. pre_norm, glu: see the module. bias: of the linears; norms always
        have theirs. positions: `learned` or `sinusoidal`. head_transform: a linear, GELU and norm
        before the decoder. next_sentence: a pooler and the classifier of sentence pairs.
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

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.glu and self.ffn_width % 2:
            raise ValueError(f"n_inner must be even with glu, got {self.ffn_width}")
        if self.positions not in ("learned", "sinusoidal"):
            raise ValueError(f"positions must be 'learned' or 'sinusoidal', got {self.positions!r}")
        if self.positions == "sinusoidal" and self.n_embd % 2:
            raise ValueError(f"n_embd must be even with sinusoidal positions, got {self.n_embd}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")

    @property
    def ffn_width(self) -> int:
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    @classmethod
    def of_size(cls, size: str, **overrides: Any) -> BertConfig:
        """The config of a named size: `base`, `large`, `cramming`, or `nano` for the CPU;
        `overrides` are fields."""
        if size not in SIZES:
            raise ValueError(f"unknown BERT size {size!r}; choose from {', '.join(SIZES)}")
        return cls(**{**SIZES[size], **overrides})


def _norm(config: BertConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.n_embd, eps=EPS)


class SinusoidalPositions(nn.Module):
    """Sines and cosines of Vaswani et al. (2017) times one learned scale, 1 / sqrt(C) at first
    (Hua et al., 2022, arXiv 2202.10447): positions [T] -> [T, C]."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.table: Tensor
        table = sinusoids(config.block_size, config.n_embd)
        self.register_buffer("table", table, persistent=False)
        self.scale = nn.Parameter(torch.full((1,), config.n_embd**-0.5))

    def forward(self, positions: Tensor) -> Tensor:
        return self.scale * self.table[positions]


class Embeddings(nn.Module):
    """Layer-normalised sum of token, type and position embeddings: ids [B, T], types [B, T] -> [B,
    T, C]."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.n_embd)
        self.position_embeddings = (
            nn.Embedding(config.block_size, config.n_embd)
            if config.positions == "learned"
            else SinusoidalPositions(config)
        )
        self.token_type_embeddings = nn.Embedding(TOKEN_TYPES, config.n_embd)
        self.norm = _norm(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, input: Tensor, token_types: Tensor | None) -> Tensor:
        if token_types is None:
            token_types = torch.zeros_like(input)
        positions = torch.arange(input.shape[1], device=input.device)
        x = self.word_embeddings(input) + self.token_type_embeddings(token_types)
        return self.dropout(self.norm(x + self.position_embeddings(positions)))


class SelfAttention(nn.Module):
    """Heads of bidirectional self-attention, [B, T, C] -> [B, T, C], before their projection."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.n_head, -1))  # [B, T, 3, H, C/H]
        q, k, v = qkv.transpose(1, 3).unbind(2)  # each [B, H, T, C/H]
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
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


class MLP(nn.Module):
    """Feed-forward network, [B, T, C] -> [B, T, C].

    GEGLU is value * GELU(gate), GELU in its tanh form, the first half of fc1's outputs being the
    values, the second the gates.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.glu = config.glu
        inner = config.ffn_width // 2 if config.glu else config.ffn_width
        self.fc1 = nn.Linear(config.n_embd, config.ffn_width, bias=config.bias)
        self.fc2 = nn.Linear(inner, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        u = self.fc1(x)
        if self.glu:
            value, gate = u.chunk(2, dim=-1)
            u = value * F.gelu(gate, approximate="tanh")
        else:
            u = F.gelu(u)
        return self.dropout(self.fc2(u))


class Layer(nn.Module):
    """Transformer layer, [B, T, C] -> [B, T, C]."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.pre_norm = config.pre_norm
        self.attention = Attention(config)
        self.norm_1 = _norm(config)
        self.mlp = MLP(config)
        self.norm_2 = _norm(config)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if self.pre_norm:
            x = x + self.attention(self.norm_1(x), mask)
            return x + self.mlp(self.norm_2(x))
        x = self.norm_1(x + self.attention(x, mask))
        return self.norm_2(x + self.mlp(x))


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
        self.norm = _norm(config) if config.pre_norm else nn.Identity()
        self.pooler = Pooler(config) if config.next_sentence else None

    def forward(
        self, input: Tensor, token_types: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Token ids [B, T] -> hidden states [B, T, C].

        Args:
            token_types: [B, T] of 0 and 1; None = all 0.
            attention_mask: [B, T], 0 where there is padding; None = nowhere, which is faster.
        Raises:
            ValueError: the sequence is longer than `block_size`.
        """
        if input.shape[1] > self.config.block_size:
            raise ValueError(
                f"sequence of {input.shape[1]} tokens is longer than the model's "
                f"block_size={self.config.block_size}"
            )
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        x = self.embeddings(input, token_types)
        for layer in self.layer:
            x = layer(x, mask)
        return self.norm(x)


class Transform(nn.Module):
    """The linear layer, activation and norm before the decoder, [..., C] -> [..., C]."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.norm = _norm(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(F.gelu(self.dense(x)))


class Predictions(nn.Module):
    """The head for masked words: hidden states [..., C] -> logits [..., V]."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.transform = Transform(config) if config.head_transform else nn.Identity()
        self.decoder = nn.Linear(config.n_embd, config.vocab_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.transform(x))


class BertLM(Model):
    """Masked language model, with the classifier of sentence pairs if the config has it."""

    TRUNK: ClassVar[str] = "bert"

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.bert = Bert(config)
        self.predictions = Predictions(config)
        self.predictions.decoder.weight = self.bert.embeddings.word_embeddings.weight
        self.seq_relationship = nn.Linear(config.n_embd, 2) if config.next_sentence else None
        self._init_weights()

    @torch.no_grad()
    def _init_weights(self) -> None:
        """N(0, 0.02), zero biases."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.02)
            elif name.endswith("bias"):
                parameter.zero_()

    def forward(
        self,
        input: Tensor,
        target: Tensor | None = None,
        token_types: Tensor | None = None,
        attention_mask: Tensor | None = None,
        next_sentence: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Token ids [B, T] -> (logits, loss or None).

        Without `target` the logits are those of every position, [B, T, V]. With it they are those
        of the N predicted positions alone, [N, V], in row-major order: most of a head's work would
        be for positions that nobody asks about. The loss is their mean cross entropy in nats,
        plus, with `next_sentence`, the mean cross entropy of the pairs.

        Args:
            target: [B, T], the ids to predict, -1 elsewhere; at least one.
            token_types, attention_mask: see `Bert`.
            next_sentence: [B], 0 where the second sentence follows the first, 1 where it does not.
        Raises:
            ValueError: the sequence is too long, or `next_sentence` is asked of a model without it.
        """
        if next_sentence is not None and self.seq_relationship is None:
            raise ValueError(
                "the model has no classifier of sentence pairs: set model.next_sentence=true, or "
                "data.next_sentence=false"
            )
        hidden = self.bert(input, token_types, attention_mask)
        if target is None:
            return self.predictions(hidden), None
        predicted = target != -1
        logits = self.predictions(hidden[predicted])
        loss = F.cross_entropy(logits, target[predicted])
        if next_sentence is not None:
            loss = loss + F.cross_entropy(self.sentence_logits(hidden), next_sentence)
        return logits, loss

    def sentence_logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [B, T, C] -> logits [B, 2] of (follows, does not follow)."""
        assert self.bert.pooler is not None and self.seq_relationship is not None
        return self.seq_relationship(self.bert.pooler(hidden))

    def num_params(self) -> int:
        """Number of parameters: the tied decoder counts once."""
        return sum(parameter.numel() for parameter in self.parameters())


# ------------------------------------------------------------------------------ transformers

# Our names and those of transformers, as parts of names.
_NAMES = (
    ("bert.layer.", "bert.encoder.layer."),
    (".attention.output.", ".attention.output.dense."),
    (".norm_1.", ".attention.output.LayerNorm."),
    (".mlp.fc1.", ".intermediate.dense."),
    (".mlp.fc2.", ".output.dense."),
    (".norm_2.", ".output.LayerNorm."),
    ("embeddings.norm.", "embeddings.LayerNorm."),
    ("transform.norm.", "transform.LayerNorm."),
    ("predictions.", "cls.predictions."),
    ("seq_relationship.", "cls.seq_relationship."),
)
_QKV = ("query", "key", "value")
_DECODER = "predictions.decoder.weight"


def _their_names(name: str) -> list[str]:
    """The names in transformers of one of our tensors: three for the fused projection, else one.

    Its decoder's bias has a second name there, which is left out.
    """
    for ours, theirs in _NAMES:
        name = name.replace(ours, theirs)
    return [name.replace(".qkv.", f".{part}.") for part in _QKV] if ".qkv." in name else [name]


@torch.no_grad()
def from_hf(hf_model: BertForMaskedLM | BertForPreTraining) -> BertLM:
    """Our BERT with a copy of the weights of transformers' model, in its dtype.

    Raises:
        ValueError: it names every setting that this model does not have.
    """
    hf, theirs = hf_model.config, hf_model.state_dict()
    required = {
        "model_type": "bert",
        "hidden_act": "gelu",
        "layer_norm_eps": EPS,
        "type_vocab_size": TOKEN_TYPES,
        "attention_probs_dropout_prob": hf.hidden_dropout_prob,  # one dropout rate for all places
        "is_decoder": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    }
    problems = [
        f"{name}={getattr(hf, name)!r} (needs {value!r})"
        for name, value in required.items()
        if getattr(hf, name) != value
    ]
    if getattr(hf, "position_embedding_type", "absolute") != "absolute":  # in older releases
        problems.append(f"position_embedding_type={hf.position_embedding_type!r}")
    if "cls.predictions.transform.dense.weight" not in theirs:
        problems.append(f"{type(hf_model).__name__} has no head for masked language modelling")
    if problems:
        raise ValueError(f"this BERT cannot be converted: {'; '.join(problems)}")
    model = BertLM(
        BertConfig(
            n_layer=hf.num_hidden_layers,
            n_head=hf.num_attention_heads,
            n_embd=hf.hidden_size,
            n_inner=hf.intermediate_size,
            vocab_size=hf.vocab_size,
            block_size=hf.max_position_embeddings,
            next_sentence="cls.seq_relationship.weight" in theirs,
            dropout=hf.hidden_dropout_prob,
        )
    ).to(hf_model.dtype)
    model.load_state_dict(
        {name: torch.cat([theirs[n] for n in _their_names(name)]) for name in model.state_dict()}
    )
    return model.train(hf_model.training)


@torch.no_grad()
def to_hf(model: BertLM) -> BertForMaskedLM | BertForPreTraining:
    """The transformers model with a copy of our weights, in their dtype: `BertForPreTraining` if
    there is a classifier of sentence pairs, else `BertForMaskedLM`.

    Raises:
        ValueError: the model is not of the original form, or holds tensors that BERT does not have,
            as it does while a sparse method is attached.
    """
    import transformers

    config, state = model.config, model.state_dict()
    form = {
        "pre_norm": False,
        "bias": True,
        "glu": False,
        "positions": "learned",
        "head_transform": True,
    }
    if other := [f"{k}={getattr(config, k)}" for k, v in form.items() if getattr(config, k) != v]:
        raise ValueError(
            f"transformers' BERT has no place for {', '.join(other)}: only the original form can "
            "be exported"
        )
    _check_plain(state, config)
    kind = "BertForPreTraining" if config.next_sentence else "BertForMaskedLM"
    hf_model: Any = getattr(transformers, kind)(
        transformers.BertConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.n_embd,
            num_hidden_layers=config.n_layer,
            num_attention_heads=config.n_head,
            intermediate_size=config.ffn_width,
            hidden_act="gelu",
            hidden_dropout_prob=config.dropout,
            attention_probs_dropout_prob=config.dropout,
            max_position_embeddings=config.block_size,
            type_vocab_size=TOKEN_TYPES,
            layer_norm_eps=EPS,
        )
    )
    hf_model.to(state[_DECODER].dtype)
    theirs: dict[str, Tensor] = {}
    for name, tensor in state.items():
        names = _their_names(name)
        theirs.update(zip(names, tensor.chunk(len(names)), strict=True))
    theirs["cls.predictions.bias"] = state["predictions.decoder.bias"]
    hf_model.load_state_dict(theirs)
    return hf_model.train(model.training)


def _check_plain(state: Mapping[str, Tensor], config: BertConfig) -> None:
    with torch.device("meta"):
        expected = BertLM(config).state_dict()
    if extra := sorted(state.keys() ^ expected.keys()):
        raise ValueError(
            f"not a plain BERT ({extra[0]} and {len(extra) - 1} more names differ); "
            "call the method's finalize(model) first"
        )
